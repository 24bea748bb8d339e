"""Which tags a run has had, so that what it gives no more reads nan: not as zero, nor as it last did."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from attn_monitor.tags import OVERVIEW, PLUGIN, layer_tag


class Given:
    """Completes the scalars of a record by the tags of earlier ones.

    A layer that ran gives all it ever gave, as nan where there is no number now. So does one whose attention was lost.
    A layer that did not run, as under layer drop, has no new number, and what is known of it stays.

    Args:
        prefix: What stands before every tag.
    """

    def __init__(self, prefix: str = "") -> None:
        self._model_wide = (f"{prefix}{PLUGIN}", f"{prefix}{OVERVIEW}")
        self._tags: dict[str, dict[str, None]] = {}

    def completed(
        self, tags: Mapping[str, float], layers: Collection[str], lost: Collection[str] | None = ()
    ) -> dict[str, float]:
        """Return the scalars of a record with all that is missing, and remember them.

        Args:
            tags: The scalars of the record.
            layers: The layers of the record.
            lost: The layers that ran and could not be measured; `None` if the whole record was lost.
        """
        for tag in tags:
            self._tags.setdefault(self._owner(tag), {}).setdefault(tag)
        if lost is None:
            owners = list(self._tags)
        else:
            ran = [f"/{layer_tag(layer)}" for layer in dict.fromkeys([*layers, *lost])]
            owners = [*ran, ""] if ran else []  # where nothing ran, nothing was lost
        missing = {tag: math.nan for owner in owners for tag in self._tags.get(owner, ()) if tag not in tags}
        return {**tags, **missing}

    def _owner(self, tag: str) -> str:
        """Return the layer of a tag behind a slash, nothing for a tag of the whole model."""
        group, _, rest = tag.partition("/")
        return "" if group in self._model_wide else f"/{rest}"

"""What grew: every head's factors beside those of the first record that had them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from attn_monitor.dashboards.tables import Snapshot
from attn_monitor.growth import GROWN, PRODUCT, ratio


class FirstFactors:
    """Remembers the first factors of every head."""

    def __init__(self) -> None:
        self._first: dict[str, NDArray[np.float32]] = {}
        self._since: int | None = None

    @property
    def since(self) -> int | None:
        """The step of the first record."""
        return self._since

    def take(self, snapshot: Snapshot) -> None:
        """Remember the factors of heads that had none before."""
        if self._since is None:
            self._since = snapshot.step
        for name in PRODUCT:
            now = snapshot.tables.get(name)
            if now is None:
                continue
            first = np.full(now.shape, np.nan, dtype=np.float32)
            if (before := self._first.get(name)) is not None:
                first[: before.shape[0], : before.shape[1]] = before
            self._first[name] = np.where(np.isnan(first), now, first)

    def of(self, snapshot: Snapshot, row: int, head: int) -> dict[str, float]:
        """Return by what each factor of a head grew, of those that are known."""
        before = {name: float(first[row, head]) for name, first in self._first.items()}
        now = {name: float(snapshot.tables[name][row, head]) for name in before if name in snapshot.tables}
        grown = {name: ratio(now, before, name) for name in now}
        return {name: by for name, by in grown.items() if by is not None}


def most_grown(grown: Mapping[str, float]) -> str:
    """Return the factor that grew most, in words.

    Example:
        >>> most_grown({"q_rms": 1.5, "k_rms": 3.0}), most_grown({"q_rms": 1.1})
        ('k_rms, 3x', 'nothing')
    """
    name = max(grown, key=lambda factor: grown[factor], default="")
    return f"{name}, {grown[name]:.3g}x" if name and grown[name] >= GROWN else "nothing"

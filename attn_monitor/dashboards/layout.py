"""The layout of TensorBoard's custom scalars: bands from the mean over the heads to the worst head, layer by layer.

A run has one layout, and the last one written replaces the others. So ours is written only where there is none.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG_TAG = "custom_scalars__config__"
"""The tag under which TensorBoard keeps a run's layout."""

Layout = dict[str, dict[str, list[Any]]]
"""What `SummaryWriter.add_custom_scalars` takes: category, chart, kind and tags."""


def bands(tags: Iterable[str], prefix: str = "") -> Layout:
    """Return a category per statistic with a band per layer.

    A band reaches from the mean to the worst head. A statistic of which no direction is worse has no worst head and no
    band.

    Args:
        tags: The scalar tags of a record.
        prefix: What stands before each of them.
    """
    known = list(tags)
    present = set(known)
    layout: Layout = {}
    for tag in known:
        group, separator, layer = tag.removeprefix(prefix).partition("/")
        for worst, order in (("_max", (0, 0, 1)), ("_min", (0, 1, 0))):
            partner = f"{prefix}{group}{worst}/{layer}"
            if separator and partner in present:
                pair = (tag, partner)
                layout.setdefault(f"{prefix}{group}", {})[layer] = ["Margin", [pair[index] for index in order]]
    return layout


def categories_written(folder: str) -> list[str] | None:
    """Return the categories of the layout that a run has already, `None` if it has none.

    Raises:
        FileNotFoundError: If the folder is not on this machine, so that nobody can tell.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder on this machine: {folder}")
    found: list[str] | None = None
    for file in sorted(path.glob("*tfevents*")):
        if _mentions(file, CONFIG_TAG.encode()):
            found = _categories(file) or found
    return found


def is_ours(categories: Iterable[str], layout: Mapping[str, object]) -> bool:
    """Tell whether a layout holds nothing but what `layout` has as well."""
    return set(categories) <= set(layout)


def _mentions(file: Path, text: bytes) -> bool:
    """Look for bytes without reading records, whose checksums take seconds in a long run."""
    if not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def _categories(file: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.plugins.custom_scalar import layout_pb2

    titles: list[str] = []
    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.tag == CONFIG_TAG and value.tensor.string_val:
                layout = layout_pb2.Layout.FromString(value.tensor.string_val[0])
                titles = [category.title for category in layout.category]
    return titles

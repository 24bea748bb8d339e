"""What of a run goes into a page of bounded size: all of it, or the steps that matter and some between."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attn_monitor.views import RunData, Series, Table

_BASE64 = 4 / 3
_POINT = 32
"""About the bytes of a step and a value as JSON."""
_FEWEST_STEPS = 2
_FEWEST_POINTS = 20
_MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """A run as far as it fits.

    Attributes:
        run: What is left.
        notes: What was left out, in words.
    """

    run: RunData
    notes: Sequence[str]


def thin(runs: Sequence[RunData], size: float) -> list[Thinned]:
    """Return the runs so that all of them together take about `size` bytes as JSON.

    The first step, the last one and those of events stay while they fit, then as many as fit at even distances.
    What a small run does not need, larger ones may use.
    """
    shares: dict[int, float] = {}
    left = size
    for place, index in enumerate(sorted(range(len(runs)), key=lambda index: _size(runs[index]))):
        shares[index] = left / (len(runs) - place)
        left -= min(shares[index], _size(runs[index]))
    return [_thin(run, shares[index]) for index, run in enumerate(runs)]


def _size(run: RunData) -> float:
    return _table_size(run) + sum(_POINT * len(points.steps) for points in run.scalars.values())


def _table_size(run: RunData) -> float:
    return sum(_BASE64 * table.values.nbytes for table in run.tables.values())


def _thin(run: RunData, size: float) -> Thinned:
    events, left_out = _thin_events(run.events, size / 4)
    scalars = {tag: _thin_series(points, size / 4 / len(run.scalars)) for tag, points in run.scalars.items()}
    room = size - sum(_POINT * len(points.steps) for points in scalars.values()) - _events_size(events)
    steps, kept = run.steps, _kept_steps(run, room)
    notes = []
    if len(kept) < len(steps):
        notes.append(
            f"{run.name}: {len(steps) - len(kept)} of {len(steps)} observed steps are left out of the page to bound "
            "its size: the first, the last and, while they fit, those of events stay, and others at even distances"
        )
    if left_out:
        notes.append(f"{run.name}: the last {left_out} of {len(run.events)} event records are left out of the page")
    tables: Mapping[str, Table] = run.tables
    if len(kept) < len(steps):
        tables = {name: _at_steps(table, kept) for name, table in run.tables.items()}
    return Thinned(replace(run, tables=tables, scalars=scalars, events=events), notes)


def _kept_steps(run: RunData, room: float) -> NDArray[np.int64]:
    steps = run.steps
    number = max(int(room / max(_table_size(run) / max(len(steps), 1), 1)), _FEWEST_STEPS)
    if len(steps) <= number:
        return steps
    known = set(steps.tolist())
    wanted = [int(steps[0]), int(steps[-1]), *(event.get("step") for event in run.events)]
    kept = dict.fromkeys(step for step in wanted if isinstance(step, int) and step in known)
    chosen = list(kept)[: max(3 * number // 4, _FEWEST_STEPS)]
    others = np.setdiff1d(steps, chosen)
    room_left = number - len(chosen)
    between = (np.arange(1, room_left + 1) * len(others) / (room_left + 1)).astype(np.int64)
    return np.union1d(np.array(chosen, np.int64), others[between])


def _at_steps(table: Table, steps: NDArray[np.int64]) -> Table:
    kept = np.isin(table.steps, steps)
    return Table(table.steps[kept], table.values[kept])


def _thin_events(events: Sequence[Mapping[str, object]], size: float) -> tuple[Sequence[Mapping[str, object]], int]:
    """Return the first events that fit, and how many do not."""
    used = 0.0
    for index, event in enumerate(events):
        used += len(json.dumps(event))
        if used > size and index:
            return events[:index], len(events) - index
    return events, 0


def _events_size(events: Sequence[Mapping[str, object]]) -> int:
    return sum(len(json.dumps(event)) for event in events)


def _thin_series(points: Series, size: float) -> Series:
    """Return the lowest and the highest point of each of equal pieces, so that no spike is lost."""
    number = int(min(max(size / _POINT, _FEWEST_POINTS), _MOST_POINTS))
    if len(points.steps) <= number:
        return points
    pieces = np.array_split(np.arange(len(points.steps)), number // 2 - 1)
    kept = {0, len(points.steps) - 1}
    for piece in pieces:
        values = points.values[piece]
        kept |= {int(piece[np.argmin(values)]), int(piece[np.argmax(values)])}  # nan counts as both
    order = sorted(kept)
    return Series(points.steps[order], points.values[order])

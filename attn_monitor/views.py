"""What the Attention tab and the report show of a run: stored tensors become `RunData`, and that becomes JSON.

Needs neither torch nor Lightning. Arrays are [S, L, H]: steps, layers, heads.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from attn_monitor.catalog import STATISTICS, Direction
from attn_monitor.scales import RATIO, STANDARD_ERROR, scale_of
from attn_monitor.stored_events import is_note, names_a_head, parsed, worst_first
from attn_monitor.tags import (
    BESIDE_THE_CATALOG,
    EVENTS_TAG,
    HEAD_DIM_TAG,
    LAYERS_TAG,
    LEGEND_TAG,
    NOTE_RECORDS_TAG,
    NOTES_TAG,
    PLUGIN,
    RECORDS_TAG,
    STAGE_PREFIXES,
    SUMMARY_TAG,
)

_STAGE_WORDS = {"validate": "validation", "test": "test", "predict": "prediction"}
STAGES: Mapping[str, str] = {"": "", **{prefix: _STAGE_WORDS[stage] for stage, prefix in STAGE_PREFIXES.items()}}
"""What the prefix of a stage stands for."""
PREFIX = rf"(?:monitor\d+_)?(?:{'|'.join(STAGE_PREFIXES.values())})?"
"""What may stand before a tag: the number of the monitor, of the second one on, and the stage."""
_ROOT = f"{PLUGIN}/"
_BESIDE_TABLES = (LAYERS_TAG, HEAD_DIM_TAG, RECORDS_TAG, NOTE_RECORDS_TAG)
_NO_TABLES = {tag.removeprefix(_ROOT) for tag in (*_BESIDE_TABLES, EVENTS_TAG, NOTES_TAG, SUMMARY_TAG, LEGEND_TAG)}
_PREFIXED = re.compile(f"^{PREFIX}(?=attn(_|/))")
_OVERVIEW = {*STATISTICS, *BESIDE_THE_CATALOG, "saturated_heads", "observed_layers", "sampling_error"}
"""What our group of model-wide curves, `attn`, holds; a user may have a group of that name too."""
_WORSE_UP = {RATIO, "nonfinite"}
"""What stands beside the catalogue and has a direction."""

_Value = TypeVar("_Value")


class Table(NamedTuple):
    """A statistic of every head at every observed step; nan where there is no such head or value."""

    steps: NDArray[np.int64]  # [S], growing
    values: NDArray[np.float32]  # [S, L, H]


class Series(NamedTuple):
    """A scalar over time."""

    steps: NDArray[np.int64]  # [S], growing
    values: NDArray[np.float64]  # [S]


@dataclass(frozen=True, slots=True, eq=False)
class RunData:
    """Everything one monitor stored in one run, of one stage.

    Attributes:
        name: The name of the run, with the monitor if it is not the first and the stage if it is not training.
        layers: Names of the rows of every table.
        head_dims: D of query and key by layer, `None` if unknown.
        threshold: The limit of `saturation_ratio`, `None` if unknown.
        tables: By name of the statistic; may load on access.
        events: What was opened, became critical or ended, oldest first, of one step the worst head first.
        scalars: The user's own, by tag; may load on access.
        notes: What was said beside the events, such as a wrong scale and forecasts, oldest first: `step` and `note`.
    """

    name: str
    layers: Sequence[str]
    head_dims: Sequence[int | None]
    threshold: float | None
    tables: Mapping[str, Table]
    events: Sequence[Mapping[str, object]]
    scalars: Mapping[str, Series]
    notes: Sequence[Mapping[str, object]] = ()

    @property
    def steps(self) -> NDArray[np.int64]:
        """The observed steps, [S]."""
        name = primary(self.tables)
        return np.zeros(0, np.int64) if name is None else self.tables[name].steps


def primary(names: Iterable[str]) -> str | None:
    """Return the statistic that is shown first and that tells which steps and heads there are."""
    names = list(names)
    return next((name for name in (RATIO, "nonfinite") if name in names), names[0] if names else None)


def stages(tags: Iterable[str]) -> list[str]:
    """Return the prefixes under which these tags hold tables, monitor by monitor."""
    found = {match[0] for tag in tags if (match := _PREFIXED.match(tag)) and statistic_of(tag, match[0])}
    return sorted(found, key=lambda prefix: (number_and_stage(prefix)[0], list(STAGES).index(_stage(prefix))))


def number_and_stage(prefix: str) -> tuple[int, str]:
    """Return the number of the monitor and the name of the stage that a prefix stands for.

    Example:
        >>> number_and_stage("monitor2_val_"), number_and_stage("")
        ((2, 'validation'), (1, ''))
    """
    number = re.match(r"monitor(\d+)_", prefix)
    return int(number[1]) if number else 1, STAGES[_stage(prefix)]


def _stage(prefix: str) -> str:
    return re.sub(r"^monitor\d+_", "", prefix)


def statistic_of(tag: str, prefix: str = "") -> str | None:
    """Return the statistic whose table a tag holds, `None` for every other tag."""
    root = prefix + _ROOT
    name = tag.removeprefix(root)
    return name if tag.startswith(root) and name and "/" not in name and name not in _NO_TABLES else None


def beside_tables(prefix: str = "") -> list[str]:
    """Return the tags of the names of the layers, of their head dimensions, of the events and of the notes."""
    return [f"{prefix}{tag}" for tag in _BESIDE_TABLES]


def threshold_of(content: bytes | str) -> float | None:
    """Return the limit from the plugin content that the tag of `saturation_ratio` carries."""
    try:
        threshold = json.loads(content)["threshold"]
    except (ValueError, KeyError, TypeError):
        return None
    return float(threshold) if isinstance(threshold, (int, float)) and math.isfinite(threshold) else None


def is_users(tag: str) -> bool:
    """Tell a user's scalar from those of attn_monitor."""
    group, _, rest = _PREFIXED.sub("", tag, count=1).partition("/")
    return not (group.startswith("attn_") or (group == "attn" and re.sub("_(max|min)$", "", rest) in _OVERVIEW))


def run_name(directory: str, prefix: str = "") -> str:
    """Return how the data of one monitor and stage of a run is called."""
    number, stage = number_and_stage(prefix)
    parts = [f"monitor {number}"] * (number > 1) + [stage] * bool(stage)
    return f"{directory} ({', '.join(parts)})" if parts else directory


def settle(points: Iterable[tuple[int, _Value]]) -> list[tuple[int, _Value]]:
    """Return points in the order written as a growing series.

    A step written twice keeps the last; a step that goes back, as in a resumed run, drops what was later.
    """
    kept: list[tuple[int, _Value]] = []
    for step, value in points:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((int(step), value))
    return kept


def table(points: Iterable[tuple[int, NDArray[Any]]]) -> Table:
    """Return the [layers, heads] arrays of one tag as one; models that grew are padded with nan."""
    kept = settle((step, value) for step, value in points if value.ndim == 2 and value.dtype.kind in "fiu")
    steps = np.array([step for step, _ in kept], np.int64)
    shape = tuple(max((value.shape[axis] for _, value in kept), default=0) for axis in (0, 1))
    values = np.full((len(kept), *shape), np.nan, np.float32)
    for index, (_, value) in enumerate(kept):
        values[index, : value.shape[0], : value.shape[1]] = value
    return Table(steps, values)


def series(points: Iterable[tuple[int, float]]) -> Series:
    """Return the points of a scalar as arrays."""
    kept = settle(points)
    return Series(np.array([step for step, _ in kept], np.int64), np.array([value for _, value in kept], np.float64))


def assemble(
    name: str,
    tensors: Mapping[str, Sequence[tuple[int, NDArray[Any]]]],
    scalars: Mapping[str, Series],
    *,
    threshold: float | None = None,
    prefix: str = "",
    tables: Mapping[str, Table] | None = None,
) -> RunData:
    """Return the data of one stage of a run.

    Args:
        name: The run's directory; the stage is added to it.
        tensors: What was written, by tag, each in the order written: (step, array).
        scalars: The user's scalars by tag.
        threshold: The limit of `saturation_ratio`, see `threshold_of`.
        prefix: The monitor and the stage, see `stages`.
        tables: Tables that load on access, instead of those in `tensors`.
    """
    layers_tag, dims_tag, events_tag, notes_tag = beside_tables(prefix)
    if tables is None:
        found = {statistic: tag for tag in tensors if (statistic := statistic_of(tag, prefix))}
        tables = {statistic: table(tensors[found[statistic]]) for statistic in sort_statistics(found)}
    layers = [_text(entry) for entry in _last(tensors.get(layers_tag, ()))]
    head_dims = [_whole(entry) for entry in _last(tensors.get(dims_tag, ()))]
    main = primary(tables)
    rows = 0 if main is None else tables[main].values.shape[1]
    layers += [f"layer {index}" for index in range(len(layers), rows)]  # their names were lost
    head_dims = [*head_dims, *[None] * len(layers)][: len(layers)]
    told = worst_first(filter(names_a_head, _records(tensors.get(events_tag, ()))))
    notes = list(filter(is_note, _records(tensors.get(notes_tag, ()))))
    return RunData(run_name(name, prefix), layers, head_dims, threshold, tables, told, scalars, notes)


def _records(points: Sequence[tuple[int, NDArray[Any]]]) -> list[dict[str, object]]:
    return [parsed(_text(entry)) for _, batch in settle(points) for entry in batch.ravel()]


def sort_statistics(names: Iterable[str]) -> list[str]:
    """Return names in the order they are offered: the ratio, the catalogue, the rest."""
    order = [RATIO, *STATISTICS, *BESIDE_THE_CATALOG]
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def run_meta(run: RunData) -> dict[str, object]:
    """Return what there is to show: names, steps, statistics with their meaning and colour scale."""
    return {
        "name": run.name,
        "layers": list(run.layers),
        "heads": _heads(run),
        "head_dims": list(run.head_dims),
        "steps": run.steps.tolist(),
        "statistics": [_describe(name, run) for name in sort_statistics(run.tables)],
        "scalars": list(run.scalars),
        "events": len(run.events),
        "notes": [{"step": note["step"], "note": note["note"]} for note in run.notes],
    }


def frames(run: RunData, statistic: str, steps: slice) -> dict[str, object]:
    """Return some steps of a table, by index into the run's steps; nan where the statistic has no such step.

    `data` is the base64 of little-endian float32 in the order of `shape`: it keeps nan and inf, which JSON does not.

    Raises:
        KeyError: If the run has no such statistic.
    """
    stored = run.tables[statistic]
    wanted = run.steps[steps]
    places = np.searchsorted(stored.steps, wanted)
    known = places < len(stored.steps)
    known[known] = stored.steps[places[known]] == wanted[known]
    values = np.full((len(wanted), *stored.values.shape[1:]), np.nan, "<f4")
    values[known] = stored.values[places[known]]
    data = base64.b64encode(values.tobytes()).decode("ascii")
    return {"steps": wanted.tolist(), "shape": list(values.shape), "data": data}


def line(run: RunData, layer: int, head: int, statistics: Iterable[str] | None = None) -> dict[str, object]:
    """Return statistics of one head over all steps, every one for `None`.

    Raises:
        KeyError: If the run has no such statistic.
        IndexError: If it has no such layer or head.
    """
    lines = {}
    if not 0 <= layer < len(run.layers):
        raise IndexError(f"layer {layer} of {len(run.layers)}")
    if not 0 <= head < max(1, _heads(run)[layer]):
        raise IndexError(f"head {head} of {_heads(run)[layer]}")
    for name in sort_statistics(run.tables if statistics is None else statistics):
        steps, values = run.tables[name]
        inside = layer < values.shape[1] and head < values.shape[2]
        lines[name] = {
            "steps": steps.tolist(),
            "values": _numbers(values[:, layer, head]) if inside else [None] * len(steps),
        }
    return {"statistics": lines}


def events(run: RunData) -> list[dict[str, object]]:
    """Return the events, oldest first."""
    return [dict(event) for event in run.events]


def scalar(run: RunData, tag: str) -> dict[str, object]:
    """Return one of the user's scalars; what is not finite is null.

    Raises:
        KeyError: If the run has no such scalar.
    """
    steps, values = run.scalars[tag]
    return {"steps": steps.tolist(), "values": _numbers(values)}


def _describe(name: str, run: RunData) -> dict[str, object]:
    base = name.removesuffix(STANDARD_ERROR)
    row = STATISTICS.get(base)
    definition = row.definition if row else BESIDE_THE_CATALOG.get(base, base)
    worse: Direction | None = row.worse if row else "up" if base in _WORSE_UP else None
    if name != base:
        definition, worse = f"standard error of the {definition}, from the rows that were sampled", None
    scale = scale_of(name)
    return {
        "name": name,
        "label": name.replace("_", " "),
        "unit": row.unit if row else "",
        "definition": definition,
        "worse": worse,
        "scale": {"kind": scale.kind, "low": scale.low, "high": scale.high},
        "threshold": run.threshold if name == RATIO else None,
    }


def _heads(run: RunData) -> list[int]:
    """Return the number of heads of every layer: up to the last that ever had a value."""
    heads = [0] * len(run.layers)
    for name in sorted(run.tables, key=lambda name: name != primary(run.tables))[:2]:  # each may have to be loaded
        if all(heads):
            break
        ever = np.any(~np.isnan(run.tables[name].values), axis=0, keepdims=True)[0]
        for layer, row in enumerate(ever[: len(heads)]):
            if row.any():
                heads[layer] = max(heads[layer], int(np.flatnonzero(row)[-1]) + 1)
    return heads


def _numbers(values: NDArray[Any]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _last(points: Sequence[tuple[int, NDArray[Any]]]) -> list[Any]:
    kept = settle(points)
    return list(kept[-1][1].ravel()) if kept else []


def _text(entry: object) -> str:
    return entry.decode("utf-8", errors="replace") if isinstance(entry, bytes) else str(entry)


def _whole(entry: object) -> int | None:
    try:
        number = float(entry)  # type: ignore[arg-type] # that is what is tried
    except (TypeError, ValueError):
        return None
    return int(number) if math.isfinite(number) else None

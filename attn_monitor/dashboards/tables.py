"""All heads at once: a record as tables of layers x heads, whose rows keep their place from record to record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_monitor.catalog import STATISTICS
from attn_monitor.events import NONFINITE, SaturationEvent
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO, STANDARD_ERROR
from attn_monitor.tracking import Changes

_NOT_PER_HEAD = {"rows", "masked_rows", "scale"}
_OVERVIEW = ("entropy_normalized", "jacobian_trace", "logit_row_std", "logit_max")
"""The statistics whose worst head of the whole model is shown on top."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A record as tables.

    Attributes:
        step: The x value.
        layers: The names of the rows.
        heads: The number of heads of each layer; columns from there on are no heads.
        head_dims: [layers], nan if unknown.
        limits: The limit of the saturation ratio of each layer, [layers], nan for layers that are not in the record.
        tables: [layers, heads] float32 by name, nan where there is no such head or value.
        joined: Whether a layer or a number of heads is new since the record before, or this is the first.
    """

    step: int
    layers: tuple[str, ...]
    heads: tuple[int, ...]
    head_dims: NDArray[np.float32]
    limits: NDArray[np.float64]
    tables: Mapping[str, NDArray[np.float32]]
    joined: bool

    @property
    def observed(self) -> list[str]:
        """The layers that are in the record."""
        return [layer for layer, limit in zip(self.layers, self.limits, strict=True) if not math.isnan(limit)]

    @property
    def above(self) -> NDArray[np.bool_]:
        """Which heads are above the limit, or have logits that are nan or inf, [layers, heads]."""
        found = self.broken
        if RATIO in self.tables:
            found |= self.tables[RATIO] > self.limits[:, None]
        return found

    @property
    def broken(self) -> NDArray[np.bool_]:
        """Which heads have logits that are nan or inf, [layers, heads]."""
        if NONFINITE in self.tables:
            return self.tables[NONFINITE] > 0
        return np.zeros((len(self.layers), max(self.heads, default=0)), dtype=bool)


class Rows:
    """The layers seen so far, in the order of their rows.

    Args:
        heads: The layers of a run that is continued, and how many heads each has.
    """

    def __init__(self, heads: Mapping[str, int] | None = None) -> None:
        self._heads: dict[str, int] = dict(heads or {})
        self._head_dims: dict[str, int | None] = {}
        self._taken: dict[str, int] | None = None
        self._names: dict[str, None] = {}

    def take(self, step: int, statistics: Mapping[str, AttentionStatistics], rule: SaturationRule) -> Snapshot:
        """Return a record as tables; layers seen before and absent from it have rows of nan.

        Statistics seen before and without a number in this record are tables of nan, or what is shown of them would
        be the last healthy one.
        """
        for layer, stats in statistics.items():
            self._heads[layer] = max(stats.heads, self._heads.get(layer, 0))
            self._head_dims[layer] = stats.head_dim
        shape = (len(self._heads), max(self._heads.values(), default=0))
        rows = {layer: row for row, layer in enumerate(self._heads)}
        limits = np.full(shape[0], math.nan)
        found: dict[str, dict[int, Tensor]] = {}
        for layer, stats in statistics.items():
            own = rule.of(layer)
            limits[rows[layer]] = own.limit(stats)
            errors = {f"{name}{STANDARD_ERROR}": error for name, error in stats.standard_error.items()}
            for name, values in {**stats.measured(), **errors, RATIO: own.ratio(stats)}.items():
                if name not in _NOT_PER_HEAD:
                    found.setdefault(name, {})[rows[layer]] = values
        dims = [math.nan if dim is None else dim for dim in (self._head_dims.get(layer) for layer in self._heads)]
        tables = _tables(found, shape)
        for name in self._names if statistics else ():
            if name not in tables:
                tables[name] = np.full(shape, math.nan, dtype=np.float32)
        self._names.update(dict.fromkeys(tables))
        joined, self._taken = self._taken != self._heads, dict(self._heads)
        return Snapshot(
            step=step,
            layers=tuple(self._heads),
            heads=tuple(self._heads.values()),
            head_dims=np.array(dims, dtype=np.float32),
            limits=limits,
            tables=tables,
            joined=joined,
        )


def _tables(found: Mapping[str, Mapping[int, Tensor]], shape: tuple[int, int]) -> dict[str, NDArray[np.float32]]:
    """Return per-head values, by name and row, as tables; converting each by itself would take longer than the rest."""
    tensors = [tensor for values in found.values() for tensor in values.values()]
    entries = torch.cat(tensors).float().numpy() if tensors else np.empty(0, dtype=np.float32)
    tables, start = {}, 0
    for name, values in found.items():
        heads = tuple(tensor.numel() for tensor in values.values())
        end = start + sum(heads)
        tables[name] = np.full(shape, math.nan, dtype=np.float32)
        tables[name][_places(tuple(values), heads)] = entries[start:end]
        start = end
    return tables


@lru_cache(maxsize=16)
def _places(rows: tuple[int, ...], heads: tuple[int, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the row and the column of every head, layer by layer."""
    return np.repeat(np.array(rows), heads), np.concatenate([np.arange(count) for count in heads])


def overview(snapshot: Snapshot, chosen: Iterable[str], saturated_heads: int) -> dict[str, float]:
    """Return what is shown on top: how many heads are saturated, and the worst head of the whole model.

    That is nan if nan or inf logits left a head without a number.
    """
    found = {"saturated_heads": float(saturated_heads)}
    for name in (RATIO, *(name for name in _OVERVIEW if name in set(chosen))):
        values = snapshot.tables.get(name)
        finite = values[np.isfinite(values)] if values is not None else np.empty(0)
        lost = snapshot.broken if values is None else snapshot.broken & np.isnan(values)
        down = name in STATISTICS and STATISTICS[name].worse == "down"
        tag = f"{name}_{'min' if down else 'max'}"
        if lost.any():
            found[tag] = math.nan
        elif finite.size:
            found[tag] = float(finite.min() if down else finite.max())
    return found


def event_records(step: int, changes: Changes) -> list[str]:
    """Return what an observation changed as JSON, one object per event; numbers that are not finite are null."""
    states = {"opened": changes.opened, "critical": changes.escalated, "ended": changes.ended}
    return [_record(step, event, state) for state, events in states.items() for event in events]


def _record(step: int, event: SaturationEvent, state: str) -> str:
    what = {
        "saturated": f"has recovered, ratio {event.ratio:.3g} (limit {event.threshold:g}), saturated",
        "nonfinite": "has no more logits that are nan or inf, as it had",
        "overflow": f"has logits of {event.value:.3g} at most, near the end of float16",
    }
    ended = f"step {step}: head {event.head} of {event.layer} {what[event.kind]} since step {event.step}"
    return json.dumps(
        {
            "step": step,
            "layer": event.layer,
            "head": event.head,
            "statistic": event.statistic,
            "value": _finite(event.value),
            "head_dim": event.head_dim,
            "ratio": _finite(event.ratio),
            "threshold": event.threshold,
            "severity": event.severity,
            "state": state,
            "since": event.step,
            "kind": event.kind,
            "baseline": event.baseline_step,
            "cause": event.cause,
            "shares": {name: round(share, 4) for name, share in event.shares.items() if math.isfinite(share)},
            "remedy": event.remedy,
            "message": ended if state == "ended" else event.line,
        },
        allow_nan=False,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""When will a healthy head reach its limit? A straight line through its last ratios, where they lie on one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_monitor.diagnosis import SLOWER
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule

WINDOW = 16
"""How many observations a trend is made of."""
_LEAST = 10
_CLEAR = 6.0
"""The slope must be this many of its standard errors."""
_STEADY = 0.8
"""A trend whose later half grows slower than this fraction of the earlier one is levelling off."""
_HORIZON = 0.25
"""How far ahead a forecast may look, in spans of the window: further out, growth is another by then."""
_SOONEST = 1.5
"""How far ahead a forecast must look, in observations: the next one would tell as much."""
_NEAREST = 0.4
"""Of the limit: lower ratios could reach it within the horizon only by a jump."""
INTERVAL = (0.8, 6.0)
"""The interval, in times from now to the forecast. Measured: see docs/alarms.md."""
_EXACT = 1e-3
"""Ends of an interval nearer to a whole step than this are that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A healthy head that is on its way to its limit. `str(forecast)` says so, in two lines.

    Attributes:
        step: When the forecast was made.
        layer: The layer.
        head: The query head, from 0.
        ratio: Its saturation ratio then.
        threshold: The limit of the ratio.
        expected: The step at which the head reaches the limit if it goes on like this.
        earliest: The lower end of the interval for that step.
        latest: Its upper end.
        statistic: What the limit is set on, the rule's statistic or `"critical_ratio"`.
        head_dim: D of query and key, `None` if unknown.
        remedy: What people do about what makes its logits large.
    """

    step: int
    layer: str
    head: int
    ratio: float
    threshold: float
    expected: int
    earliest: int
    latest: int
    statistic: str = "logit_row_std"
    head_dim: int | None = None
    remedy: str = SLOWER

    def __str__(self) -> str:
        return f"{self.line}\n  {self.advice}"

    @property
    def advice(self) -> str:
        """What helps, in one line."""
        return f"what helps before that: {self.remedy}"

    @property
    def line(self) -> str:
        """What is foretold, in one line, without what helps."""
        unit = "" if self.statistic == "critical_ratio" else f" x sqrt(d_k={self.head_dim})"
        return (
            f"step {self.step}: at its present growth head {self.head} of {self.layer} reaches the limit at about step "
            f"{self.expected} ({self.earliest} to {self.latest}); its {self.statistic} is {self.ratio:.3g}{unit} now, "
            f"the limit is {self.threshold:g}"
        )


class Forecaster:
    """Follows the ratio of every head and tells once of each that is on its way to the limit.

    The slope is that of a line through the later half of the last 16 observations, and the forecast where a line of
    that slope from the last one meets the limit. Growth slows down more often than not, so the interval reaches much
    further up than down: two of three heads reach their limit within it. Nothing is said unless the slope over all 16
    is six standard errors from zero, the later half grows nearly as fast as the earlier one or faster, and the limit is
    no further away than a quarter of the time looked back, and no nearer than one and a half observations.

    Args:
        rule: Gives ratio and limit.
    """

    def __init__(self, rule: SaturationRule) -> None:
        self._rule = rule
        self._seen: dict[str, list[tuple[int, list[float]]]] = {}
        self._told: set[tuple[str, int]] = set()

    def update(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> list[Forecast]:
        """Take in one observation and return what it foretells, the soonest first."""
        found = []
        for layer, stats in statistics.items():
            rule = self._rule.of(layer)
            ratios = rule.ratio(stats).double()
            past = self._seen.setdefault(layer, [])
            if past and (len(past[-1][1]) != stats.heads or past[-1][0] >= step):
                past.clear()  # another model, or a run that starts again
            past.append((step, ratios.tolist()))
            del past[:-WINDOW]
            found += self._of_layer(layer, rule.limit(stats), rule.measure(stats), stats.head_dim)
        return sorted(found, key=lambda forecast: forecast.expected)

    def forget(self, layers: Iterable[str] | None = None) -> None:
        """Drop what was seen of some layers, of all for `None`."""
        for layer in list(self._seen) if layers is None else layers:
            self._seen.pop(layer, None)
            self._told = {place for place in self._told if place[0] != layer}

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain Python values."""
        return {
            "seen": {layer: [[step, ratios] for step, ratios in past] for layer, past in self._seen.items()},
            "told": [[layer, head] for layer, head in sorted(self._told)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory."""
        seen = {
            str(layer): [(int(step), [float(ratio) for ratio in ratios]) for step, ratios in past]
            for layer, past in state["seen"].items()
        }
        told = {(str(layer), int(head)) for layer, head in state["told"]}
        self._seen, self._told = seen, told

    def _of_layer(self, layer: str, limit: float, statistic: str, head_dim: int | None) -> list[Forecast]:
        past = self._seen[layer]
        if len(past) < _LEAST or not any(_NEAREST * limit < ratio < limit for ratio in past[-1][1]):
            return []
        steps = torch.tensor([step for step, _ in past], dtype=torch.float64)
        ratios = torch.tensor([ratios for _, ratios in past], dtype=torch.float64)
        now, half = steps[-1], len(past) // 2
        whole, earlier = _Line.through(steps, ratios), _Line.through(steps[:half], ratios[:half])
        later = _Line.through(steps[half:], ratios[half:])
        ahead = (limit - ratios[-1]) / later.slope
        clear = (
            (whole.slope > _CLEAR * whole.error)
            & (later.slope > 0)
            & (later.slope >= _STEADY * earlier.slope)
            & (ratios[-1] < limit)
            & (ahead <= _HORIZON * (now - steps[0]))
            & (ahead >= _SOONEST * (now - steps[-2]))
        )
        forecasts = []
        for head in clear.nonzero().flatten().tolist():
            if (layer, head) in self._told:
                continue
            self._told.add((layer, head))
            forecasts.append(
                Forecast(
                    step=int(now),
                    layer=layer,
                    head=head,
                    ratio=float(ratios[-1, head]),
                    threshold=limit,
                    expected=round(float(now + ahead[head])),
                    earliest=math.floor(float(now + INTERVAL[0] * ahead[head]) + _EXACT),
                    latest=math.ceil(float(now + INTERVAL[1] * ahead[head]) - _EXACT),
                    statistic=statistic,
                    head_dim=head_dim,
                )
            )
        return forecasts


@dataclass(frozen=True, slots=True)
class _Line:
    """A least-squares line through the ratios of every head, [heads]; nan where a ratio was not measured."""

    slope: Tensor
    error: Tensor

    @classmethod
    def through(cls, steps: Tensor, ratios: Tensor) -> _Line:
        """Fit lines to [observations, heads]."""
        offsets = (steps - steps.mean())[:, None]
        spread = (offsets * offsets).sum()
        height = ratios.mean(0)
        slope = (offsets * (ratios - height)).sum(0) / spread
        rest = ratios - height - offsets * slope
        return cls(slope, (rest.square().sum(0) / (len(steps) - 2) / spread).sqrt())

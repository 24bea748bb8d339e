"""When is learning through attention really gone: the measured rule for critical events.

A head that is sharp is normal, and a layer can have several. What ends in worse models is attention that as a whole no
longer passes gradients: `jacobian_trace`, the trace of the softmax Jacobian over that of uniform attention, averaged
over heads. docs/alarms.md has the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attn_monitor.diagnosis import SINK
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule

COLLAPSED = 0.45
"""Attention has collapsed where the mean `jacobian_trace` over the heads of the model is below this."""
CAPPED = 10.0
"""A softcap is saturated where `qk_std` is this many times `logit_std`, for the median head of the model: the gradient
is lost in the cap, of which the trace of the softmax knows nothing."""
HARMLESS = "no harm if the loss still falls"
"""Attention that is sharp and useful looks the same from here: about one in five critical trainings ended well."""


class Collapse:
    """Tells which layers have collapsed.

    Args:
        rule: Its patience is how many observations in a row decide.
    """

    def __init__(self, rule: SaturationRule) -> None:
        self._rule = rule
        self._below = 0

    def update(self, statistics: Mapping[str, AttentionStatistics]) -> dict[str, str]:
        """Take in one observation and return the collapsed layers, each with the reason."""
        if not any(stats.jacobian_trace is not None for stats in statistics.values()):
            return {}  # not measured is no observation
        found = _blocked(statistics) or _saturated_caps(statistics)
        self._below = self._below + 1 if found else 0
        return found if self._below >= self._rule.patience else {}

    def forget(self) -> None:
        """Start counting afresh."""
        self._below = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain Python values."""
        return {"below": self._below}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory."""
        self._below = int(state["below"])


def _blocked(statistics: Mapping[str, AttentionStatistics]) -> dict[str, str]:
    """Return the layers that pass little gradient, if the model as a whole does."""
    traces = {layer: _traces(stats) for layer, stats in statistics.items()}
    every = [trace for found in traces.values() for trace in found]
    mean = sum(every) / len(every) if every else 1.0
    if mean >= COLLAPSED:
        return {}
    reason = (
        f"only {_percent_below(mean)}% of the gradient of uniform attention gets through{_heads(every)} "
        f"(mean jacobian_trace, limit {COLLAPSED:.0%}){_harmless(statistics)}"
    )
    return {layer: reason for layer, found in traces.items() if found and sum(found) / len(found) < COLLAPSED}


def _saturated_caps(statistics: Mapping[str, AttentionStatistics]) -> dict[str, str]:
    """Return the layers whose softcap is saturated, if that holds for the median head of the model."""
    squeezed = {layer: _squeezed(stats) for layer, stats in statistics.items()}
    every = sorted(times for found in squeezed.values() for times in found)
    if not every or every[len(every) // 2] <= CAPPED:
        return {}
    reason = (
        f"the softcap is saturated, scale * q.k spreads {every[len(every) // 2]:.3g} times as far as the logits after "
        f"it (median qk_std / logit_std, limit {CAPPED:g}){_harmless(statistics)}"
    )
    return {layer: reason for layer, found in squeezed.items() if found and max(found) > CAPPED}


def _traces(stats: AttentionStatistics) -> list[float]:
    """Return the traces of the heads that count: those that rest on a sink are sharp by design."""
    if stats.jacobian_trace is None:
        return []
    traces: list[float] = stats.jacobian_trace.tolist()
    sinks: list[float] = [0.0] * len(traces) if stats.sink_mass is None else stats.sink_mass.tolist()
    return [trace for trace, sink in zip(traces, sinks, strict=True) if math.isfinite(trace) and not sink > SINK]


def _squeezed(stats: AttentionStatistics) -> list[float]:
    """Return by what each head's products are wider than its logits; only a softcap makes them much narrower."""
    if stats.qk_std is None or stats.logit_std is None:
        return []
    found: list[float] = (stats.qk_std / stats.logit_std).tolist()
    return [times for times in found if math.isfinite(times)]


def _harmless(statistics: Mapping[str, AttentionStatistics]) -> str:
    """Return what may be said for sharp attention; nothing where a logit or the spread of a head is not finite."""
    broken = any(bool(stats.nonfinite.any()) or _overflows(stats) for stats in statistics.values())
    return "" if broken else f"; {HARMLESS}"


def _overflows(stats: AttentionStatistics) -> bool:
    """Tell whether a head with rows has a spread that is not finite."""
    if stats.logit_row_std is None or stats.jacobian_trace is None:
        return False
    return bool((stats.jacobian_trace.isfinite() & ~stats.logit_row_std.isfinite()).any())


def _percent_below(mean: float) -> int:
    """Return a mean below the limit in per cent, rounded to a number that is below the limit too."""
    return min(round(100 * mean), round(100 * COLLAPSED) - 1)


def _heads(every: list[float]) -> str:
    return " the model's only head" if len(every) == 1 else f", on average over the model's {len(every)} heads"

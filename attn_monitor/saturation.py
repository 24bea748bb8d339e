"""When is a head saturated, since when, and why: the rule, the events and the memory between observations.

Everything here is plain Python over records; it knows neither modules nor Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attn_monitor.diagnosis import FACTORS, explain
from attn_monitor.records import AttentionStatistics

Severity = Literal["warning", "critical"]
RuleStatistic = Literal["logit_row_std", "logit_std"]
Reference = Literal["sqrt_dk", "critical"]

CRITICAL_MULTIPLE = 2.0
"""An event is critical from this multiple of the threshold on."""
NONFINITE = "nonfinite"
"""What an event of nan or inf logits calls its statistic."""
_DEFAULT_THRESHOLD: Mapping[Reference, float] = {"sqrt_dk": 0.5, "critical": 1.0}
_STATE_VERSION = 1


class AttentionWarning(UserWarning):
    """Every warning of attn_monitor, so that one filter can choose them."""


_EVENT_FACTORS = ("scale_ratio", "q_rms", "k_rms", "alignment", "logit_max")


@dataclass(frozen=True, kw_only=True)  # no slots: LightningCLI reads vars() of a default
class SaturationRule:
    """When a head counts as saturated: its logits spread too far for its softmax to pass gradients.

    A head is saturated when `ratio > limit`. With `relative_to="sqrt_dk"` the ratio is `statistic / sqrt(d_k)` of the
    logits as softmax sees them: 1 is where attention without its scale starts, `1 / sqrt(d_k)` is textbook attention
    at initialisation. With `relative_to="critical"` it is `critical_ratio`, 1 where independent Gaussian logits
    condense onto a few keys; that needs no head dimension, so it also serves, with limit 1, where none is known.

    Args:
        threshold: The limit of the ratio; `None` means 0.5 for `"sqrt_dk"` and 1 for `"critical"`.
        statistic: The spread measured against sqrt(d_k). `relative_to="critical"` does not use it.
        relative_to: What the spread is measured against.
        patience: How many consecutive observations above the limit open an event (and how many above twice the limit
            make it critical).
        release: An event ends below this fraction of the limit.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If an argument has the wrong type.

    Example:
        >>> SaturationRule(threshold=0.4, patience=3)
        SaturationRule(threshold=0.4, statistic='logit_row_std', relative_to='sqrt_dk', patience=3, release=0.8)
    """

    threshold: float | None = None
    statistic: RuleStatistic = "logit_row_std"
    relative_to: Reference = "sqrt_dk"
    patience: int = 1
    release: float = 0.8

    def __post_init__(self) -> None:
        if self.threshold is not None:
            _check_number("threshold", self.threshold, "a positive finite number or None")
            if not (math.isfinite(self.threshold) and self.threshold > 0):
                raise ValueError(f"`threshold` expects a positive finite number or None, got {self.threshold!r}.")
        _check_choice("statistic", self.statistic, get_args(RuleStatistic))
        _check_choice("relative_to", self.relative_to, get_args(Reference))
        if isinstance(self.patience, bool) or not isinstance(self.patience, int):
            raise TypeError(f"`patience` expects a whole number of observations, got {self.patience!r}.")
        if self.patience < 1:
            raise ValueError(f"`patience` expects at least 1 observation, got {self.patience}.")
        _check_number("release", self.release, "a fraction of the threshold")
        if not 0 < self.release <= 1:
            raise ValueError(f"`release` expects a fraction of the threshold in (0, 1], got {self.release!r}.")

    @property
    def requires(self) -> frozenset[str]:
        """The statistics that must be measured for the rule to decide."""
        if self.relative_to == "critical":
            return frozenset({"critical_ratio"})
        return frozenset({self.statistic, "critical_ratio"})

    def measure(self, stats: AttentionStatistics) -> str:
        """Return the name of the statistic that decides for this layer."""
        return "critical_ratio" if self._by_critical(stats) else self.statistic

    def limit(self, stats: AttentionStatistics) -> float:
        """Return the limit of the ratio that applies to this layer."""
        if self.relative_to == "sqrt_dk" and self._by_critical(stats):
            return _DEFAULT_THRESHOLD["critical"]  # `threshold` was meant for the other ratio
        return self.default_limit

    @property
    def default_limit(self) -> float:
        """The limit of the ratio of every layer whose head dimension is known."""
        return _DEFAULT_THRESHOLD[self.relative_to] if self.threshold is None else float(self.threshold)

    def ratio(self, stats: AttentionStatistics) -> Tensor:
        """Return the saturation ratio of every head, [H], nan where it was not measured."""
        spread: Tensor | None = getattr(stats, self.measure(stats))
        if spread is None:
            return torch.full((stats.heads,), math.nan, device="cpu")
        if self._by_critical(stats):
            return spread.clone()
        assert stats.head_dim is not None, "a layer without head dimension is judged by critical_ratio"
        return spread / math.sqrt(stats.head_dim)

    def _by_critical(self, stats: AttentionStatistics) -> bool:
        return self.relative_to == "critical" or stats.head_dim is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationEvent:
    """A head that is saturated, or has logits that are nan or inf. `str(event)` is its message.

    Attributes:
        step: The step of the onset, the x value of the logged metrics.
        layer: The layer, named as in `model.named_modules()`.
        head: The query head, from 0.
        statistic: What was measured, `"nonfinite"` for nan and inf logits.
        value: Its value, the number of such logits for `"nonfinite"`.
        head_dim: D of query and key, `None` if unknown.
        ratio: The saturation ratio, inf for `"nonfinite"`.
        threshold: The limit of the ratio.
        severity: "critical" from twice the limit on, or for `"nonfinite"`; "warning" below.
        critical_step: The step at which it became critical, which all numbers are then from; `None` before.
        cause: The likely cause, in words.
        scale_ratio: scale * sqrt(D), 1 for textbook attention.
        q_rms: Root mean square of the query entries.
        k_rms: Root mean square of the key entries.
        alignment: How far queries and keys point along the same few directions, 1 for independent ones.
        logit_max: The largest logit.
    """

    step: int
    layer: str
    head: int
    statistic: str
    value: float
    head_dim: int | None
    ratio: float
    threshold: float
    severity: Severity
    critical_step: int | None = None
    cause: str = ""
    scale_ratio: float | None = None
    q_rms: float | None = None
    k_rms: float | None = None
    alignment: float | None = None
    logit_max: float | None = None

    def __str__(self) -> str:
        later = self.critical_step is not None and self.critical_step != self.step
        where = f"step {self.critical_step if later else self.step}: head {self.head} of {self.layer}"
        if self.statistic == NONFINITE:
            noun = "logit that is" if self.value == 1 else "logits that are"
            what = f"has {self.value:.0f} allowed {noun} nan or inf"
        elif self.statistic == "critical_ratio":
            what = f"is saturated, critical_ratio {self.value:.3g} (limit {self.threshold:g})"
        else:
            reference = f"sqrt(d_k={self.head_dim})"
            what = (
                f"is saturated, {self.statistic} {self.value:.3g} is {self.ratio:.3g} x {reference} "
                f"(limit {self.threshold:g})"
            )
        since = f", above the limit since step {self.step}" if later else ""
        return f"{where} {what}{since}{'; ' + self.cause if self.cause else ''}"


class AttentionSaturationError(RuntimeError):
    """Training was ended because heads are critically saturated.

    Attributes:
        events: The critical events.
    """

    def __init__(self, events: Sequence[SaturationEvent]) -> None:
        self.events = list(events)
        super().__init__("\n".join(["attention is critically saturated", *(f"  {event}" for event in self.events)]))

    def __reduce__(self) -> tuple[type[AttentionSaturationError], tuple[list[SaturationEvent]]]:
        return type(self), (self.events,)  # exceptions of workers travel pickled


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one observation changed."""

    opened: list[SaturationEvent] = field(default_factory=list)
    escalated: list[SaturationEvent] = field(default_factory=list)
    """Known events that became critical."""
    closed: list[tuple[str, int]] = field(default_factory=list)
    """Layer and head of the events that ended."""
    ended: list[SaturationEvent] = field(default_factory=list)
    """The same events, with the numbers of the observation that ended them."""


@dataclass(slots=True)
class _Head:
    """The memory of one head."""

    above: int = 0
    far_above: int = 0
    event: SaturationEvent | None = None
    since: int = 0
    baseline: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one observation says about one head."""

    statistic: str
    value: float
    ratio: float
    limit: float
    head_dim: int | None
    nonfinite: float
    factors: dict[str, float]


class SaturationTracker:
    """Turns observations into events, one per head until it recovers.

    Args:
        rule: When a head is saturated.

    Attributes:
        events: Every event so far, oldest first. An event that becomes critical is replaced in place.
    """

    def __init__(self, rule: SaturationRule) -> None:
        self.rule = rule
        self.events: list[SaturationEvent] = []
        self._layers: dict[str, list[_Head]] = {}

    @property
    def open_heads(self) -> int:
        """How many heads have an open event."""
        return sum(head.event is not None for heads in self._layers.values() for head in heads)

    def update(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> Changes:
        """Take in one observation of some layers and return what it changed."""
        changes = Changes()
        for layer, stats in statistics.items():
            if len(self._layers.get(layer, ())) != stats.heads:  # new, or another model under the same name
                self._layers[layer] = [_Head() for _ in range(stats.heads)]
            for index, reading in enumerate(_readings(self.rule, stats)):
                self._advance(self._layers[layer][index], reading, (step, layer, index), changes)
        return changes

    def forget(self, layers: Iterable[str] | None = None) -> None:
        """Drop the memory of some layers, of all for `None`; the list of events stays."""
        for layer in list(self._layers) if layers is None else layers:
            self._layers.pop(layer, None)

    @property
    def layers(self) -> frozenset[str]:
        """The layers that are remembered."""
        return frozenset(self._layers)

    @property
    def heads(self) -> dict[str, int]:
        """The number of heads of every layer that is remembered, in the order of their first observation."""
        return {layer: len(heads) for layer, heads in self._layers.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain Python values."""
        layers = {
            layer: [{**asdict(head), "event": None if head.event is None else asdict(head.event)} for head in heads]
            for layer, heads in self._layers.items()
        }
        return {"version": _STATE_VERSION, "events": [asdict(event) for event in self.events], "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory.

        Raises:
            ValueError: If the state is of another version; the memory is left as it was.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"expected a saturation state of version {_STATE_VERSION}, got {state.get('version')!r}")
        events = [SaturationEvent(**event) for event in state["events"]]
        layers = {
            layer: [
                _Head(**{**head, "event": None if head["event"] is None else SaturationEvent(**head["event"])})
                for head in heads
            ]
            for layer, heads in state["layers"].items()
        }
        self.events, self._layers = events, layers

    def _advance(self, head: _Head, reading: _Reading, place: tuple[int, str, int], changes: Changes) -> None:
        if not head.baseline:
            head.baseline, head.since = reading.factors, place[0]
        if reading.nonfinite:
            if head.event is None or head.event.statistic != NONFINITE:
                self._open(head, reading, place, changes)
            return
        if math.isnan(reading.ratio):
            return  # not measured is no observation
        head.above = head.above + 1 if reading.ratio > reading.limit else 0
        head.far_above = head.far_above + 1 if reading.ratio >= CRITICAL_MULTIPLE * reading.limit else 0
        if head.event is None:
            if head.above >= self.rule.patience:
                self._open(head, reading, place, changes)
        elif reading.ratio < self.rule.release * reading.limit:
            changes.closed.append(place[1:])
            changes.ended.append(
                replace(head.event, statistic=reading.statistic, value=reading.value, ratio=reading.ratio)
            )
            head.event = None
        elif head.event.severity == "warning" and head.far_above >= self.rule.patience:
            self._escalate(head, reading, place[0], changes)

    def _open(self, head: _Head, reading: _Reading, place: tuple[int, str, int], changes: Changes) -> None:
        step, layer, index = place
        broken = bool(reading.nonfinite)
        critical = broken or head.far_above >= self.rule.patience
        head.event = SaturationEvent(
            step=step,
            layer=layer,
            head=index,
            statistic=NONFINITE if broken else reading.statistic,
            value=reading.nonfinite if broken else reading.value,
            head_dim=reading.head_dim,
            ratio=math.inf if broken else reading.ratio,
            threshold=reading.limit,
            severity="critical" if critical else "warning",
            critical_step=step if critical else None,
            cause=explain(reading.factors, head.baseline, since=head.since, head_dim=reading.head_dim),
            **{name: reading.factors.get(name) for name in _EVENT_FACTORS},
        )
        self.events.append(head.event)
        changes.opened.append(head.event)

    def _escalate(self, head: _Head, reading: _Reading, step: int, changes: Changes) -> None:
        old = head.event
        assert old is not None, "only an open event escalates"
        cause = explain(reading.factors, head.baseline, since=head.since, head_dim=reading.head_dim)
        named: dict[str, Any] = {name: reading.factors.get(name) for name in _EVENT_FACTORS}
        head.event = replace(
            old, severity="critical", critical_step=step, value=reading.value, ratio=reading.ratio, cause=cause, **named
        )
        if old in self.events:  # the list is the user's to clear
            self.events[self.events.index(old)] = head.event
        changes.escalated.append(head.event)


def _readings(rule: SaturationRule, stats: AttentionStatistics) -> list[_Reading]:
    """Return what the record says about each head; one conversion per tensor."""
    missing = [math.nan] * stats.heads
    measured = {name: tensor.tolist() for name, tensor in stats.measured().items()}
    name = rule.measure(stats)
    known = [factor for factor in FACTORS if factor in measured]
    ratios = rule.ratio(stats).tolist()
    return [
        _Reading(
            statistic=name,
            value=measured.get(name, missing)[index],
            ratio=ratios[index],
            limit=rule.limit(stats),
            head_dim=stats.head_dim,
            nonfinite=float(measured[NONFINITE][index]),
            factors={factor: measured[factor][index] for factor in known if math.isfinite(measured[factor][index])},
        )
        for index in range(stats.heads)
    ]


def _check_number(name: str, value: object, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` expects {expected}, got {value!r}.")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` expects one of {list(choices)}, got {value!r}.")

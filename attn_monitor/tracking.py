"""From observations to events: the memory of every head between observations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from attn_monitor.diagnosis import FACTORS, SINK, Diagnosis, diagnose, diagnose_nonfinite, diagnose_overflow
from attn_monitor.events import COLLAPSE, NONFINITE, OVERFLOW, Kind, SaturationEvent
from attn_monitor.records import FLOAT16_MAX, AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.severity import Collapse

_Key = tuple[str, int, Kind, int]
OVERFLOW_AHEAD = 0.5
"""From this fraction of the largest float16 number on, a logit is told of."""
_STATE_VERSION = 2
_EVENT_FACTORS = ("scale_ratio", "q_rms", "k_rms", "alignment", "logit_max")


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
    open_heads: int | None = field(default=None, compare=False)
    """How many heads have an open event now; told only where one opened or became critical."""


@dataclass(slots=True)
class _Head:
    """The memory of one head."""

    above: int = 0
    events: dict[str, SaturationEvent] = field(default_factory=dict)
    since: int = 0
    baseline: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one observation says about one head; nan is not measured."""

    statistic: str
    value: float
    ratio: float
    limit: float
    head_dim: int | None
    nonfinite: float
    overflow: float
    trace: float
    sink_mass: float
    factors: dict[str, float]
    lost: dict[str, float]
    """Factors that were measured and are not finite."""
    broken_before: str
    """The first layer of the record with logits that are not finite, if this is a later one."""


class SaturationTracker:
    """Turns observations into events, one of each kind per head until it ends.

    Args:
        rule: When a head is saturated.

    Attributes:
        events: Every event so far, oldest first. An event that becomes critical is replaced in place.
    """

    def __init__(self, rule: SaturationRule) -> None:
        self.rule = rule
        self.events: list[SaturationEvent] = []
        self._layers: dict[str, list[_Head]] = {}
        self._collapse = Collapse(rule)

    @property
    def open_heads(self) -> int:
        """How many heads have an open event."""
        return sum(bool(head.events) for heads in self._layers.values() for head in heads)

    def update(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> Changes:
        """Take in one observation of some layers and return what it changed."""
        changes = Changes()
        collapsed = self._collapse.update(statistics)
        broken = ""
        for layer, stats in statistics.items():
            if len(self._layers.get(layer, ())) != stats.heads:  # new, or another model under the same name
                self._layers[layer] = [_Head() for _ in range(stats.heads)]
            rule = self.rule.of(layer)
            if layer not in collapsed and self._uneventful(layer, rule, stats):
                continue
            readings = _readings(rule, stats, broken)
            broken = broken or (layer if any(reading.nonfinite for reading in readings) else "")
            for index, reading in enumerate(readings):
                self._advance(_Place(step, layer, index), reading, layer in collapsed, changes)
            if layer in collapsed:
                self._condemn(step, layer, readings, collapsed[layer], changes)
        return replace(changes, open_heads=self.open_heads) if changes.opened or changes.escalated else changes

    def _uneventful(self, layer: str, rule: SaturationRule, stats: AttentionStatistics) -> bool:
        """Tell whether nothing is to be noted of a layer; a large model has thousands of heads, mostly healthy ones."""
        heads = self._layers[layer]
        if not all(head.baseline and not head.events and not head.above for head in heads):
            return False
        overflow = stats.overflow_ratio
        near = overflow is not None and bool((overflow >= OVERFLOW_AHEAD).any())
        return not (near or bool(stats.nonfinite.any()) or bool((rule.ratio(stats) > rule.limit(stats)).any()))

    def remedy(self, layer: str, head: int, stats: AttentionStatistics, *, scale_meant: bool = False) -> str:
        """Return what people do about what makes a head's logits as large as they are, without an event; or nothing."""
        reading, memory = _readings(self.rule.of(layer), stats)[head], self._layers[layer][head]
        return diagnose(
            reading.factors,
            memory.baseline,
            since=memory.since,
            head_dim=reading.head_dim,
            sink_mass=reading.sink_mass,
            scale_meant=scale_meant,
        ).remedy

    def forget(self, layers: Iterable[str] | None = None) -> None:
        """Drop the memory of some layers, of all for `None`; the list of events stays."""
        for layer in list(self._layers) if layers is None else layers:
            self._layers.pop(layer, None)
        self._collapse.forget()  # of the model as a whole, which is another one then

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
        return {
            "version": _STATE_VERSION,
            "events": [asdict(event) for event in self.events],
            "layers": {layer: [asdict(head) for head in heads] for layer, heads in self._layers.items()},
            "collapse": self._collapse.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory.

        Raises:
            ValueError: If the state is of another version; the memory is left as it was.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"expected a saturation state of version {_STATE_VERSION}, got {state.get('version')!r}")
        events = [_event(event) for event in state["events"]]
        layers = {layer: [_head(head) for head in heads] for layer, heads in state["layers"].items()}
        self._collapse.load_state_dict(state["collapse"])
        self.events, self._layers = events, layers

    def _advance(self, place: _Place, reading: _Reading, collapsed: bool, changes: Changes) -> None:
        head = self._head(place)
        if not head.baseline:
            head.baseline, head.since = reading.factors, place.step
        self._toggle(place, "nonfinite", reading, bool(reading.nonfinite), not reading.nonfinite, changes)
        ahead, gone = reading.overflow >= OVERFLOW_AHEAD, reading.overflow < OVERFLOW_AHEAD / 2
        self._toggle(place, "overflow", reading, ahead, gone, changes)
        if math.isnan(reading.ratio):
            return  # not measured is no observation
        head.above = head.above + 1 if reading.ratio > reading.limit else 0
        event = head.events.get("saturated")
        lasting = collapsed and event is not None and event.statistic == COLLAPSE
        recovered = reading.ratio < self.rule.release * reading.limit and not lasting
        self._toggle(place, "saturated", reading, head.above >= self.rule.patience, recovered, changes)

    def _toggle(self, place: _Place, kind: Kind, reading: _Reading, begins: bool, ends: bool, changes: Changes) -> None:
        """Open an event of a kind that has none, or end the one it has."""
        head = self._head(place)
        if begins and kind not in head.events:
            self._open(place, kind, reading, changes)
        elif ends and kind in head.events:
            ratio = reading.ratio if kind == "nonfinite" else _ratio(kind, reading)
            event = replace(head.events.pop(kind), value=_value(kind, reading), ratio=ratio)
            changes.closed.append((place.layer, place.head))
            changes.ended.append(event)

    def _open(
        self, place: _Place, kind: Kind, reading: _Reading, changes: Changes, *, critical_reason: str = ""
    ) -> None:
        head = self._head(place)
        critical = bool(critical_reason) or kind == "nonfinite"
        above = reading.ratio > reading.limit
        statistic = {
            "nonfinite": NONFINITE,
            "overflow": OVERFLOW,
            "saturated": reading.statistic if above else COLLAPSE,
        }
        event = SaturationEvent(
            step=place.step,
            layer=place.layer,
            head=place.head,
            statistic=statistic[kind],
            value=reading.trace if statistic[kind] == COLLAPSE else _value(kind, reading),
            head_dim=reading.head_dim,
            ratio=_ratio(kind, reading),
            threshold=OVERFLOW_AHEAD if kind == "overflow" else reading.limit,
            severity="critical" if critical else "warning",
            critical_step=place.step if critical else None,
            critical_reason=critical_reason,
            **_explained(head, reading, kind),
        )
        head.events[kind] = event
        self.events.append(event)
        changes.opened.append(event)

    def _condemn(self, step: int, layer: str, readings: list[_Reading], reason: str, changes: Changes) -> None:
        """Make the events of a collapsed layer critical; if it has none, open one for the head that passes least."""
        heads = self._layers[layer]
        lists = _Known.of(self.events, changes)
        for index, head in enumerate(heads):
            event = head.events.get("saturated")
            reading, place = readings[index], _Place(step, layer, index)
            if event is None or event.severity == "critical" or reading.sink_mass > SINK:
                continue
            known = not math.isnan(reading.ratio)
            self._replace(
                place,
                replace(
                    event,
                    severity="critical",
                    critical_step=step,
                    critical_reason=reason,
                    value=_value("saturated", reading) if known else event.value,
                    ratio=reading.ratio if known else event.ratio,
                    **_explained(head, reading, "saturated"),
                ),
                changes,
                lists,
            )
        if not any(head.events["saturated"].severity == "critical" for head in heads if "saturated" in head.events):
            counted = {index for index, head in enumerate(heads) if "saturated" not in head.events}
            traces = [
                reading.trace if index in counted and math.isfinite(reading.trace) else math.inf
                for index, reading in enumerate(readings)
            ]
            if not counted:
                return
            worst = min(range(len(traces)), key=lambda index: traces[index])
            self._open(_Place(step, layer, worst), "saturated", readings[worst], changes, critical_reason=reason)

    def _replace(self, place: _Place, event: SaturationEvent, changes: Changes, known: _Known) -> None:
        old = self._head(place).events["saturated"]
        self._head(place).events["saturated"] = event
        if (index := known.events.get(_key(old))) is not None:  # the list is the user's to clear
            self.events[index] = event
        if (index := known.opened.get(_key(old))) is not None:
            changes.opened[index] = event
        else:
            changes.escalated.append(event)

    def _head(self, place: _Place) -> _Head:
        return self._layers[place.layer][place.head]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and when a head was observed."""

    step: int
    layer: str
    head: int


@dataclass(frozen=True, slots=True)
class _Known:
    """Where events stand in the lists, looked up once for all heads of a layer."""

    events: Mapping[_Key, int]
    opened: Mapping[_Key, int]

    @classmethod
    def of(cls, events: list[SaturationEvent], changes: Changes) -> _Known:
        return cls(*({_key(event): index for index, event in enumerate(found)} for found in (events, changes.opened)))


def _key(event: SaturationEvent) -> _Key:
    return event.layer, event.head, event.kind, event.step


def _value(kind: Kind, reading: _Reading) -> float:
    return {"nonfinite": reading.nonfinite, "overflow": reading.overflow * FLOAT16_MAX, "saturated": reading.value}[
        kind
    ]


def _ratio(kind: Kind, reading: _Reading) -> float:
    return {"nonfinite": math.inf, "overflow": reading.overflow, "saturated": reading.ratio}[kind]


def _explained(head: _Head, reading: _Reading, kind: Kind) -> dict[str, Any]:
    """Return the fields of an event that say why."""
    found = _diagnosis(head, reading, kind)
    return {
        "cause": found.cause,
        "remedy": found.remedy,
        "shares": dict(found.shares),
        "baseline_step": head.since,
        **{name: reading.factors.get(name) for name in _EVENT_FACTORS},
    }


def _diagnosis(head: _Head, reading: _Reading, kind: Kind) -> Diagnosis:
    if kind == "nonfinite":
        reach = reading.overflow if reading.overflow >= OVERFLOW_AHEAD else None
        return diagnose_nonfinite(reading.lost, reading.factors, reach, _product_reach(reading), reading.broken_before)
    sink_mass = reading.sink_mass if kind == "saturated" else None  # resting is no excuse for an overflow
    found = diagnose(reading.factors, head.baseline, since=head.since, head_dim=reading.head_dim, sink_mass=sink_mass)
    return found if kind == "saturated" else diagnose_overflow(found)


def _product_reach(reading: _Reading) -> float | None:
    """Return how far q.k comes to the end of float16 where a model scales only afterwards, if it comes near."""
    ratio, largest = reading.factors.get("scale_ratio"), reading.factors.get("logit_max")
    if not ratio or largest is None or reading.head_dim is None:
        return None
    scale = abs(ratio) / math.sqrt(reading.head_dim)
    reach = largest / scale / FLOAT16_MAX
    return reach if scale < 1 and reach >= OVERFLOW_AHEAD else None


def _readings(rule: SaturationRule, stats: AttentionStatistics, broken_before: str = "") -> list[_Reading]:
    """Return what the record says about each head; one conversion per tensor."""
    missing = [math.nan] * stats.heads
    measured = {name: tensor.tolist() for name, tensor in stats.measured().items()}
    name = rule.measure(stats)
    known = [factor for factor in FACTORS if factor in measured]
    ratios, limit = rule.ratio(stats).tolist(), rule.limit(stats)
    overflow = missing if stats.overflow_ratio is None else stats.overflow_ratio.tolist()
    factors = [{factor: measured[factor][index] for factor in known} for index in range(stats.heads)]
    return [
        _Reading(
            statistic=name,
            value=measured.get(name, missing)[index],
            ratio=ratios[index],
            limit=limit,
            head_dim=stats.head_dim,
            nonfinite=float(measured[NONFINITE][index]),
            overflow=overflow[index] if math.isfinite(overflow[index]) else math.nan,
            trace=measured.get("jacobian_trace", missing)[index],
            sink_mass=measured.get("sink_mass", missing)[index],
            factors={factor: value for factor, value in factors[index].items() if math.isfinite(value)},
            lost={factor: value for factor, value in factors[index].items() if not math.isfinite(value)},
            broken_before=broken_before,
        )
        for index in range(stats.heads)
    ]


def _head(state: Mapping[str, Any]) -> _Head:
    """Return the memory of a head, checked: what is wrong with a checkpoint must show when it is loaded."""
    return _Head(
        above=int(state["above"]),
        events={str(kind): _event(event) for kind, event in state["events"].items()},
        since=int(state["since"]),
        baseline={str(name): float(value) for name, value in state["baseline"].items()},
    )


def _event(state: Mapping[str, Any]) -> SaturationEvent:
    """Return an event, checked."""
    event = SaturationEvent(**state)
    numbers = (event.step, event.head, event.value, event.ratio, event.threshold)
    texts = (event.layer, event.statistic, event.severity, event.critical_reason, event.cause, event.remedy)
    optional = (event.critical_step, event.baseline_step, event.head_dim, *(getattr(event, f) for f in _EVENT_FACTORS))
    fits = (
        all(isinstance(number, (int, float)) for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and all(number is None or isinstance(number, (int, float)) for number in optional)
        and isinstance(event.shares, Mapping)
    )
    if not fits:
        raise ValueError(f"expected the fields of an event, got {dict(state)!r}")
    return event

"""What is told of a head: the event, its message, and the error that ends a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["warning", "critical"]
Kind = Literal["saturated", "nonfinite", "overflow"]
"""What a head can have an open event of; each opens and ends by itself."""
Topic = Literal["nonfinite", "critical", "saturated", "overflow"]
"""What events are told of together, the most serious first."""

NONFINITE = "nonfinite"
"""What an event of nan or inf logits calls its statistic."""
OVERFLOW = "float16_overflow"
"""What an event of logits too large for float16 calls its statistic."""
COLLAPSE = "jacobian_trace"
"""What an event of attention that passes no gradient calls its statistic, where no head is above its limit."""

_LISTED = 20
"""How many heads one text lists at most."""
LISTED_ALOUD = 3
"""How many heads a warning or an error lists at most: the worst, since one cause mostly has many heads."""
_CAUSE = "likely cause"
_HEADINGS: Mapping[Topic, tuple[str, str]] = {
    "nonfinite": ("is critical, its logits are nan or inf", "are critical, their logits are nan or inf"),
    "critical": ("is critical", "are critical"),
    "saturated": ("is newly saturated", "are newly saturated"),
    "overflow": ("has logits near the end of float16", "have logits near the end of float16"),
}
_AGAIN: Mapping[Topic, tuple[str, str]] = {
    "nonfinite": ("is critical again, its logits are nan or inf", "are critical again, their logits are nan or inf"),
    "critical": ("is critical again", "are critical again"),
    "saturated": ("is saturated again", "are saturated again"),
    "overflow": ("has logits near the end of float16 again", "have logits near the end of float16 again"),
}
"""The same of heads that recovered in between."""


class AttentionWarning(UserWarning):
    """Every warning of attn_monitor, so that one filter can choose them.

    Example:
        >>> import warnings
        >>> from attn_monitor import AttentionWarning
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("ignore")
        ...     warnings.simplefilter("always", AttentionWarning)
        ...     warnings.warn("2 heads are newly saturated", AttentionWarning)
        ...     warnings.warn("of someone else")
        >>> [str(warning.message) for warning in told]
        ['2 heads are newly saturated']
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationEvent:
    """A head that is saturated, or has logits that are nan, inf or near the end of float16. `str(event)` says it.

    Attributes:
        step: The step of the onset, the x value of the logged metrics.
        layer: The layer, named as in `model.named_modules()`.
        head: The query head, from 0.
        statistic: What was measured: the rule's statistic, `"nonfinite"`, `"float16_overflow"`, or
            `"jacobian_trace"` where attention collapsed without a head above its limit.
        value: Its value, for `"nonfinite"` the number of such logits, for `"float16_overflow"` the largest absolute
            logit.
        head_dim: D of query and key, `None` if unknown.
        ratio: The saturation ratio; inf for `"nonfinite"`, `value / 65504` for `"float16_overflow"`.
        threshold: The limit of the ratio.
        severity: "critical" if learning through attention is gone, or for `"nonfinite"`; "warning" before.
        critical_step: The step at which it became critical, which all numbers are then from; `None` before.
        critical_reason: What makes it critical, in words.
        cause: The likely cause, in words.
        remedy: What people do about such a cause, in words.
        shares: The share of each factor in the growth of the logits since `baseline_step`; they add up to 1. Empty if
            the logits did not clearly grow. `rest` is what bias, softcap and row offsets make of the products.
        baseline_step: The step of the head's first observation, with which it is compared.
        scale_ratio: scale * sqrt(D), 1 for textbook attention.
        q_rms: Root mean square of the query entries.
        k_rms: Root mean square of the key entries.
        alignment: How far queries and keys point along the same few directions, 1 for independent ones.
        logit_max: The largest logit.

    Source: Vaswani et al. 2017, arXiv 1706.03762, for the scale.

    Example:
        >>> from attn_monitor import SaturationEvent
        >>> event = SaturationEvent(
        ...     step=40, layer="layers.0.attn", head=3, statistic="logit_row_std", value=6.0, head_dim=64, ratio=0.75,
        ...     threshold=0.5, severity="warning",
        ... )
        >>> print(event)
        step 40: head 3 of layers.0.attn is saturated, logit_row_std 6 is 0.75 x sqrt(d_k=64) (limit 0.5)
        >>> event.kind, event.topic, event.latest
        ('saturated', 'saturated', 40)
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
    critical_reason: str = ""
    cause: str = ""
    remedy: str = ""
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    baseline_step: int | None = None
    scale_ratio: float | None = None
    q_rms: float | None = None
    k_rms: float | None = None
    alignment: float | None = None
    logit_max: float | None = None

    def __str__(self) -> str:
        return "\n  ".join(self._parts)

    @property
    def line(self) -> str:
        """The message in one line."""
        return "; ".join(self._parts)

    @property
    def kind(self) -> Kind:
        """What the event is of; a head has at most one open event of each kind."""
        kinds: dict[str, Kind] = {NONFINITE: "nonfinite", OVERFLOW: "overflow"}
        return kinds.get(self.statistic, "saturated")

    @property
    def topic(self) -> Topic:
        """What the event is told under."""
        return "critical" if self.kind == "saturated" and self.severity == "critical" else self.kind

    @property
    def latest(self) -> int:
        """The step that the numbers are from, in the unit of `step`."""
        return self.step if self.critical_step is None else self.critical_step

    @property
    def finding(self) -> str:
        """What was found where, without the step and without what makes it critical."""
        since = f", since step {self.step}" if self.latest != self.step else ""
        return f"head {self.head} of {self.layer} {self._measured()}{since}"

    @property
    def explanation(self) -> str:
        """The likely cause and what people do about it; empty if neither is known."""
        helps = f"what helps: {self.remedy}" if self.remedy else ""
        return "; ".join(part for part in (self.cause, helps) if part)

    @property
    def _parts(self) -> list[str]:
        reason = f"; critical: {self.critical_reason}" if self.critical_reason else ""
        parts = [f"step {self.latest}: {self.finding}{reason}", self.explanation]
        return [part for part in parts if part]

    def _measured(self) -> str:
        if self.statistic == NONFINITE:
            noun = "logit that is" if self.value == 1 else "logits that are"
            return f"has {self.value:.0f} unmasked {noun} nan or inf"
        if self.statistic == OVERFLOW:
            return f"has a logit of {self.value:.3g}, {of_float16(self.ratio)} the largest float16 number, 65504"
        if self.statistic == COLLAPSE:
            return f"passes {self.value:.1%} of the gradient of uniform attention (jacobian_trace)"
        if self.statistic == "critical_ratio":
            return f"is saturated, critical_ratio {self.value:.3g} (limit {self.threshold:g})"
        return (
            f"is saturated, {self.statistic} {self.value:.3g} is {self.ratio:.3g} x sqrt(d_k={self.head_dim}) "
            f"(limit {self.threshold:g})"
        )


def of_float16(ratio: float) -> str:
    """Return how large a logit is beside the largest float16 number.

    Example:
        >>> of_float16(0.623), of_float16(1.99)
        ('62% of', '1.99 times')
    """
    return f"{ratio:.0%} of" if round(ratio, 2) <= 1 else f"{ratio:.3g} times"


def by_topic(events: Sequence[SaturationEvent]) -> dict[Topic, list[SaturationEvent]]:
    """Return the events of each topic that has some, the most serious topic first."""
    found = {topic: [event for event in events if event.topic == topic] for topic in _HEADINGS}
    return {topic: some for topic, some in found.items() if some}


def heading(topic: Topic, heads: int, more: bool = False, again: int = 0) -> str:
    """Return how many heads have events of a topic, `more` after others, and how many others have one `again`.

    Example:
        >>> heading("critical", 2), heading("nonfinite", 1, more=True)
        ('2 heads are critical', '1 more head is critical, its logits are nan or inf')
        >>> heading("saturated", 2, more=True, again=1), heading("saturated", 0, more=True, again=1)
        ('2 more heads are newly saturated, 1 again', '1 head is saturated again')
    """
    if again and not heads:
        return _counted(again, "", _AGAIN[topic])
    return _counted(heads, " more" if more else "", _HEADINGS[topic]) + (f", {again} again" if again else "")


def _counted(heads: int, more: str, texts: tuple[str, str]) -> str:
    return f"{heads}{more} {f'head {texts[0]}' if heads == 1 else f'heads {texts[1]}'}"


def worst_first(events: Iterable[SaturationEvent]) -> list[SaturationEvent]:
    """Return events in the order of how far their heads are above the limit."""
    return sorted(events, key=lambda event: event.ratio / event.threshold, reverse=True)


def listed(events: Sequence[SaturationEvent], where: str = "`monitor.events`", most: int = _LISTED) -> list[str]:
    """Return the lines that tell of events, the worst heads first; what is said of many is said once."""
    worst = worst_first(events)
    groups: dict[tuple[str, str], list[SaturationEvent]] = {}
    for event in worst[:most]:
        groups.setdefault((event.critical_reason, event.remedy), []).append(event)
    lines = []
    said = {""}
    for (reason, _), group in groups.items():
        lines += [f"  step {event.latest}: {event.finding}" for event in group]
        if reason not in said:
            said.add(reason)
            lines.append(f"    critical: {reason}")
        if explanation := group[0].explanation:
            whose = f"{_CAUSE} (for the worst of these, head {group[0].head} of {group[0].layer}):"
            lines.append(f"    {explanation.replace(f'{_CAUSE}:', whose, 1) if len(group) > 1 else explanation}")
    more = [f"  and {len(worst) - most} more, all in {where}"] if len(worst) > most else []
    return lines + more


class AttentionSaturationError(RuntimeError):
    """Training was ended because heads are critically saturated, or their logits are nan or inf.

    Attributes:
        events: The critical events, empty on a rank that has none of its own.

    Example:
        >>> from attn_monitor import AttentionMonitor, AttentionSaturationError
        >>> monitor = AttentionMonitor(on_saturation="raise")
        >>> try:  # around `trainer.fit(...)`
        ...     raise AttentionSaturationError(monitor.events)
        ... except AttentionSaturationError as error:
        ...     print(error)
        attention is critically saturated
          the events were found by another rank
    """

    def __init__(self, events: Sequence[SaturationEvent]) -> None:
        self.events = list(events)
        found = listed(self.events, most=LISTED_ALOUD) or ["  the events were found by another rank"]
        broken = sum(event.kind == "nonfinite" for event in self.events)
        what = ["attention is critically saturated"] if broken < max(len(self.events), 1) else []
        what += ["logits are nan or inf"] if broken else []
        super().__init__("\n".join([" and ".join(what), *found]))

    def __reduce__(self) -> tuple[type[AttentionSaturationError], tuple[list[SaturationEvent]]]:
        return type(self), (self.events,)  # exceptions of workers travel pickled

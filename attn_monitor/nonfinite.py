"""Where numbers that are not finite began, as far as records can tell, and in honest words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from attn_monitor.flight_records import Beginning
from attn_monitor.records import AttentionStatistics


class Turn(NamedTuple):
    """The first loss that is not finite."""

    step: int
    loss: float
    exact: bool
    """Whether the losses just before it are known."""


class Largest(NamedTuple):
    """The largest logit by magnitude of a record."""

    step: int
    layer: str
    head: int
    value: float


def broken_heads(statistics: Mapping[str, AttentionStatistics]) -> list[tuple[str, int]]:
    """Return layer and head of all logits that are nan or inf, in the order of the forward pass."""
    return [
        (layer, head)
        for layer, stats in statistics.items()
        for head, count in enumerate(stats.nonfinite.tolist())
        if count
    ]


def where_it_began(
    turn: Turn | None,
    seen_at: int | None,
    statistics: Mapping[str, AttentionStatistics],
    largest: Largest | None,
    *,
    earlier: Beginning | None = None,
) -> Beginning:
    """Name the head where it began.

    In one forward pass what is nan spreads to what comes later, so that the first head in its order is where it began.
    An update with nan, however, leaves every weight nan: then only a guess is left.

    Args:
        turn: The first loss that is not finite, `None` if it is not known.
        seen_at: The step of the record, `None` if there is none.
        statistics: The record, layers in the order of the forward pass.
        largest: The largest logit of the last record without nan and inf.
        earlier: What was found when logits turned nan or inf before that and stayed so.
    """
    if turn is not None:
        start = f"the loss turned {turn.loss} at step {turn.step}{'' if turn.exact else ' or before'}"
    else:
        start = f"logits turned nan or inf by step {seen_at}"
    step = seen_at or 0 if turn is None else turn.step
    loss = "" if turn is None else str(turn.loss)
    if earlier is not None and earlier.basis == "logits":
        before = "before that, " if earlier.step < step else ""
        return replace(earlier, step=step, loss=loss, text=f"{start}; {before}{earlier.text}")
    broken = broken_heads(statistics)
    total = sum(stats.heads for stats in statistics.values())
    if broken and (len(broken) < total or total == 1):
        layer, head = broken[0]
        heads = statistics[layer].heads
        # Which of them it is, cannot be looked up: by the time a record is read the optimizer has made all weights nan.
        beside = sum(name == layer for name, _ in broken) == heads > 1
        alike = f", as in all {heads} of its heads: look at the layer's input and its query/key weights"
        text = (
            f"{start}; in the order of the forward pass it begins in head {head} of {layer}"
            f"{alike if beside else ''}{_later(step, seen_at)}"
        )
        return Beginning(step=step, loss=loss, seen_at=seen_at, basis="logits", layer=layer, head=head, text=text)
    if broken:
        why = f"by step {seen_at} all {total} heads have nan or inf logits, so that the first one cannot be told"
    elif seen_at is None:
        why = "no later step was observed"
    else:
        gone = "" if seen_at == step else ", or it was gone by then"
        why = f"all logits of step {seen_at} are finite: it began outside of them{gone}"
    if largest is None:
        return Beginning(step=step, loss=loss, seen_at=seen_at, text=f"{start}; {why}")
    guess = (
        f"the largest logit in the last finite record, {largest.value:.3g} at step {largest.step}, was that of head "
        f"{largest.head} of {largest.layer}"
    )
    return Beginning(
        step=step,
        loss=loss,
        seen_at=seen_at,
        basis="largest",
        layer=largest.layer,
        head=largest.head,
        text=f"{start}; {why}; {guess}",
    )


def _later(step: int, seen_at: int | None) -> str:
    """Return what must be said if the model was updated in between."""
    if seen_at is None or seen_at <= step:
        return ""
    return f" (seen at step {seen_at}; updates since may have moved it)"

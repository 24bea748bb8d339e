"""What one step of QK-Clip did, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClippedHead:
    """A head whose weights were rescaled.

    Attributes:
        layer: The layer.
        head: The query head.
        logit_max: Its largest logit before.
        gamma: By what its logits are multiplied from now on.
        queries_alone: Why W_q took the whole of gamma; empty where W_k took its part.
        factors: By what W_q and W_k were multiplied.
    """

    layer: str
    head: int
    logit_max: float
    gamma: float
    queries_alone: str = ""
    factors: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Clipped:
    """What one step of QK-Clip did.

    Attributes:
        heads: What was rescaled.
        refused: Layers with a head that was not rescaled though it should have been, with the reason.
        waiting: Layers with a head above tau whose weights are looked for in the next observed step.
        notes: What to know, by layer or head: the first that was rescaled in the run, and where rescaling has no
            lasting effect.
    """

    heads: tuple[ClippedHead, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def first_clip(clipped: Sequence[ClippedHead], tau: float, step: int | None) -> dict[str, str]:
    """Return what to say of the first clip of a run, by what it is about.

    Args:
        clipped: The heads that were rescaled.
        tau: The largest logit that is let be.
        step: The step, `None` if it is not known.
    """
    worst = max(clipped, key=lambda entry: entry.logit_max)
    query, key = worst.factors
    if query == key:
        times = f"weights times {query:.2f}"
    else:
        times = f"W_q times {query:.2f}" + (f", W_k times {key:.2f}" if key < 1 else "")
    more = f"; {len(clipped) - 1} more in this step" if len(clipped) > 1 else ""
    where = f"{worst.layer} head {worst.head}"
    text = f"largest logit {worst.logit_max:.4g} > {tau:g}, {times}{more}"
    return {where if step is None else f"step {step}: {where}": text}


def heads_by_reason(reasons: Mapping[int, str]) -> str:
    """Return why some heads of a layer are left alone."""
    heads: dict[str, list[int]] = {}
    for head, reason in sorted(reasons.items()):
        heads.setdefault(reason, []).append(head)
    return "; ".join(f"head {', '.join(map(str, named))}: {reason}" for reason, named in heads.items())

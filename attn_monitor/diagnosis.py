"""Why the logits of a head are large, and what people do about it, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from attn_monitor.events import of_float16
from attn_monitor.growth import GROWN, PRODUCT, REST, SPREAD, Growth, grown_factors, growth, whole_percents

FACTORS = (*PRODUCT, "qk_std", "logit_row_std", "logit_max")
"""The per-head numbers a diagnosis may use."""

SAFE_SCALE = (0.8, 1.2)
"""Where the literature finds scale * sqrt(d_k) harmless."""
SINK = 0.5
"""A head that has more of its probability than this on the first key, or on a learned sink, rests on a sink."""
_CAUSE = "likely cause: "
_VECTORS = {"q_rms": "query", "k_rms": "key"}
_NEAR = 0.05
"""How far a scale may be, as a share, from one that a known slip makes."""
_MATTERS = 0.05
"""Where only one factor has a larger share of a growth than this, there are no shares to tell."""

SLOWER = "lower the learning rate or warm up longer; QK-norm"
NORMS = f"{SLOWER}, QK-clip, or weight decay on W_q and W_k"
DIRECTIONS = "lower the learning rate or warm up longer; a logit softcap"
ADDED = "look at the bias or the mask that is added to the logits; a logit softcap"
SCALE = "restore the scale 1/sqrt(d_k)"
LEARNED_SCALE = "bound the learned scale, or lower its learning rate"
TEMPERATURE = "bound the temperature or scale, or lower its learning rate; normalise the vectors that it multiplies"
RESTING = "nothing while the loss is fine, heads that rest on a sink are normal"
FLOAT32 = "until then keep the logits and the softmax in float32"
PRECISION = f"QK-norm or a logit softcap; {FLOAT32}"
INITIAL = "check the initialisation, or the checkpoint that was loaded"
INITIAL_TEMPERATURE = "check the temperature or scale, or the checkpoint that was loaded"
BROKEN = "look at the layer's input, its query/key weights and the gradient norm of the step before"
UNKNOWN = "look at the inputs and the step before; in float16 or bfloat16 keep the logits and the softmax in float32"
SINGLE = "look at this batch, and at the mask or bias that is added to the logits"
SCALE_FIRST = f"in float16 scale the queries before the product, or have it in float32; else {SINGLE}"
_REMEDIES = {"scale_ratio": LEARNED_SCALE, "q_rms": NORMS, "k_rms": NORMS, "alignment": DIRECTIONS, REST: ADDED}
_LABELS = {
    "scale_ratio": "the scale",
    "q_rms": "q_rms",
    "k_rms": "k_rms",
    "alignment": "the alignment of q and k",
    REST: "the rest (bias, softcap, row offsets)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is known about large logits; empty texts where nothing is.

    Attributes:
        cause: The likely cause.
        remedy: What people do about it.
        shares: The share of each factor in the growth since the baseline, see `attn_monitor.growth`.
    """

    cause: str = ""
    remedy: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)


def diagnose(
    now: Mapping[str, float],
    first: Mapping[str, float],
    *,
    since: int,
    head_dim: int | None,
    sink_mass: float | None = None,
    say_shares: bool = True,
    scale_meant: bool = False,
) -> Diagnosis:
    """Return why a head's logits are large.

    Args:
        now: The head's factors in this observation; missing ones are unknown.
        first: Its factors at its first observation.
        since: The step of that first observation.
        head_dim: D of query and key.
        sink_mass: The probability on the first key and a learned sink.
        say_shares: Whether the cause names the shares of the factors.
        scale_meant: Whether the scale is what the design wants, as in cosine attention, whatever it is.
    """
    factors = grown_factors(now, first)
    grown = {name: by for name, by in factors.items() if by >= GROWN}
    whole = growth(now, first)
    shares = dict(whole.shares) if whole is not None else {}
    scale = "" if scale_meant or "scale_ratio" in grown else scale_in_words(now.get("scale_ratio"), head_dim)
    clauses, remedies = ([scale], [SCALE]) if scale else ([], [])
    if not any(name in now for name in (*PRODUCT, "qk_std")):
        if clause := _logits_clause(whole, now, since):
            clauses = [clause]
            remedies = [TEMPERATURE if _has_grown(whole) else INITIAL_TEMPERATURE]
    elif grown:
        most = max(grown, key=lambda name: grown[name])
        clauses.append(_growth_clause(grown, most, shares if say_shares else {}, since))
        remedies.append(_REMEDIES[most])
    elif not scale and (largest := _largest(now)):
        initial = first.get(largest, 0) > GROWN
        since_when = " at the first observation already" if initial else ""
        clauses.append(f"{_LABELS[largest]} is {now[largest]:.3g}{since_when} (usual: about 1)")
        remedies.append(INITIAL if initial else _REMEDIES[largest])
    if sink_mass is not None and sink_mass > SINK:
        clauses.append(f"the head rests on a sink, the first key has {sink_mass:.0%} of its probability")
        remedies.insert(0, RESTING)
    cause = f"{_CAUSE}{', and '.join(clauses)}" if clauses else ""
    return Diagnosis(cause=cause, remedy=remedies[0] if remedies else "", shares=shares)


def diagnose_overflow(found: Diagnosis) -> Diagnosis:
    """Return what helps against logits near the end of float16, whatever makes them as large as that.

    Args:
        found: Why they are large.
    """
    if not found.cause:
        return Diagnosis(remedy=PRECISION)
    return Diagnosis(cause=found.cause, remedy=f"{found.remedy}; {FLOAT32}", shares=found.shares)


def diagnose_nonfinite(
    lost: Mapping[str, float],
    now: Mapping[str, float],
    reach: float | None,
    product_reach: float | None = None,
    earlier: str = "",
) -> Diagnosis:
    """Return why a head has logits that are nan or inf, as far as something that was measured tells.

    What grew before that says nothing of it, and nor does the scale.

    Args:
        lost: The head's factors that were measured and are nan or inf.
        now: Those that are finite.
        reach: Its largest finite logit over the largest float16 number; `None` if that is far from 1, or unknown.
        product_reach: The same of q.k before the scale.
        earlier: The first layer with such logits, if it is an earlier one.
    """
    if broken := [noun for name, noun in _VECTORS.items() if math.isnan(lost.get(name, 0.0))]:
        follows = f", as may follow from {earlier}, which runs earlier and has nan or inf too" if earlier else ""
        text = f"every {' and every '.join(broken)} of the head is nan or inf{follows}"
        return Diagnosis(cause=f"{_CAUSE}{text}", remedy=BROKEN)
    if infinite := [name for name in _VECTORS if math.isinf(lost.get(name, 0.0))]:
        are = "is" if len(infinite) == 1 else "are"
        return Diagnosis(cause=f"{_CAUSE}an overflow, {' and '.join(infinite)} {are} inf", remedy=PRECISION)
    if reach is not None:
        text = f"an overflow, the finite logits reach {of_float16(reach)} the largest float16 number"
        return Diagnosis(cause=f"{_CAUSE}{text}", remedy=PRECISION)
    if product_reach is not None:  # the precision of the product is not known
        text = (
            f"in float16 an overflow, q.k reaches {of_float16(product_reach)} its largest number before the scale; "
            "else single tokens, the mask or the bias"
        )
        return Diagnosis(cause=f"{_CAUSE}{text}", remedy=SCALE_FIRST)
    if all(name in now for name in _VECTORS):
        text = "single tokens, the mask or the bias, as other queries and keys of the head are finite"
        return Diagnosis(cause=f"{_CAUSE}{text}", remedy=SINGLE)
    return Diagnosis(remedy=UNKNOWN)


def explain(now: Mapping[str, float], first: Mapping[str, float], *, since: int, head_dim: int | None) -> str:
    """Return the likely cause of large logits alone, without shares, see `diagnose`."""
    return diagnose(now, first, since=since, head_dim=head_dim, say_shares=False).cause


def scale_in_words(ratio: float | None, head_dim: int | None) -> str:
    """Name a scale above the safe range; empty for one that cannot make logits large.

    Example:
        >>> scale_in_words(8.0, 64), scale_in_words(3.0, 64), scale_in_words(1.1, 64)
        ('the scale 1/sqrt(d_k) is missing', 'the scale is 3x 1/sqrt(d_k)', '')
    """
    if ratio is None or abs(ratio) <= SAFE_SCALE[1]:
        return ""
    return scale_slip(ratio, head_dim) or f"the scale is {ratio:.3g}x 1/sqrt(d_k)"


def scale_slip(ratio: float, head_dim: int | None, heads: int = 1) -> str:
    """Return what a scale outside of the safe range most likely is; empty for one that no known slip makes.

    Args:
        ratio: The scale times sqrt(d_k); its sign does not matter.
        head_dim: D of query and key.
        heads: The number of heads, where it is known.

    Example:
        >>> scale_slip(0.5, 64), scale_slip(3.0, 64)
        ('the scale is halved', '')
    """
    if head_dim is None or head_dim < 2:
        return ""
    slips = (
        (head_dim**0.5, "the scale 1/sqrt(d_k) is missing"),
        (head_dim, "sqrt(d_k) stands in place of 1/sqrt(d_k)"),
        (head_dim**-0.5, "1/d_k stands in place of 1/sqrt(d_k), or the scale is applied twice"),
        (2.0, "the scale is doubled"),
        (0.5, "the scale is halved"),
        (heads**-0.5, f"1/sqrt(d_model) stands in place of 1/sqrt(d_k) of {heads} heads"),
    )
    return ", or ".join(text for value, text in slips if abs(abs(ratio) / value - 1) < _NEAR)


def _growth_clause(grown: Mapping[str, float], most: str, shares: Mapping[str, float], since: int) -> str:
    """Name what grew most, by what, and which other factors took part in the growth."""
    text = f"{_LABELS[most]} grew {grown[most]:.3g}x since step {since}"
    parts = [(name, share) for name, share in shares.items() if abs(share) >= _MATTERS]
    complete = abs(sum(shares.values()) - 1) < _MATTERS
    if not complete or len(parts) < 2:
        return text
    listed = sorted(whole_percents(shares).items(), key=lambda part: (part[0] == REST, -part[1]))
    return f"{text} ({', '.join(f'{name} {share}%' for name, share in listed if share)} of the growth)"


def _has_grown(whole: Growth | None) -> TypeGuard[Growth]:
    return whole is not None and whole.total >= GROWN


def _logits_clause(whole: Growth | None, now: Mapping[str, float], since: int) -> str:
    """Say what is known of logits that were shown without query and key; empty if that is nothing."""
    largest = f", the largest is {now['logit_max']:.3g} now" if "logit_max" in now else ""
    if _has_grown(whole):
        return (
            f"a temperature, scale or vectors that grew, since the logits spread {whole.total:.3g}x as far as at step "
            f"{since}{largest} (without query and key no more is known)"
        )
    return f"logits that are wide from their first observation on{largest}" if largest and SPREAD in now else ""


def _largest(now: Mapping[str, float]) -> str:
    """Return the factor furthest above its usual value of about 1, empty if none is."""
    sizes = {name: now[name] for name in ("q_rms", "k_rms", "alignment") if now.get(name, 0) > GROWN}
    return max(sizes, key=lambda factor: sizes[factor], default="")

"""By what logit_row_std grew, as an equation: its factors multiply to the growth, their shares add up to 100 %."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attn_monitor.diagnosis import SAFE_SCALE

_GROWN = 1.25
"""Below this, shares of the growth would be shares of noise."""
_MATTERS = 1.1
_VISIBLE = 0.005
"""A rest nearer to 1 than this shows as 1 in three digits."""
_PRODUCT = ("scale_ratio", "q_rms", "k_rms", "alignment")
_REST = "bias, softcap and row offsets"


def growth_in_words(before: Mapping[str, float], now: Mapping[str, float], *, sick: bool) -> list[str]:
    """Return what became of logit_row_std, and of a scale that makes it large without growing.

    Args:
        before: The factors of the head at its first observation; missing ones are unknown.
        now: Its factors later.
        sick: Whether the head needs an explanation, however little it grew.
    """
    grown = _ratio(now, before, "logit_row_std")
    if grown is None or (grown < _GROWN and not sick):
        return []
    start = f"logit_row_std {before['logit_row_std']:.3g} to {now['logit_row_std']:.3g}, {grown:.3g}x"
    parts = [f"{start} = {' * '.join(factors)}" if (factors := _factors(before, now, grown)) else start]
    scale, change = now.get("scale_ratio"), _ratio(now, before, "scale_ratio")
    if sick and scale is not None and change is not None and abs(scale) > SAFE_SCALE[1] and change < _MATTERS:
        parts.append(f"scale_ratio {scale:.3g} (usual: 1), from the start" if change > 1 / _MATTERS else "")
    return [part for part in parts if part]


def _factors(before: Mapping[str, float], now: Mapping[str, float], grown: float) -> list[str]:
    """Return the factors of a growth, the largest first, and as `other` what none of them accounts for."""
    if grown < _GROWN:
        return []
    known = {name: ratio for name in _PRODUCT if (ratio := _ratio(now, before, name)) is not None}
    products = _ratio(now, before, "qk_std")
    if products is not None:
        known[_REST] = grown / products
    shown = {name: ratio for name, ratio in known.items() if not 1 / _MATTERS < ratio < _MATTERS}
    if not shown:
        return []
    parts = sorted(shown.items(), key=lambda part: -part[1])
    other = grown / math.prod(shown.values())
    if abs(other - 1) > _VISIBLE:
        parts.append(("other", other))
    shares = _whole_percents([math.log(ratio) / math.log(grown) for _, ratio in parts])
    return [
        f"{name} {ratio:.3g}x ({share} %{', shrank' if ratio < 1 / _MATTERS else ''})"
        for (name, ratio), share in zip(parts, shares, strict=True)
    ]


def _whole_percents(shares: Sequence[float]) -> list[int]:
    """Round shares so that they still add up: those with the largest remainders are rounded up."""
    percents = [math.floor(100 * share) for share in shares]
    missing = round(100 * sum(shares)) - sum(percents)
    for index in sorted(range(len(shares)), key=lambda index: percents[index] - 100 * shares[index])[:missing]:
        percents[index] += 1
    return percents


def _ratio(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float | None:
    ratio = now[name] / before[name] if name in now and before.get(name) else math.nan
    return ratio if math.isfinite(ratio) and ratio > 0 else None

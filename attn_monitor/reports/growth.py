"""By what logit_row_std grew, as an equation of words: its factors multiply to the growth, their shares add up."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attn_monitor.diagnosis import SAFE_SCALE
from attn_monitor.growth import GROWN, REST, SPREAD, growth, ratio, whole_percents

_MATTERS = 1.1
_VISIBLE = 0.005
"""A rest nearer to 1 than this shows as 1 in three digits."""


def growth_in_words(before: Mapping[str, float], now: Mapping[str, float], *, sick: bool) -> list[str]:
    """Return what became of logit_row_std, empty if it is what it was, and of a scale that makes it large so.

    Args:
        before: The factors of the head at its first observation; missing ones are unknown.
        now: Its factors later.
        sick: Whether the head needs an explanation, however little it grew.
    """
    found = growth(now, before)
    if found is None or (found.total < GROWN and not sick):
        return []
    start = f"logit_row_std {before[SPREAD]:.3g} to {now[SPREAD]:.3g}, {found.total:.3g}x"
    factors = _factors(found.factors, found.total)
    parts = [f"{start} = {' * '.join(factors)}" if factors else start]
    if f"{found.total:.3g}" == "1":  # as at the only observation
        parts = [""]
    scale, change = now.get("scale_ratio"), ratio(now, before, "scale_ratio")
    if sick and scale is not None and change is not None and abs(scale) > SAFE_SCALE[1] and change < _MATTERS:
        parts.append(f"scale_ratio {scale:.3g} (usual: 1), from the start" if change > 1 / _MATTERS else "")
    return parts[:1] + [part for part in parts[1:] if part]


def _factors(known: Mapping[str, float], total: float) -> list[str]:
    """Return the factors of a growth, the largest first, and last, as the rest, what none of them accounts for."""
    shown = {name: by for name, by in known.items() if name != REST and not 1 / _MATTERS < by < _MATTERS}
    if total < GROWN or not (shown or not 1 / _MATTERS < known.get(REST, 1.0) < _MATTERS):
        return []
    parts = dict(sorted(shown.items(), key=lambda part: -part[1]))
    rest = total / math.prod(shown.values())
    if abs(rest - 1) > _VISIBLE:
        parts[REST] = rest
    shares = whole_percents({name: math.log(by) / math.log(total) for name, by in parts.items()})
    return [
        f"{name} {by:.3g}x ({shares[name]} %{', shrank' if by < 1 / _MATTERS else ''})" for name, by in parts.items()
    ]

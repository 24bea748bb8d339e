"""By what the logits of a head grew, as an equation: the factors multiply to the growth, their shares add up to 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PRODUCT = ("scale_ratio", "q_rms", "k_rms", "alignment")
"""The factors whose product is `qk_std`, the spread of scale * query . key."""
REST = "rest"
"""The fifth factor, `logit_row_std / qk_std`: what bias, softcap and row offsets make of the products."""
SPREAD = "logit_row_std"
GROWN = 1.25
"""Below this, shares of a growth would be shares of noise."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a head has come since its baseline.

    Attributes:
        total: By what `logit_row_std` grew.
        factors: By what each known factor grew; those of `PRODUCT`, and `rest`.
        shares: The part of each factor in the logarithm of the growth, negative for one that shrank. They add up to 1
            where all factors are known. Empty if the head did not clearly grow.
    """

    total: float
    factors: Mapping[str, float]
    shares: Mapping[str, float]


def growth(now: Mapping[str, float], before: Mapping[str, float]) -> Growth | None:
    """Return by what the logits grew, `None` where it is not known.

    Example:
        >>> before = {"logit_row_std": 1.0, "qk_std": 1.0, "q_rms": 1.0, "k_rms": 1.0}
        >>> found = growth({"logit_row_std": 8.0, "qk_std": 8.0, "q_rms": 2.0, "k_rms": 4.0}, before)
        >>> found.total, {name: round(share, 3) for name, share in found.shares.items()}
        (8.0, {'q_rms': 0.333, 'k_rms': 0.667, 'rest': 0.0})
    """
    total = ratio(now, before, SPREAD)
    if total is None:
        return None
    factors = grown_factors(now, before)
    shares = {name: math.log(by) / math.log(total) for name, by in factors.items()} if total >= GROWN else {}
    return Growth(total, factors, shares)


def grown_factors(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return by what each factor grew, of those that are known then and now."""
    found = {name: ratio(now, before, name) for name in PRODUCT}
    total, products = ratio(now, before, SPREAD), ratio(now, before, "qk_std")
    if total is not None and products is not None:
        found[REST] = total / products
    return {name: by for name, by in found.items() if by is not None}


def ratio(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float | None:
    """Return by what one number grew, `None` unless that is a positive finite number."""
    by = now[name] / before[name] if name in now and before.get(name) else math.nan
    return by if math.isfinite(by) and by > 0 else None


def whole_percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Round shares to whole per cent that still add up: those that lose most by rounding down are rounded up.

    Example:
        >>> whole_percents({"q_rms": 0.335, "k_rms": 0.335, "rest": 0.33})
        {'q_rms': 34, 'k_rms': 33, 'rest': 33}
    """
    rounded = {name: math.floor(100 * share) for name, share in shares.items()}
    lost = sorted(shares, key=lambda name: 100 * shares[name] - rounded[name], reverse=True)
    for name in lost[: round(100 * sum(shares.values())) - sum(rounded.values())]:
        rounded[name] += 1
    return rounded

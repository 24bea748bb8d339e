"""Why the logits of a head are large, in words: the factors of qk_std = scale_ratio * q_rms * k_rms * alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping

FACTORS = ("scale_ratio", "q_rms", "k_rms", "alignment", "qk_std", "logit_row_std", "logit_max")
"""The per-head numbers an explanation may use."""

SAFE_SCALE = (0.8, 1.2)
"""Where the literature finds scale * sqrt(d_k) harmless."""
_GROWN = 1.25
_NEAR = 0.1


def explain(now: Mapping[str, float], first: Mapping[str, float], *, since: int, head_dim: int | None) -> str:
    """Return the likely cause of large logits, empty if nothing is known.

    Args:
        now: The head's factors in this observation; missing ones are unknown.
        first: Its factors at its first observation.
        since: The step of that first observation.
        head_dim: D of query and key.
    """
    grown = _growth(now, first)
    clauses = [_scale_clause(now, head_dim)] if "scale_ratio" not in grown else []
    if grown:
        name = max(grown, key=lambda factor: grown[factor])
        clauses.append(f"{_LABELS[name]} grew {grown[name]:.3g}x since step {since}")
    elif not any(clauses):
        clauses.append(_largest_clause(now))
    cause = ", and ".join(clause for clause in clauses if clause)
    return f"likely cause: {cause}" if cause else ""


_LABELS = {
    "scale_ratio": "the scale",
    "q_rms": "q_rms",
    "k_rms": "k_rms",
    "alignment": "the alignment of q and k",
    "rest": "what is added to scale * q.k (bias, row offsets)",
}


def _growth(now: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """Return by what each factor grew, of those that clearly did."""
    later, earlier = _with_rest(now), _with_rest(first)
    ratios = {name: later[name] / earlier[name] for name in _LABELS if later.get(name) and earlier.get(name)}
    return {name: ratio for name, ratio in ratios.items() if ratio >= _GROWN}


def _with_rest(factors: Mapping[str, float]) -> dict[str, float]:
    """Add the fifth factor, what bias, softcap and row offsets make of the products."""
    known = dict(factors)
    if known.get("qk_std") and "logit_row_std" in known:
        known["rest"] = known["logit_row_std"] / known["qk_std"]
    return known


def _scale_clause(now: Mapping[str, float], head_dim: int | None) -> str:
    """Name a scale above the safe range; one below it cannot make logits large."""
    ratio = now.get("scale_ratio")
    if ratio is None or abs(ratio) <= SAFE_SCALE[1]:
        return ""
    if head_dim is not None and head_dim > 1:
        power = math.log(abs(ratio)) / math.log(head_dim)
        tolerance = _NEAR / math.log(head_dim)
        if abs(power - 0.5) < tolerance:
            return "the scale 1/sqrt(d_k) is missing"
        if abs(power - 1) < tolerance:
            return "the scale is inverted, sqrt(d_k) in place of 1/sqrt(d_k)"
    return f"the scale is {ratio:.3g}x 1/sqrt(d_k)"


def _largest_clause(now: Mapping[str, float]) -> str:
    """Name the factor furthest above its usual value of about 1."""
    sizes = {name: now[name] for name in ("q_rms", "k_rms", "alignment") if now.get(name, 0) > _GROWN}
    if not sizes:
        return ""
    name = max(sizes, key=lambda factor: sizes[factor])
    return f"{_LABELS[name]} is {sizes[name]:.3g} (usual: about 1)"

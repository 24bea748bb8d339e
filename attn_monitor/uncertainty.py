"""How far estimates from sampled rows may be off: standard errors of what sums of sampled rows estimate.

Axes: N sums, B batch, H query heads, Q sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLED_SUMS = (
    *("row_var", "row_critical", "logit_dev", "logit_m2", "qk_m2", "q_sq", "grad_logits_sq", "grad_probs_sq"),
    *("entropy", "entropy_normalized", "max_probability", "sink_mass", "jacobian_trace", "jacobian_norm"),
)
"""The sums over rows whose variances are known where rows are sampled."""
VARIANCES = tuple(f"{name}_v" for name in SAMPLED_SUMS)
_MEANS = {
    "logit_mean": ("logit_dev", "logit_n"),
    **{name: (name, "prob_n") for name in SAMPLED_SUMS[SAMPLED_SUMS.index("entropy") :]},
}
"""Statistics that are a sum divided by a count."""
_ROOTS = {
    "logit_std": ("logit_m2", "logit_n"),
    "logit_row_std": ("row_var", "row_n"),
    "critical_ratio": ("row_critical", "row_n"),
    "qk_std": ("qk_m2", "qk_n"),
    "q_rms": ("q_sq", "q_n"),
}
"""Statistics that are the root of such a mean."""
_NORMS = {"grad_logits_norm": "grad_logits_sq", "grad_probs_norm": "grad_probs_sq"}
"""Statistics that are the root of a sum."""


def variance_of_sum(parts_NBHQ: Tensor, weights_Q: Tensor) -> Tensor:
    """Return the variance of the sum over sampled rows, each drawn from a stretch of its own, [N, H].

    It follows from the differences of neighbours, for one draw says nothing of the spread within its stretch: the
    collapsed strata of Cochran, Sampling Techniques (1977), section 5A.12. It is a little too large where neighbouring
    stretches differ.

    Args:
        parts_NBHQ: What each row contributes to N sums, weighted.
        weights_Q: How many rows each sampled row stands for.

    Returns:
        The variances; nan if there is only one row.
    """
    rows_NHQ = parts_NBHQ.sum(1) / weights_Q
    if rows_NHQ.shape[-1] < 2:
        return torch.full_like(rows_NHQ[..., 0], math.nan)
    apart = rows_NHQ.diff(dim=-1).square() / 2
    spread = (torch.cat([apart[..., :1], apart], dim=-1) + torch.cat([apart, apart[..., -1:]], dim=-1)) / 2
    return (weights_Q * (weights_Q - 1) * spread).sum(-1)  # a stretch of one row has nothing unseen


def standard_errors(
    sums: Mapping[str, Tensor], statistics: Mapping[str, Tensor | None], losses: int = 1
) -> dict[str, Tensor]:
    """Return the standard errors of statistics from sampled rows, each [H] in the statistic's unit.

    A root is linearised: the error of sqrt(x) is that of x, divided by 2 sqrt(x).

    Args:
        sums: Counts, and variances of sums by the names of `VARIANCES`, each [H]; 0 where no row was sampled.
        statistics: The statistics.
        losses: What the gradients were divided by.
    """
    found: dict[str, Tensor] = {}
    for name, value in statistics.items():
        if value is None:
            continue
        if name in _MEANS:
            total, count = _MEANS[name]
            found[name] = sums[f"{total}_v"].sqrt() / sums[count]
        elif name in _ROOTS:
            total, count = _ROOTS[name]
            found[name] = _of_root(sums[f"{total}_v"].sqrt() / sums[count], value)
        elif name in _NORMS:
            found[name] = _of_root(sums[f"{_NORMS[name]}_v"].sqrt() / losses**2, value)
    return {name: error for name, error in found.items() if bool((error != 0).any())}


def _of_root(error: Tensor, root: Tensor) -> Tensor:
    """Return the error of a root from that of what is under it; a sum of squares that is 0 has no error."""
    return torch.where(root == 0, 0, error / (2 * root))

"""What is known of each row of an attention, and the sums over rows that follow, per head.

Axes: B batch, H query heads, Q queries. Everything here is float64 (float32 on mps) and small beside a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attn_monitor.records import CallShape
from attn_monitor.sums import pool_moments, state_dtype


class RowValues:
    """Named values of each row, [B, H, Q], filled tile by tile; what is never put is 0.

    The names: `allowed`, how many keys the row may see; `logit_n`, `logit_mean`, `logit_m2` and the same of `qk`, its
    finite entries; `largest`, `negated_smallest`; `q_n`, `q_sq`, the entries of its query; and of the softmax, with the
    likeliest outcome set aside, `rest1`, `rest2`, `rest3` (sums of e, e^2, e^3 over the other outcomes, where e is
    relative to the likeliest), `weighted` (sum of e times the logit's distance to the largest), `top`, `first`, `sink`
    (e of the likeliest key, of the first visible key, of the learned sink).
    """

    def __init__(self, shape: CallShape, device: torch.device) -> None:
        self.dtype = state_dtype(device)
        self._zeros = torch.zeros(shape[:3], device=device, dtype=self.dtype)
        self._values: dict[str, Tensor] = {}

    def put(self, items: slice, heads: slice, rows: slice, values: Mapping[str, Tensor | int]) -> None:
        """Fill in some rows of some batch items and heads."""
        for name, value in values.items():
            if name not in self._values:
                self._values[name] = self._zeros.clone()
            self._values[name][items, heads, rows] = value

    def __getitem__(self, name: str) -> Tensor:
        return self._values.get(name, self._zeros)

    def sums(self, *, sink: bool) -> dict[str, Tensor]:
        """Return the additive sums of what was put, each [H]; `sink` if there is a learned one."""
        allowed = self["allowed"]
        seen = allowed > 0
        sums = {
            "rows": seen.sum((0, 2)),
            "masked_rows": (~seen).sum((0, 2)),
            "nonfinite": (allowed - self["logit_n"]).sum((0, 2)),
        }
        if "logit_m2" in self._values:
            sums |= self._spread_sums()
        if "rest1" in self._values:
            sums |= self._probability_sums(sink)
        if "q_sq" in self._values:
            sums |= {name: _sum_where(seen, self[name]) for name in ("q_n", "q_sq")}
        return sums

    def moments(self, name: str) -> Tensor:
        """Return count, mean and sum of squared deviations over all rows, [3, H]."""
        stacked_3BHQ = torch.stack([self[f"{name}_{part}"] for part in ("n", "mean", "m2")])
        return pool_moments(stacked_3BHQ.permute(1, 3, 0, 2).flatten(0, 1))

    def extremum(self, name: str) -> Tensor:
        """Return the largest value over the rows with a finite logit, [H]; -inf for a head without."""
        values_HR = torch.where(self["logit_n"] > 0, self[name], -math.inf).transpose(0, 1).flatten(1)
        nothing = torch.full((len(values_HR), 1), -math.inf, device=values_HR.device, dtype=values_HR.dtype)
        return torch.cat([values_HR, nothing], dim=1).amax(1)

    def _spread_sums(self) -> dict[str, Tensor]:
        count = self["logit_n"]
        several = count >= 2
        variance = self["logit_m2"] / count.clamp(min=1)
        return {
            "row_n": several.sum((0, 2)),
            "row_var": _sum_where(several, variance),
            "row_critical": _sum_where(several, variance / (2 * count.log())),
        }

    def _probability_sums(self, sink: bool) -> dict[str, Tensor]:
        """Put the pieces of each row together; near one-hot only small terms are added, so nothing cancels."""
        allowed = self["allowed"]
        outcomes = allowed + sink
        valid = (allowed > 0) & (outcomes >= 2) & (self["logit_n"] == allowed)
        rest1, rest2, rest3 = self["rest1"], self["rest2"], self["rest3"]
        total = 1 + rest1
        one_minus_squares = (2 * rest1 + rest1.square() - rest2) / total.square()
        # total^4 (sum p^2 - 2 sum p^3 + (sum p^2)^2) with sum p^i = (1 + rest_i) / total^i, expanded.
        norm_sq = rest1.square() + rest2 * total.square() - 2 * rest3 * total + 2 * rest2 + rest2.square()
        entropy = rest1.log1p() + self["weighted"] / total
        values = {
            "entropy": entropy,
            "entropy_normalized": entropy / outcomes.log(),
            "max_probability": self["top"] / total,
            "sink_mass": (self["first"] + self["sink"]) / total,
            "jacobian_trace": one_minus_squares / (1 - 1 / outcomes),
            "jacobian_norm": norm_sq.clamp(min=0).sqrt() / total.square(),
        }
        return {"prob_n": valid.sum((0, 2)), **{name: _sum_where(valid, value) for name, value in values.items()}}


def _sum_where(keep_BHQ: Tensor, values_BHQ: Tensor) -> Tensor:
    return torch.where(keep_BHQ, values_BHQ, 0).sum((0, 2))

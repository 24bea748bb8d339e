"""What is known of each row of an attention, and the sums over rows that follow, per head.

Axes: B batch, H query heads, Q queries. What the tiles fill in is float32 (float64 for float64 inputs); what is made of
it is float64 (float32 on mps) and small beside a tile.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from attn_monitor.records import CallShape
from attn_monitor.sums import pool_moments, state_dtype
from attn_monitor.uncertainty import VARIANCES, variance_of_sum

_LOWEST = -1e4
"""Differences to the largest outcome are cut here: exp is 0 long before, and 0 * -inf would be nan."""


class RowValues:
    """Named values of each row, [B, H, Q], filled tile by tile; what no tile fills stays 0.

    The names:
        allowed: How many keys the row may see.
        nonfinite: How many of those logits are nan or inf.
        largest, smallest: Of the finite logits.
        shift, rest, spread: An approximate mean relative to the largest; sum and root of the sum of squares of the
            deviations from it. The same of `scale * q.k` after `qk_`, with `qk_largest` and `qk_nonfinite`.
        q_n, q_sq: Count and squares of the entries of the row's query, 0 where a nan or inf is among them.
        top, ties: The largest probability, and how many keys have it.
        weighted: Sum of p times the logit's distance to the largest, <= 0.
        rest1, rest2, rest3: Over the other keys: minus the sum of p, the root of the sum of p^2, minus the sum of p^3.
        first: The probability of the first visible key.
        grad_size, grad_logits, grad_probs: The norms of both gradients, divided by `grad_size`.

    Args:
        names: Which of them will be filled.
        shape: Of the call.
        device: Where the tiles are.
        dtype: Of the tiles.
        weights: How much each row counts in means and spreads, [Q]; `None` for alike.
    """

    def __init__(
        self,
        names: Sequence[str],
        shape: CallShape,
        device: torch.device,
        dtype: torch.dtype,
        weights: Tensor | None = None,
    ) -> None:
        self._fill(names, torch.zeros((len(names), *shape[:3]), device=device, dtype=dtype), weights)

    def _fill(self, names: Sequence[str], memory: Tensor, weights: Tensor | None) -> None:
        self._names = tuple(names)
        self._memory = memory
        self._weights = weights
        self.dtype = state_dtype(memory.device)
        self._values: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.variances: dict[str, Tensor] = {}
        """Of sums over sampled rows, by what was summed, [H]; filled in as the sums are made."""

    @classmethod
    def beside(cls, parts: Sequence[RowValues]) -> RowValues:
        """Put the rows of several layers of the same `layout` side by side, as if they were heads of one."""
        if len(parts) == 1:
            return parts[0]
        whole = object.__new__(cls)
        whole._fill(parts[0]._names, torch.cat([part._memory for part in parts], dim=2), parts[0]._weights)
        return whole

    def of_heads(self, heads: slice) -> RowValues:
        """Return the rows of some of the heads."""
        some = object.__new__(type(self))
        some._fill(self._names, self._memory[:, :, heads], self._weights)
        return some

    @property
    def layout(self) -> Hashable:
        """What rows have in common that can lie side by side."""
        _, batch, _, queries = self._memory.shape
        return self._names, batch, queries, self._memory.device, self._memory.dtype, self.sampled

    @property
    def sampled(self) -> bool:
        """Whether some rows stand for all."""
        return self._weights is not None

    @property
    def values(self) -> int:
        """How many numbers there are."""
        return self._memory.numel()

    def window(self, items: slice, heads: slice, rows: slice) -> dict[str, Tensor]:
        """Return views of some rows of some batch items and heads, to be filled."""
        return dict(zip(self._names, self._memory[:, items, heads, rows].unbind(0), strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if not self._values:  # all tiles are done: convert all at once
            self._values = dict(zip(self._names, self._memory.to(self.dtype).unbind(0), strict=True))
        return self._values[name]

    def sums(self, sinks: Tensor | None) -> dict[str, Tensor]:
        """Return the additive sums of the forward pass, each [H].

        Args:
            sinks: The learned sinks, [H].
        """
        allowed, missing = self["allowed"], self["nonfinite"]
        seen = allowed > 0
        rows = seen.sum((0, 2))
        batch, _, queries = seen.shape
        sums = {"rows": rows, "masked_rows": batch * queries - rows, "nonfinite": missing.sum((0, 2))}
        if "spread" in self:
            sums |= self._spread_sums()
        if "top" in self:
            sums |= self._probability_sums(allowed, missing, sinks)
        if "q_sq" in self:
            sums |= self._totals(seen & (self["q_n"] > 0), {name: self[name] for name in ("q_n", "q_sq")})
        return sums

    def gradient_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of rows whose gradients count, and the squares of both gradients over them, each [H]."""
        qualifying = self.qualifying()
        size = self["grad_size"]
        squares = {f"{name}_sq": (self[name] * size).square() for name in ("grad_logits", "grad_probs")}
        totals = self._totals(qualifying, squares, mean_of_rows=False)
        return self._count(qualifying), totals["grad_logits_sq"], totals["grad_probs_sq"]

    def qualifying(self) -> Tensor:
        """Return True for the rows whose gradients count, [B, H, Q]."""
        return (self["allowed"] >= 2) & (self["nonfinite"] == 0)

    def moments(self, prefix: str = "") -> Tensor:
        """Return count, mean and sum of squared deviations of the logits over all rows, [3, H]; of `qk_` alike."""
        count, mean, deviation = self._row_moments(prefix)
        if self._weights is not None:
            count, deviation = count * self._weights, deviation * self._weights
        stacked_3BHQ = torch.stack([count, mean, deviation])
        pooled_3H = pool_moments(stacked_3BHQ.permute(1, 3, 0, 2).flatten(0, 1))
        if self._weights is not None:
            total, middle, squares = pooled_3H[:, :, None]
            apart = count * (mean - middle)
            squared = deviation + apart * (mean - middle) - count * (squares / total.clamp(min=1))
            names = [f"{prefix or 'logit_'}{of}_v" for of in ("dev", "m2")]
            self._note_variances(names, variance_of_sum(torch.stack([apart, squared]), self._weights))
        return pooled_3H

    def extremum(self, name: str, sign: int = 1) -> Tensor:
        """Return the largest `sign` times a value over the rows with a finite logit, [H]; -inf for a head without."""
        finite = self["allowed"] > self["nonfinite"]
        values_HR = torch.where(finite, sign * self[name], -math.inf).transpose(0, 1).flatten(1)
        nothing = torch.full((len(values_HR), 1), -math.inf, device=values_HR.device, dtype=values_HR.dtype)
        return torch.cat([values_HR, nothing], dim=1).amax(1)

    def _count(self, rows_BHQ: Tensor) -> Tensor:
        """Return how many rows there are, or as many as they count for, [H]."""
        return (rows_BHQ if self._weights is None else rows_BHQ * self._weights).sum((0, 2))

    def _totals(
        self, rows_BHQ: Tensor, values: Mapping[str, Tensor], *, mean_of_rows: bool = True
    ) -> dict[str, Tensor]:
        """Return the sums of values over some rows, each [H]; what the other rows hold does not matter."""
        stacked_NBHQ = torch.where(rows_BHQ, torch.stack(list(values.values())), 0)
        if self._weights is None:
            return dict(zip(values, stacked_NBHQ.sum((1, 3)).unbind(0), strict=True))
        stacked_NBHQ *= self._weights
        totals_NH = stacked_NBHQ.sum((1, 3))
        if mean_of_rows:  # of a mean only what deviates from it is uncertain
            weights_BHQ = rows_BHQ * self._weights
            means_NH = totals_NH / weights_BHQ.sum((0, 2)).clamp(min=1)
            stacked_NBHQ -= means_NH[:, None, :, None] * weights_BHQ
        names = [f"{name}_v" for name in values]
        self._note_variances(names, variance_of_sum(stacked_NBHQ, self._weights))
        return dict(zip(values, totals_NH.unbind(0), strict=True))

    def _note_variances(self, names: Sequence[str], values_NH: Tensor) -> None:
        """Keep those that anything is made of: a count has none, say."""
        self.variances |= {name: value for name, value in zip(names, values_NH, strict=True) if name in VARIANCES}

    def _row_moments(self, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return count, mean and sum of squared deviations of each row."""
        if prefix not in self._moments:
            count = self["allowed"] - self[f"{prefix}nonfinite"]
            # What is left of the mean after rounding: 1e-7 of a large offset is not small beside a small spread.
            rest = self[f"{prefix}rest"] / count.clamp(min=1)
            deviation = (self[f"{prefix}spread"].square() - count * rest.square()).clamp_(min=0)
            mean = self[f"{prefix}largest"] + self[f"{prefix}shift"] + rest
            self._moments[prefix] = count, mean, deviation
        return self._moments[prefix]

    def _spread_sums(self) -> dict[str, Tensor]:
        count, _, deviation = self._row_moments("")
        several = count >= 2
        variance = deviation / count
        values = {"row_var": variance, "row_critical": variance / (2 * count.log())}
        return {"row_n": self._count(several), **self._totals(several, values)}

    def _probability_sums(self, allowed: Tensor, missing: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
        """Put the pieces of each row together; near one-hot only small terms are added, so nothing cancels."""
        outcomes = allowed + (sinks is not None)
        valid = (allowed > 0) & (outcomes >= 2) & (missing == 0)
        piece = self._outcomes(sinks)
        rest1 = piece["rest1"]
        total = 1 + rest1
        values = {"max_probability": piece["top"] / total}
        if "weighted" in piece:
            values["entropy"] = rest1.log1p() + piece["weighted"] / total
            values["entropy_normalized"] = values["entropy"] / outcomes.log()
        if "first" in piece:
            values["sink_mass"] = (piece["first"] + piece["sink"]) / total
        if "rest2" in piece:
            rest2 = piece["rest2"]
            values["jacobian_trace"] = (2 * rest1 + rest1.square() - rest2) / total.square() / (1 - 1 / outcomes)
        if "rest3" in piece:
            rest3 = piece["rest3"]
            # total^4 (sum p^2 - 2 sum p^3 + (sum p^2)^2) with sum p^i = (1 + rest_i) / total^i, expanded.
            norm_sq = rest1.square() + rest2 * total.square() - 2 * rest3 * total + 2 * rest2 + rest2.square()
            values["jacobian_norm"] = norm_sq.clamp_(min=0).sqrt() / total.square()
        return {"prob_n": self._count(valid), **self._totals(valid, values)}

    def _outcomes(self, sinks: Tensor | None) -> dict[str, Tensor]:
        """Return the sums over all outcomes but the likeliest, of e = p / max p: what `rows` calls without p.

        A learned sink joins the outcomes: what is relative to the likeliest key becomes relative to the likeliest.
        """
        likeliest, others = self["top"], self["ties"] - 1
        found = {"rest1": others - self["rest1"] / likeliest}
        if "weighted" in self:
            found["weighted"] = -self["weighted"] / likeliest
        if "rest2" in self:
            found["rest2"] = others + (self["rest2"] / likeliest).square()
        if "rest3" in self:
            found["rest3"] = others - self["rest3"] / likeliest / likeliest / likeliest
        if "first" in self:
            found["first"] = self["first"] / likeliest
        if sinks is None:
            one = torch.ones_like(likeliest)
            return {**found, "top": one, "sink": torch.zeros_like(one)}
        largest, sink = self["largest"], sinks.detach().to(self.dtype)[:, None]
        shift = torch.maximum(largest, sink)
        gap, sink_gap = (largest - shift).clamp(min=_LOWEST), (sink - shift).clamp(min=_LOWEST)
        top, e_sink = gap.exp(), sink_gap.exp()
        # Where the sink is the likeliest the keys that were set aside join the rest, else the sink does.
        keys_lead = largest >= shift
        aside, aside_gap = torch.where(keys_lead, e_sink, top), torch.where(keys_lead, sink_gap, gap)
        if "weighted" in found:
            found["weighted"] = top * found["weighted"] - gap * top * found["rest1"] - aside * aside_gap
        for power, name in enumerate(("rest1", "rest2", "rest3"), start=1):
            if name in found:
                found[name] = found[name] * top**power + aside**power
        if "first" in found:
            found["first"] = found["first"] * top
        return {**found, "top": top, "sink": e_sink}

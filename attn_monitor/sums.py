"""The mergeable state of one attention layer: counts, sums, moments and extrema, from which every statistic follows.

Axes: H query heads, W states that are pooled (calls, micro-batches, ranks). All of it merges exactly, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.records import AttentionStatistics
from attn_monitor.uncertainty import VARIANCES, standard_errors

ADDITIVE = (
    *("rows", "masked_rows", "nonfinite"),
    *("row_n", "row_var", "row_critical"),
    *("prob_n", "entropy", "entropy_normalized", "max_probability", "sink_mass", "jacobian_trace", "jacobian_norm"),
    *("grad_n", "grad_logits_sq", "grad_probs_sq"),
    *("q_n", "q_sq", "k_n", "k_sq"),
    *("scale_n", "scale_sum"),
    *VARIANCES,
)
"""What is simply added, one value per head: counts end in _n, sums of squares in _sq, variances of sums in _v."""
MOMENTS = ("logit", "qk")
"""Whose count, mean and sum of squared deviations are kept."""
PROBABILITY_MEANS = ADDITIVE[ADDITIVE.index("entropy") : ADDITIVE.index("grad_n")]


def state_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on the one device that has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def pool_moments(stacked: Tensor) -> Tensor:
    """Pool counts, means and sums of squared deviations over the first axis: [W, ..., 3, H] to [..., 3, H].

    Chan, Golub and LeVeque (1983), exact whatever the counts; a state without samples changes nothing.
    """
    count, mean, deviation = stacked.unbind(-2)
    total = count.sum(0)
    pooled = (count * mean).sum(0) / total.clamp(min=1)
    between = (count * (mean - pooled).square()).sum(0)
    return torch.stack([total, pooled, deviation.sum(0) + between], dim=-2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFacts:
    """What the host knows of a layer without looking at a tensor.

    Attributes:
        measured: The statistics that the sums hold.
        approximate: Those of them that are estimates.
        head_dim: D of query and key, `None` if unknown or not the same in all calls.
        keys: The largest number of keys.
        calls: How many attention calls are pooled; 0 for gradients alone, which belong to calls counted already.
    """

    measured: frozenset[str] = frozenset()
    approximate: frozenset[str] = frozenset()
    head_dim: int | None = None
    keys: int = 0
    calls: int = 0

    def merged_facts(self, other: LayerFacts) -> LayerFacts:
        """Pool two sets of facts."""
        both = bool(self.calls and other.calls)
        measured = self.measured | other.measured
        if both:  # a statistic that one of two calls lacks is not known for the two together
            measured &= GRADIENTS | (self.measured & other.measured)
        approximate = self.approximate | other.approximate
        if {"grad_logits_norm", "grad_probs_norm"} <= measured:  # they may come one by one
            measured |= {"gradient_gain"}
            approximate |= {"gradient_gain"} if approximate & {"grad_logits_norm", "grad_probs_norm"} else frozenset()
        known = self if self.calls else other
        return LayerFacts(
            measured=measured,
            approximate=approximate & measured,
            head_dim=None if both and self.head_dim != other.head_dim else known.head_dim,
            keys=max(self.keys, other.keys),
            calls=self.calls + other.calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSums(LayerFacts):
    """Everything known about one layer, on the layer's device, in float64 (float32 on mps).

    Attributes:
        additive: [len(ADDITIVE), H].
        moments: [2, 3, H], logit and scale * q.k by count, mean and sum of squared deviations.
        extrema: [2, H], the largest logit and the negated smallest, -inf where there is none.
    """

    additive: Tensor
    moments: Tensor
    extrema: Tensor

    @classmethod
    def build(
        cls,
        values: Mapping[str, Tensor],
        *,
        moments: Mapping[str, Tensor] | None = None,
        largest: Tensor | None = None,
        negated_smallest: Tensor | None = None,
        facts: LayerFacts | None = None,
    ) -> AttentionSums:
        """Pack what was measured and put the neutral element for the rest.

        Args:
            values: Some of `ADDITIVE`, at least one, each [H].
            moments: Some of `MOMENTS`, each [3, H].
            largest: The largest logit, [H].
            negated_smallest: The smallest logit, negated, [H].
            facts: What the host knows.
        """
        like = next(iter(values.values()))
        heads, device, dtype = len(like), like.device, state_dtype(like.device)
        zero = torch.zeros(heads, device=device, dtype=dtype)
        nothing = torch.full((heads,), -math.inf, device=device, dtype=dtype)
        extrema = [nothing if extremum is None else extremum for extremum in (largest, negated_smallest)]
        no_moments = zero.expand(3, heads)
        facts = facts or LayerFacts()
        return cls(
            additive=torch.stack([values[name].to(dtype) if name in values else zero for name in ADDITIVE]),
            moments=torch.stack([(moments or {}).get(name, no_moments).to(dtype) for name in MOMENTS]),
            extrema=torch.stack([extremum.to(dtype) for extremum in extrema]),
            measured=facts.measured,
            approximate=facts.approximate,
            head_dim=facts.head_dim,
            keys=facts.keys,
            calls=facts.calls,
        )

    @classmethod
    def from_gradients(
        cls,
        grad_logits_sq: Tensor | None,
        grad_probs_sq: Tensor | None,
        *,
        rows: Tensor,
        variances: Mapping[str, Tensor] | None = None,
        approximate: frozenset[str] = frozenset(),
    ) -> AttentionSums:
        """Return sums that hold gradients only, to be merged into the forward sums of the same layer.

        Args:
            grad_logits_sq: Sum of the squared gradients of the logits, [H].
            grad_probs_sq: Sum of the squared gradients of the probabilities, [H].
            rows: How many rows entered them, [H].
            variances: Of the sums over sampled rows, by the names of `VARIANCES`, each [H].
            approximate: Names of those that are estimates.
        """
        given = {"grad_logits_norm": grad_logits_sq, "grad_probs_norm": grad_probs_sq}
        measured = frozenset(
            GRADIENTS if None not in given.values() else (n for n, v in given.items() if v is not None)
        )
        values = {"grad_n": rows, "grad_logits_sq": grad_logits_sq, "grad_probs_sq": grad_probs_sq, **(variances or {})}
        facts = LayerFacts(measured=measured, approximate=approximate & measured)
        return cls.build({name: value for name, value in values.items() if value is not None}, facts=facts)

    @property
    def heads(self) -> int:
        """The number of query heads H."""
        return self.additive.shape[1]

    def merge(self, other: AttentionSums) -> AttentionSums:
        """Return the sums over the calls of both.

        Raises:
            ValueError: If they differ in the number of heads.
        """
        if self.heads != other.heads:
            raise ValueError(
                f"Cannot pool attention with {self.heads} heads and attention with {other.heads} heads. "
                "Give the two call sites names of their own."
            )
        facts = self.merged_facts(other)
        return replace(
            self,
            additive=self.additive + other.additive,
            moments=pool_moments(torch.stack([self.moments, other.moments])),
            extrema=torch.maximum(self.extrema, other.extrema),
            measured=facts.measured,
            approximate=facts.approximate,
            head_dim=facts.head_dim,
            keys=facts.keys,
            calls=facts.calls,
        )

    def divided_gradients(self, scale: float | Tensor) -> AttentionSums:
        """Return the sums with all gradients divided by a number or a 0-dim tensor, such as the scale of the loss."""
        if isinstance(scale, Tensor):
            scale = scale.detach().to(self.additive.device, self.additive.dtype, non_blocking=True)
        elif scale == 1:
            return self
        additive = self.additive.clone()
        for side in ("logits", "probs"):
            additive[ADDITIVE.index(f"grad_{side}_sq")] /= scale**2
            additive[ADDITIVE.index(f"grad_{side}_sq_v")] /= scale**4
        return replace(self, additive=additive)

    def to(self, device: torch.device | str) -> AttentionSums:
        """Return the sums on another device, in that device's dtype."""
        device = torch.device(device)
        dtype = state_dtype(device)
        return replace(
            self,
            additive=self.additive.to(device, dtype),
            moments=self.moments.to(device, dtype),
            extrema=self.extrema.to(device, dtype),
        )

    def finalize(self, statistics: frozenset[str], losses: int = 1) -> AttentionStatistics:
        """Turn the sums into statistics on the CPU, waiting for the device.

        Args:
            statistics: The names that are wanted; what else was measured stays out.
            losses: Over how many losses the optimizer step's loss is the mean: micro-batches times ranks. The squared
                gradients of all of them are in the sums.
        """
        sums = self.to("cpu")
        value = dict(zip(ADDITIVE, sums.additive, strict=True))
        scale = _ratio(value["scale_sum"], value["scale_n"])
        found = {**_logit_values(sums), **_gradient_values(value, losses), **_factor_values(sums, scale)}
        found |= {name: _ratio(value[name], value["prob_n"]) for name in PROBABILITY_MEANS}
        wanted = {name: found[name] for name in statistics & self.measured if found[name] is not None}
        counts = {f"{name}_n": count for name, count in zip(MOMENTS, sums.moments[:, 0], strict=True)}
        return AttentionStatistics(
            **wanted,
            standard_error=standard_errors({**value, **counts}, wanted, losses),
            scale=scale,
            scale_ratio=None if scale is None or self.head_dim is None else scale * math.sqrt(self.head_dim),
            rows=value["rows"],
            masked_rows=value["masked_rows"],
            nonfinite=value["nonfinite"],
            head_dim=self.head_dim,
            keys=self.keys,
            calls=self.calls,
            approximate=self.approximate.intersection(wanted),
        )


def _ratio(total: Tensor, count: Tensor) -> Tensor | None:
    return total / count if bool(count.any()) else None


def _root(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.sqrt()


def _logit_values(sums: AttentionSums) -> dict[str, Tensor | None]:
    value = dict(zip(ADDITIVE, sums.additive, strict=True))
    count, mean, deviation = sums.moments[MOMENTS.index("logit")]
    largest, negated_smallest = torch.where(sums.extrema == -math.inf, math.nan, sums.extrema)
    return {
        "logit_mean": _ratio(count * mean, count),
        "logit_std": _root(_ratio(deviation, count)),
        "logit_row_std": _root(_ratio(value["row_var"], value["row_n"])),
        "critical_ratio": _root(_ratio(value["row_critical"], value["row_n"])),
        "logit_max": None if bool(largest.isnan().all()) else largest,
        "logit_min": None if bool(negated_smallest.isnan().all()) else -negated_smallest,
    }


def _gradient_values(value: Mapping[str, Tensor], losses: int) -> dict[str, Tensor | None]:
    seen = value["grad_n"] > 0
    if not bool(seen.any()):
        return dict.fromkeys(GRADIENTS)
    logits, probs = (torch.where(seen, value[f"grad_{of}_sq"], math.nan).sqrt() / losses for of in ("logits", "probs"))
    return {"grad_logits_norm": logits, "grad_probs_norm": probs, "gradient_gain": logits / probs}


def _factor_values(sums: AttentionSums, scale: Tensor | None) -> dict[str, Tensor | None]:
    value = dict(zip(ADDITIVE, sums.additive, strict=True))
    count, _, deviation = sums.moments[MOMENTS.index("qk")]
    qk_std = _root(_ratio(deviation, count))
    q_rms, k_rms = (_root(_ratio(value[f"{side}_sq"], value[f"{side}_n"])) for side in "qk")
    alignment = None
    if not (scale is None or sums.head_dim is None or qk_std is None or q_rms is None or k_rms is None):
        divisor = scale.abs() * math.sqrt(sums.head_dim) * q_rms * k_rms
        alignment = torch.where(divisor > 0, qk_std / divisor, math.nan)
    return {"qk_std": qk_std, "q_rms": q_rms, "k_rms": k_rms, "alignment": alignment}

"""The mergeable state of one attention layer: counts, sums, moments and extrema, from which every statistic follows.

Axes: H query heads, W states that are pooled (calls, micro-batches, ranks). All of it merges exactly, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

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
_ROW = {name: row for row, name in enumerate(ADDITIVE)}
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

    def as_arguments(self) -> dict[str, Any]:
        """Return the facts by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(LayerFacts)}

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
        heads, dtype = len(like), state_dtype(like.device)
        additive = torch.zeros((len(ADDITIVE), heads), device=like.device, dtype=dtype)
        for name, value in values.items():
            additive[_ROW[name]] = value
        packed = torch.zeros((len(MOMENTS), 3, heads), device=like.device, dtype=dtype)
        for name, value in (moments or {}).items():
            packed[MOMENTS.index(name)] = value
        extrema = torch.full((2, heads), -math.inf, device=like.device, dtype=dtype)
        for number, extremum in enumerate((largest, negated_smallest)):
            if extremum is not None:
                extrema[number] = extremum
        facts = facts or LayerFacts()
        return cls(additive=additive, moments=packed, extrema=extrema, **facts.as_arguments())

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
        moments, extrema = self.moments, self.extrema
        if not self.calls:
            moments, extrema = other.moments, other.extrema
        elif other.calls:  # else it holds gradients alone
            moments = pool_moments(torch.stack([moments, other.moments]))
            extrema = torch.maximum(extrema, other.extrema)
        facts = self.merged_facts(other)
        return AttentionSums(
            additive=self.additive + other.additive, moments=moments, extrema=extrema, **facts.as_arguments()
        )

    def of_heads(self, heads: slice, facts: LayerFacts) -> AttentionSums:
        """Return the sums of some of the heads, of which the host knows something of its own."""
        return AttentionSums(
            additive=self.additive[:, heads],
            moments=self.moments[..., heads],
            extrema=self.extrema[:, heads],
            **facts.as_arguments(),
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
        """Turn the sums into statistics on the CPU, waiting for the device; the arguments are those of `finalized`."""
        return finalized([self], statistics, losses)[0]


def finalized(
    layers: Sequence[AttentionSums], statistics: frozenset[str], losses: int = 1
) -> list[AttentionStatistics]:
    """Turn the sums of layers into statistics on the CPU, waiting for their devices.

    Args:
        layers: The sums.
        statistics: The names that are wanted; what else was measured stays out.
        losses: Over how many losses the optimizer step's loss is the mean: micro-batches times ranks. The squared
            gradients of all of them are in the sums.
    """
    layers = [layer.to("cpu") for layer in layers]
    groups: dict[int | None, list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(layer.head_dim, []).append(number)
    found: dict[int, AttentionStatistics] = {}
    for numbers in groups.values():
        alike = [layers[number] for number in numbers]
        found |= dict(zip(numbers, _finalized(alike, statistics, losses), strict=True))
    return [found[number] for number in range(len(layers))]


def _finalized(
    layers: Sequence[AttentionSums], statistics: frozenset[str], losses: int
) -> Iterator[AttentionStatistics]:
    """Turn the sums of layers with the same head dimension into statistics, all heads at once."""
    additive = torch.cat([layer.additive for layer in layers], dim=-1)
    moments = torch.cat([layer.moments for layer in layers], dim=-1)
    extrema = torch.cat([layer.extrema for layer in layers], dim=-1)
    value = dict(zip(ADDITIVE, additive, strict=True))
    head_dim = layers[0].head_dim
    known = {
        **_logit_values(value, moments[MOMENTS.index("logit")], extrema),
        **_gradient_values(value, losses),
        **_factor_values(value, moments[MOMENTS.index("qk")], head_dim),
        **{name: _ratio(value[name], value["prob_n"]) for name in PROBABILITY_MEANS},
    }
    values_SN = torch.stack([values for values, _ in known.values()])
    seen_SN = torch.stack([seen.expand(values_SN.shape[1]) for _, seen in known.values()])
    sampled = bool(torch.stack([value[name] for name in VARIANCES]).any())
    start = 0
    for layer in layers:
        heads = slice(start, start + layer.heads)
        start += layer.heads
        seen = dict(zip(known, seen_SN[:, heads].any(-1).tolist(), strict=True))
        found = {name: values for name, values in zip(known, values_SN[:, heads], strict=True) if seen[name]}
        wanted = {name: found[name] for name in statistics & layer.measured if name in found}
        own = {name: total[heads] for name, total in value.items()}
        counts = {f"{name}_n": count[heads] for name, count in zip(MOMENTS, moments[:, 0], strict=True)}
        yield AttentionStatistics(
            **wanted,
            standard_error=standard_errors({**own, **counts}, wanted, losses) if sampled else {},
            scale=found.get("scale"),
            scale_ratio=found.get("scale_ratio"),
            rows=own["rows"],
            masked_rows=own["masked_rows"],
            nonfinite=own["nonfinite"],
            head_dim=head_dim,
            keys=layer.keys,
            calls=layer.calls,
            approximate=layer.approximate.intersection(wanted),
        )


_Seen: TypeAlias = tuple[Tensor, Tensor]
"""A value of each head, nan where nothing entered it, and whether something did."""


def _ratio(total: Tensor, count: Tensor) -> _Seen:
    return total / count, count != 0


def _root(value: _Seen) -> _Seen:
    return value[0].sqrt(), value[1]


def _logit_values(value: Mapping[str, Tensor], moments: Tensor, extrema: Tensor) -> dict[str, _Seen]:
    count, mean, deviation = moments
    largest, negated_smallest = torch.where(extrema == -math.inf, math.nan, extrema)
    return {
        "logit_mean": _ratio(count * mean, count),
        "logit_std": _root(_ratio(deviation, count)),
        "logit_row_std": _root(_ratio(value["row_var"], value["row_n"])),
        "critical_ratio": _root(_ratio(value["row_critical"], value["row_n"])),
        "logit_max": (largest, ~largest.isnan()),
        "logit_min": (-negated_smallest, ~negated_smallest.isnan()),
    }


def _gradient_values(value: Mapping[str, Tensor], losses: int) -> dict[str, _Seen]:
    seen = value["grad_n"] > 0
    logits, probs = (torch.where(seen, value[f"grad_{of}_sq"], math.nan).sqrt() / losses for of in ("logits", "probs"))
    found = {"grad_logits_norm": logits, "grad_probs_norm": probs, "gradient_gain": logits / probs}
    return {name: (values, seen) for name, values in found.items()}


def _factor_values(value: Mapping[str, Tensor], moments: Tensor, head_dim: int | None) -> dict[str, _Seen]:
    count, _, deviation = moments
    scale, scale_seen = _ratio(value["scale_sum"], value["scale_n"])
    qk_std, qk_seen = _root(_ratio(deviation, count))
    (q_rms, q_seen), (k_rms, k_seen) = (_root(_ratio(value[f"{side}_sq"], value[f"{side}_n"])) for side in "qk")
    known = {"scale": (scale, scale_seen), "qk_std": (qk_std, qk_seen), "q_rms": (q_rms, q_seen)}
    known["k_rms"] = k_rms, k_seen
    if head_dim is not None:
        scale_ratio = scale * math.sqrt(head_dim)
        known["scale_ratio"] = scale_ratio, scale_seen
        divisor = scale_ratio.abs() * q_rms * k_rms
        alignment = torch.where(divisor > 0, qk_std / divisor, math.nan)
        known["alignment"] = alignment, scale_seen & qk_seen & q_seen & k_seen
    return known

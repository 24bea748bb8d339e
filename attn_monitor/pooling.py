"""From the rows of attention calls to the sums of their heads, for many layers at once.

What is done per row is little; the number of operations is what it costs. So the rows of several layers are laid side
by side, as if they were the heads of one.

Axes: B batch, H query heads of one layer, Q queries; N heads of several layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.passes import Wanted
from attn_monitor.records import AttentionCall
from attn_monitor.rows import RowValues
from attn_monitor.sums import AttentionSums, LayerFacts
from attn_monitor.tiles import TiledCall, per_head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """The rows of one attention call, filled in, and what else its sums depend on; no tensor of the model.

    Attributes:
        rows: The rows.
        wanted: What was filled in.
        facts: What the host knows.
        queries: How many queries the whole call has.
        keys: Count and sum of squares of the key entries that each head meets, [2, H].
        scales: The scale of the product, of the query and of the key, each [H]; `None` if unknown.
        sinks: The learned sinks, [H].
        padding: How many rows are no queries at all, [H].
        inexact: Whether dropout makes the gradients approximate.
    """

    rows: RowValues
    wanted: Wanted
    facts: LayerFacts
    queries: int
    keys: Tensor
    scales: Tensor | None
    sinks: Tensor | None
    padding: Tensor | None
    inexact: bool

    @classmethod
    def of(cls, rows: RowValues, tiled: TiledCall, wanted: Wanted, keys: Tensor, facts: LayerFacts) -> LayerRows:
        """Take from a call what its sums depend on."""
        call, heads = tiled.call, tiled.call.shape.heads
        return cls(
            rows=rows,
            wanted=wanted,
            facts=facts,
            queries=tiled.queries,
            keys=keys,
            scales=_scales(call, heads, keys),
            sinks=None if call.sinks is None else call.sinks.detach().to(keys.dtype, copy=True),
            padding=None if call.padding is None else call.padding.sum().to(keys.dtype).expand(heads),
            inexact=call.dropout,
        )

    @property
    def heads(self) -> int:
        """The number of query heads H."""
        return self.keys.shape[1]

    def of_heads(self, heads: slice) -> LayerRows:
        """Return the rows of some of the heads."""
        scales, sinks, padding = (
            None if tensor is None else tensor[..., heads] for tensor in (self.scales, self.sinks, self.padding)
        )
        rows, keys = self.rows.of_heads(heads), self.keys[:, heads]
        return replace(self, rows=rows, keys=keys, scales=scales, sinks=sinks, padding=padding)

    @property
    def alike(self) -> Hashable:
        """What layers have in common whose rows can lie side by side."""
        given = tuple(tensor is None for tensor in (self.scales, self.sinks, self.padding))
        return self.wanted, self.rows.layout, self.queries, bool(self.facts.calls), given


def _scales(call: AttentionCall, heads: int, like: Tensor) -> Tensor | None:
    parts = (call.scale, call.query_scale, call.key_scale)
    if call.scale is None:
        return None
    if all(isinstance(part, float) for part in parts):  # the usual case, in one operation
        return torch.tensor(parts, dtype=like.dtype, device="cpu").to(like.device)[:, None].expand(3, heads)
    return torch.stack([per_head(part, heads, like) for part in parts])


def pooled(layers: Sequence[LayerRows]) -> list[AttentionSums]:
    """Return the sums of each layer, in their order."""
    groups: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(layer.alike, []).append(number)
    found: dict[int, AttentionSums] = {}
    for numbers in groups.values():
        members = [layers[number] for number in numbers]
        whole, start = _pooled(members), 0
        for number, member in zip(numbers, members, strict=True):
            found[number] = whole.of_heads(slice(start, start + member.heads), _facts(member))
            start += member.heads
    return [found[number] for number in range(len(layers))]


def _facts(layer: LayerRows) -> LayerFacts:
    if not layer.wanted.gradients:
        return layer.facts
    estimated = layer.inexact or layer.rows.sampled
    gradients = LayerFacts(measured=GRADIENTS, approximate=GRADIENTS if estimated else frozenset())
    return layer.facts.merged_facts(gradients)


def _pooled(layers: Sequence[LayerRows]) -> AttentionSums:
    """Return the sums of the heads of all layers, one layer after the other."""
    rows = RowValues.beside([layer.rows for layer in layers])
    if layers[0].facts.calls:
        return _forward(layers, rows)
    return AttentionSums.build(_gradients(rows) | rows.variances)  # of calls that are counted already


def _gradients(rows: RowValues) -> dict[str, Tensor]:
    return dict(zip(("grad_n", "grad_logits_sq", "grad_probs_sq"), rows.gradient_sums(), strict=True))


def _forward(layers: Sequence[LayerRows], rows: RowValues) -> AttentionSums:
    wanted = layers[0].wanted
    values = rows.sums(_beside([layer.sinks for layer in layers]))
    padding = _beside([layer.padding for layer in layers])
    if padding is not None:
        values["masked_rows"] = values["masked_rows"] - padding
    keys_2N = torch.cat([layer.keys for layer in layers], dim=-1)
    scales_3N = _beside([layer.scales for layer in layers])
    query_scale, key_scale = (None, None) if scales_3N is None else scales_3N[1:]
    if wanted.keys:
        values["k_n"], values["k_sq"] = keys_2N[0], _divided(keys_2N[1], key_scale, 2)
    if scales_3N is not None:
        values["scale_n"], values["scale_sum"] = torch.ones_like(keys_2N[0]), scales_3N.prod(0)
    moments: dict[str, Tensor] = {}
    if wanted.moments:
        moments["logit"] = rows.moments()
    if wanted.qk_apart:
        moments["qk"] = rows.moments("qk_")
    elif wanted.qk_alike:
        moments["qk"] = moments["logit"]
    if wanted.gradients:
        values |= _gradients(rows)
    values |= rows.variances
    if wanted.qk_alike and "logit_m2_v" in values:
        values["qk_m2_v"] = values["logit_m2_v"]
    if wanted.queries:
        values["q_sq"] = _divided(values["q_sq"], query_scale, 2)
        if "q_sq_v" in values:
            values["q_sq_v"] = _divided(values["q_sq_v"], query_scale, 4)
    return AttentionSums.build(
        values,
        moments=moments,
        largest=rows.extremum("largest") if "logit_max" in wanted.measured else None,
        negated_smallest=rows.extremum("smallest", -1) if wanted.smallest else None,
    )


def _divided(values: Tensor, scale: Tensor | None, power: int) -> Tensor:
    return values if scale is None else values / scale**power


def _beside(tensors: Sequence[Tensor | None]) -> Tensor | None:
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known, dim=-1) if known else None

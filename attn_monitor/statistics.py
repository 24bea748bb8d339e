"""From one attention call to its sums: exact row statistics in tiles, pooled per head.

Axes: B batch, H query heads, G key heads, Q queries, K keys, D head dimension; b batch items, t rows and k columns of a
tile. Tiles are float32 (float64 for float64 inputs); what is pooled over rows is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.masking import allowed_count, drop_, finite_indicator
from attn_monitor.records import AttentionCall
from attn_monitor.rows import RowValues
from attn_monitor.sums import MOMENTS, AttentionSums, LayerFacts, state_dtype
from attn_monitor.tiles import Tile, TiledCall, per_head, undisturbed

_EXTREMA = frozenset({"logit_max", "logit_min"})
_PROBABILITIES = frozenset(
    {"entropy", "entropy_normalized", "max_probability", "sink_mass", "jacobian_trace", "jacobian_norm"}
)
_LOWEST = -1e4
"""Differences to the row maximum are cut here: exp is 0 long before, and 0 * -inf would be nan."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which parts of the work the chosen statistics need."""

    measured: frozenset[str]
    moments: bool
    qk_apart: bool
    qk_alike: bool
    largest: bool
    smallest: bool
    probabilities: bool
    queries: bool
    keys: bool
    first_key: bool

    @classmethod
    def by(cls, call: AttentionCall, statistics: frozenset[str], sampled: bool) -> _Wanted:
        measured = statistics - GRADIENTS - (_EXTREMA if sampled else frozenset())
        products = call.query is not None and call.key is not None
        if not products:
            measured -= {"q_rms", "k_rms"}
        if not products or call.scale is None:
            measured -= {"alignment"} if call.plain and call.logits is not None else {"alignment", "qk_std"}
        qk = bool(measured & {"qk_std", "alignment"})
        changed = not call.plain if call.logits is not None else _reshapes_products(call)
        return cls(
            measured=measured,
            moments=bool(measured & {"logit_mean", "logit_std", "logit_row_std", "critical_ratio"})
            or (qk and not changed),
            qk_apart=qk and changed,
            qk_alike=qk and not changed,
            largest="logit_max" in measured,
            smallest="logit_min" in measured,
            probabilities=bool(measured & _PROBABILITIES),
            queries=bool(measured & {"q_rms", "alignment"}),
            keys=bool(measured & {"k_rms", "alignment"}),
            first_key="sink_mass" in measured,
        )


def attention_sums(
    call: AttentionCall,
    statistics: frozenset[str],
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
) -> AttentionSums:
    """Return the sums of one attention call, on its device and without waiting for it.

    Args:
        call: The call; it is not modified.
        statistics: Names of the catalog; what is not chosen is not computed. Gradients are not measured here.
        max_queries: Look at so many random rows at most. All statistics are estimates then, and there are no extrema.
        generator: For the choice of rows, on the CPU; the same rows each time without one.
    """
    with undisturbed(call.query if call.logits is None else call.logits):
        tiled, shape = TiledCall.of(call), call.shape
        sampled = max_queries is not None and shape.queries > max_queries
        if max_queries is not None and sampled:
            tiled = tiled.sampled(max_queries, generator)
        wanted = _Wanted.by(call, statistics, sampled)
        rows = RowValues(shape, tiled.device)
        keys = torch.zeros((2, shape.heads), device=tiled.device, dtype=rows.dtype)
        for items, part in tiled.batches():
            visible = _visible_keys(part) if wanted.keys or wanted.first_key else None
            first = _first_visible(visible) if visible is not None and wanted.first_key else None
            if visible is not None and wanted.keys:
                keys += _key_squares(part, visible)
            for tile in part.tiles():
                rows.put(items, tile.rows, _row_values(part, tile, wanted, first))
        facts = LayerFacts(
            measured=wanted.measured,
            approximate=wanted.measured if sampled else frozenset(),
            head_dim=call.head_dim if call.query is None else call.query.shape[-1],
            keys=shape.keys,
            calls=1,
        )
        return _pooled(rows, call, wanted, keys, facts)


def _reshapes_products(call: AttentionCall) -> bool:
    return call.softcap is not None or any(mask.is_floating_point() for mask in call.masks)


def _visible_keys(part: TiledCall) -> Tensor:
    """Return True where some query of the head may see the key, [b, H, K]."""
    shape = part.call.shape
    visible_bHK = torch.zeros((shape.batch, shape.heads, shape.keys), device=part.device, dtype=torch.bool)
    for tile in part.tiles():
        blocked = part.blocked(tile)
        seen = True if blocked is None else ~blocked.all(2)
        visible_bHK[..., : tile.columns] |= seen
    return visible_bHK


def _first_visible(visible_bHK: Tensor) -> Tensor:
    """Return the first key that any query of any head may see, [b]; K if there is none."""
    keys = visible_bHK.shape[2]
    if not keys:
        return torch.zeros(len(visible_bHK), device=visible_bHK.device, dtype=torch.long)
    index = torch.arange(keys, device=visible_bHK.device)
    return torch.where(visible_bHK.any(1), index, keys).amin(-1)


def _key_squares(part: TiledCall, visible_bHK: Tensor) -> Tensor:
    """Return count and sum of squares of the key entries that each query head meets, [2, H]."""
    key = part.call.key
    assert key is not None, "chosen only where the key is known"
    squares_2bGK = torch.stack(_finite_squares(key.to(part.dtype)))
    group = visible_bHK.shape[1] // key.shape[1]
    squares_2bHK = squares_2bGK.repeat_interleave(group, dim=2)
    return torch.where(visible_bHK, squares_2bHK, 0).to(state_dtype(part.device)).sum((1, 3))


def _finite_squares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return count and sum of squares of the finite entries along the last axis."""
    kept = finite_indicator(values)
    values = values.nan_to_num(nan=0, posinf=0, neginf=0)
    return kept.sum(-1), torch.linalg.vecdot(values, values)


def _row_values(part: TiledCall, tile: Tile, wanted: _Wanted, first: Tensor | None) -> dict[str, Tensor | int]:
    blocked = part.blocked(tile)
    values: dict[str, Tensor | int] = {"allowed": allowed_count(blocked, tile.columns)}
    if wanted.queries:
        assert part.call.query is not None, "chosen only where the query is known"
        values["q_n"], values["q_sq"] = _finite_squares(part.call.query[:, :, tile.rows].to(part.dtype))
    product = part.product(tile) if part.call.logits is None or wanted.qk_apart else None
    if wanted.qk_apart:
        assert product is not None, "chosen only where the product is known"
        values |= _named("qk", _moments(drop_(product.clone(), blocked)))
    logits = drop_(part.logits(tile, product), blocked)
    if wanted.moments:
        values |= _named("logit", _moments(logits))
    else:
        values["logit_n"] = finite_indicator(logits).sum(-1)
    if wanted.smallest:
        values["negated_smallest"] = logits.neg().nan_to_num_(posinf=-math.inf).amax(-1)
    if wanted.probabilities:
        values |= _softmax_values(logits, part.call.sinks, first)
    elif wanted.largest:
        values["largest"] = logits.amax(-1)
    return values


def _named(prefix: str, moments: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}_{name}": value for name, value in zip(("n", "mean", "m2"), moments, strict=True)}


def _moments(logits_bHtk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations of each row's finite entries, in two passes."""
    kept = finite_indicator(logits_bHtk)
    count = kept.sum(-1)
    centred = logits_bHtk.nan_to_num(neginf=0)
    mean = centred.sum(-1) / count.clamp(min=1)
    centred.sub_(mean[..., None]).mul_(kept)
    # What is left of the mean after rounding: 1e-7 of a large offset is not small beside a small spread.
    rest = centred.sum(-1) / count.clamp(min=1)
    deviation = torch.linalg.vecdot(centred, centred) - count * rest.square()
    return count, mean.to(state_dtype(mean.device)) + rest, deviation.clamp_(min=0)


def _softmax_values(logits_bHtk: Tensor, sinks: Tensor | None, first: Tensor | None) -> dict[str, Tensor | int]:
    """Return what the probabilities of each row are made of; the logits are overwritten.

    With m the row maximum and e = exp(s - m), one maximal outcome is set aside (its e is 1) and e, e^2, e^3 and
    e (m - s) are summed over the rest: nothing cancels later, however close to one-hot the row is.
    """
    largest, index = logits_bHtk.max(-1, keepdim=True)
    values: dict[str, Tensor | int] = {"largest": largest[..., 0]}
    finite_max = largest.nan_to_num(neginf=0)
    shift = finite_max
    sink_gap = None
    if sinks is not None:
        sink = sinks.detach().to(logits_bHtk.dtype)[:, None, None]
        shift = torch.maximum(finite_max, sink)
        sink_gap = (sink - shift).clamp(min=_LOWEST)
    gaps = logits_bHtk.sub_(shift).clamp_(min=_LOWEST)
    powers = gaps.exp()
    top_gap = (finite_max - shift).clamp(min=_LOWEST)[..., 0]
    values["top"], values["top_gap"] = top_gap.exp(), top_gap
    if first is not None:
        values["first"] = _at_first_key(powers, first)
    if sink_gap is None:
        powers.scatter_(-1, index, 0)
    else:
        key_is_top = finite_max >= shift
        powers.scatter_(-1, index, torch.where(key_is_top, 0, top_gap.exp()[..., None]))
        values["sink"] = sink_gap.exp()[..., 0].expand(powers.shape[:3])
    values["rest1"] = powers.sum(-1)
    values["rest2"] = torch.linalg.vecdot(powers, powers)
    values["weighted"] = -torch.linalg.vecdot(powers, gaps)
    values["rest3"] = torch.linalg.vecdot(torch.mul(powers, powers, out=gaps), powers)
    if sink_gap is not None:
        rest = torch.where(key_is_top, sink_gap.exp(), 0)[..., 0]
        values["rest1"] = values["rest1"] + rest
        values["rest2"] = values["rest2"] + rest**2
        values["rest3"] = values["rest3"] + rest**3
        values["weighted"] = values["weighted"] - rest * sink_gap[..., 0]
    return values


def _at_first_key(powers_bHtk: Tensor, first_b: Tensor) -> Tensor:
    """Return the entries of each batch item's first visible key, 0 where it lies beyond the tile's columns."""
    columns = powers_bHtk.shape[-1]
    inside = first_b < columns
    index = first_b.clamp(max=columns - 1)[:, None, None, None].expand(*powers_bHtk.shape[:3], 1)
    return powers_bHtk.gather(-1, index)[..., 0] * inside[:, None, None]


def _pooled(rows: RowValues, call: AttentionCall, wanted: _Wanted, keys_2H: Tensor, facts: LayerFacts) -> AttentionSums:
    """Combine the rows of each head and add what the call itself says."""
    heads = call.shape.heads
    values = rows.sums(sink=call.sinks is not None)
    if wanted.queries and "q_sq" in values:
        values["q_sq"] /= per_head(call.query_scale, heads, keys_2H).square()
    if wanted.keys:
        values["k_n"], values["k_sq"] = keys_2H[0], keys_2H[1] / per_head(call.key_scale, heads, keys_2H).square()
    if call.scale is not None:
        parts = [per_head(part, heads, keys_2H) for part in (call.scale, call.query_scale, call.key_scale)]
        values["scale_n"], values["scale_sum"] = torch.ones_like(parts[0]), parts[0] * parts[1] * parts[2]
    moments = {name: rows.moments(name) for name in MOMENTS}
    return AttentionSums.build(
        values,
        moments={"logit": moments["logit"], "qk": moments["logit" if wanted.qk_alike else "qk"]},
        largest=rows.extremum("largest") if wanted.largest else None,
        negated_smallest=rows.extremum("negated_smallest") if wanted.smallest else None,
        facts=facts,
    )

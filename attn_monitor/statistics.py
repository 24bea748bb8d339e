"""From one attention call to its sums: exact row statistics in tiles, pooled per head.

Axes: B batch, H query heads, G key heads, Q queries, K keys, D head dimension; b batch items, t rows and k columns of a
tile. Tiles are float32 (float64 for float64 inputs); what is pooled over rows is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.masking import finite_indicator
from attn_monitor.records import AttentionCall
from attn_monitor.relative import RelativeRows, known_finite
from attn_monitor.rows import RowValues
from attn_monitor.sums import MOMENTS, AttentionSums, LayerFacts, state_dtype
from attn_monitor.tiles import Tile, TiledCall, Workspace, per_head, undisturbed

_EXTREMA = frozenset({"logit_max", "logit_min"})
_PROBABILITIES = frozenset(
    {"entropy", "entropy_normalized", "max_probability", "sink_mass", "jacobian_trace", "jacobian_norm"}
)
_LOWEST = -1e4
"""Differences to the largest outcome are cut here: exp is 0 long before, and 0 * -inf would be nan."""


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
    cubes: bool

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
            cubes="jacobian_norm" in measured,
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
        rows = RowValues(tiled.call.shape, tiled.device)
        keys = torch.zeros((2, shape.heads), device=tiled.device, dtype=rows.dtype)
        visible = _visible_keys(tiled) if wanted.keys or wanted.first_key else None
        first = _first_visible(visible) if visible is not None and wanted.first_key else None
        if visible is not None and wanted.keys:
            keys = _key_squares(tiled, visible)
        if wanted.queries and tiled.call.query is not None:
            everything = slice(None)
            names = ("q_n", "q_sq")
            squares = _finite_squares(tiled.call.query.to(tiled.dtype))
            rows.put(everything, everything, everything, dict(zip(names, squares, strict=True)))
        work = Workspace(tiled.device, tiled.dtype)
        for items, heads, part in tiled.parts():
            first_b = None if first is None else first[items]
            for tile in part.tiles():
                rows.put(items, heads, tile.rows, _row_values(part, tile, wanted, first_b, work))
        facts = LayerFacts(
            measured=wanted.measured,
            approximate=wanted.measured if sampled else frozenset(),
            head_dim=call.head_dim if call.query is None else call.query.shape[-1],
            keys=shape.keys,
            calls=1,
        )
        return _pooled(rows, tiled.call, wanted, keys, facts)


def _reshapes_products(call: AttentionCall) -> bool:
    return call.softcap is not None or any(mask.is_floating_point() for mask in call.masks)


def _visible_keys(tiled: TiledCall) -> Tensor:
    """Return True where some query of the head may see the key, [B, H, K]."""
    shape, device = tiled.call.shape, tiled.device
    if not tiled.call.masks and tiled.call.logits is None:
        last = shape.keys if not tiled.call.is_causal else tiled.positions[-1] if shape.queries else -1
        return (torch.arange(shape.keys, device=device) <= last).expand(shape.batch, shape.heads, shape.keys)
    visible_BHK = torch.zeros((shape.batch, shape.heads, shape.keys), device=device, dtype=tiled.dtype)
    for items, heads, part in tiled.parts():
        for tile in part.tiles():
            blocked = part.blocked(tile)
            visible_BHK[items, heads, : blocked.start] = 1
            seen = visible_BHK[items, heads, blocked.start : tile.columns]
            seen.copy_(torch.maximum(seen, torch.as_tensor(blocked.visible(), device=device, dtype=seen.dtype)))
    return visible_BHK > 0


def _first_visible(visible_BHK: Tensor) -> Tensor:
    """Return the first key that any query of any head may see, [B]; K if there is none."""
    keys = visible_BHK.shape[2]
    if not keys:
        return torch.zeros(len(visible_BHK), device=visible_BHK.device, dtype=torch.long)
    index = torch.arange(keys, device=visible_BHK.device)
    return torch.where(visible_BHK.any(1), index, keys).amin(-1)


def _key_squares(tiled: TiledCall, visible_BHK: Tensor) -> Tensor:
    """Return count and sum of squares of the key entries that each query head meets, [2, H]."""
    key = tiled.call.key
    assert key is not None, "chosen only where the key is known"
    squares_2BGK = torch.stack(_finite_squares(key.to(tiled.dtype)))
    group = visible_BHK.shape[1] // key.shape[1]
    squares_2BHK = squares_2BGK.repeat_interleave(group, dim=2)
    return torch.where(visible_BHK, squares_2BHK, 0).to(state_dtype(tiled.device)).sum((1, 3))


def _finite_squares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return count and sum of squares of the finite entries along the last axis."""
    squares = torch.linalg.vector_norm(values, dim=-1).square()
    if known_finite(squares):
        return torch.full_like(squares, values.shape[-1]), squares
    kept = finite_indicator(values)
    return kept.sum(-1), torch.linalg.vector_norm(values.nan_to_num(nan=0, posinf=0, neginf=0), dim=-1).square()


def _row_values(
    part: TiledCall, tile: Tile, wanted: _Wanted, first: Tensor | None, work: Workspace
) -> dict[str, Tensor | int]:
    blocked = part.blocked(tile)
    values: dict[str, Tensor | int] = {"allowed": blocked.allowed}
    product = part.product(tile, work) if part.call.logits is None or wanted.qk_apart else None
    if wanted.qk_apart:
        assert product is not None, "chosen only where the product is known"
        apart = RelativeRows.of(work.second(product).copy_(product), blocked, work)
        values |= _named("qk", apart.moments(work.take(4, product.shape)))
    rows = RelativeRows.of(part.logits(tile, work, product), blocked, work, smallest=wanted.smallest)
    values |= _named("logit", rows.moments(work.second(rows.gaps))) if wanted.moments else {"logit_n": rows.count}
    values["largest"] = rows.largest
    if rows.smallest is not None:
        values["negated_smallest"] = -rows.smallest
    if wanted.probabilities:
        values |= _softmax_values(rows, part.call.sinks, first, work, cubes=wanted.cubes)
    return values


def _named(prefix: str, moments: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}_{name}": value for name, value in zip(("n", "mean", "m2"), moments, strict=True)}


def _softmax_values(
    rows: RelativeRows, sinks: Tensor | None, first: Tensor | None, work: Workspace, *, cubes: bool
) -> dict[str, Tensor | int]:
    """Return what the probabilities of each row are made of; the relative logits are overwritten.

    With e = exp(s - m), m the row maximum, the maximal keys are set aside (their e is 1) and e, e^2, e^3 and e (m - s)
    are summed over the rest: nothing cancels later, however close to one-hot the row is. The softmax of torch is
    faster than its exp; dividing by the largest probability turns p into e.
    """
    gaps = rows.gaps
    probs = torch._softmax(gaps, -1, False, out=work.second(gaps))
    top = probs.amax(-1)
    scratch = work.third(gaps)
    values: dict[str, Tensor | int] = {"weighted": -torch.mul(probs, gaps, out=scratch).sum(-1) / top}
    if first is not None:
        values["first"] = _at_first_key(probs, first) / top
    below = gaps.sign_()  # -1 below the row maximum, 0 at it
    ties = gaps.shape[-1] + below.sum(-1)
    rest = probs.mul_(below)
    values["rest1"] = ties - 1 - rest.sum(-1) / top
    squares = torch.linalg.vector_norm(rest, dim=-1) / top
    values["rest2"] = ties - 1 + squares.square()
    values["rest3"] = ties - 1
    if cubes:
        torch.mul(rest, rest, out=scratch)
        values["rest3"] = ties - 1 - scratch.mul_(rest).sum(-1) / top / top / top
    return values | _with_sink(values, rows.largest.to(state_dtype(top.device)), sinks)


def _with_sink(values: dict[str, Tensor | int], largest: Tensor, sinks: Tensor | None) -> dict[str, Tensor | int]:
    """Add a learned sink to the outcomes: what is relative to the likeliest key becomes relative to the likeliest."""
    if sinks is None:
        return {"top": torch.ones_like(largest), "top_gap": torch.zeros_like(largest)}
    sink = sinks.detach().to(largest.dtype)[:, None]
    shift = torch.maximum(largest, sink)
    gap, sink_gap = (largest - shift).clamp(min=_LOWEST), (sink - shift).clamp(min=_LOWEST)
    top, e_sink = gap.exp(), sink_gap.exp()
    # Where the sink is the likeliest the keys that were set aside join the rest, else the sink does.
    keys_lead = largest >= shift
    aside, aside_gap = torch.where(keys_lead, e_sink, top), torch.where(keys_lead, sink_gap, gap)
    found: dict[str, Tensor | int] = {"top": top, "top_gap": gap, "sink": e_sink}
    for power, name in enumerate(("rest1", "rest2", "rest3"), start=1):
        found[name] = values[name] * top**power + aside**power
    found["weighted"] = top * values["weighted"] - gap * top * values["rest1"] - aside * aside_gap
    if "first" in values:
        found["first"] = values["first"] * top
    return found


def _at_first_key(probs_bHtk: Tensor, first_b: Tensor) -> Tensor:
    """Return the entries of each batch item's first visible key, 0 where it lies beyond the tile's columns."""
    columns = probs_bHtk.shape[-1]
    inside = first_b < columns
    index = first_b.clamp(max=columns - 1)[:, None, None, None].expand(*probs_bHtk.shape[:3], 1)
    return probs_bHtk.gather(-1, index)[..., 0] * inside[:, None, None]


def _pooled(rows: RowValues, call: AttentionCall, wanted: _Wanted, keys_2H: Tensor, facts: LayerFacts) -> AttentionSums:
    """Combine the rows of each head and add what the call itself says."""
    heads = call.shape.heads
    values = rows.sums(sink=call.sinks is not None)
    if call.padding is not None:
        values["masked_rows"] = values["masked_rows"] - call.padding.sum()
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

"""From one attention call to its sums: exact row statistics in tiles, pooled per head.

Axes: B batch, H query heads, G key heads, Q queries, K keys, V value dimension. Tiles are float32 (float64 for float64
inputs); what is pooled over rows is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.entries import EntryBits, QualifyingEntries, VisibleKeys, first_visible, visible_keys
from attn_monitor.factors import KeySquares
from attn_monitor.gradients import check_gradient, pooled_gradients
from attn_monitor.passes import Note, Wanted, fill_rows
from attn_monitor.records import AttentionCall
from attn_monitor.rows import RowValues
from attn_monitor.sums import AttentionSums, LayerFacts
from attn_monitor.tiles import TiledCall, per_head, undisturbed
from attn_monitor.workspace import Workspaces


def attention_sums(
    call: AttentionCall,
    statistics: frozenset[str],
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    grad_output: Tensor | None = None,
    spaces: Workspaces | None = None,
) -> AttentionSums:
    """Return the sums of one attention call, on its device and without waiting for it.

    Args:
        call: The call; it is not modified.
        statistics: Names of the catalog; what is not chosen is not computed.
        max_queries: Look at so many random rows at most. All statistics are estimates then, and there are no extrema.
        generator: For the choice of rows, on the CPU; the same rows each time without one.
        grad_output: The gradient of the output of a fused kernel, [B, H, Q, V]: with it, and with the call's value, the
            statistics of gradients are measured as well, for less than what measuring them alone costs.
        spaces: Memory to compute in, if there is some already.

    Raises:
        ValueError: If the call has no value for the gradient, or the gradient does not fit the call.
    """
    if grad_output is not None:
        check_gradient(call, grad_output)
    spaces = spaces or Workspaces()
    with undisturbed(call.query if call.logits is None else call.logits):
        return spaces.fitting(
            lambda shrink: _sums(
                TiledCall.of(call, shrink).at_most(max_queries, generator), statistics, grad_output, spaces
            )[0]
        )


def softmax_sums(
    call: AttentionCall,
    statistics: frozenset[str],
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    spaces: Workspaces | None = None,
) -> tuple[AttentionSums, QualifyingEntries]:
    """Return the sums of one attention call, and the entries that its gradients will need: in one look.

    Args:
        call: The call.
        statistics: Names of the catalog.
        max_queries: Look at so many random rows at most.
        generator: For the choice of rows, on the CPU.
        spaces: Memory to compute in, if there is some already.
    """
    spaces = spaces or Workspaces()

    def compute(shrink: int) -> tuple[AttentionSums, QualifyingEntries]:
        tiled = TiledCall.of(call, shrink).at_most(max_queries, generator)
        bits = EntryBits(tiled)
        sums, rows = _sums(tiled, statistics, None, spaces, bits)
        return sums, bits.entries(rows, tiled, call.shape)

    with undisturbed(call.query if call.logits is None else call.logits):
        return spaces.fitting(compute)


def _sums(
    tiled: TiledCall,
    statistics: frozenset[str],
    grad_output: Tensor | None,
    spaces: Workspaces,
    bits: EntryBits | None = None,
) -> tuple[AttentionSums, RowValues]:
    sampled = tiled.index is not None
    wanted = Wanted.by(tiled.call, statistics, sampled=sampled, gradients=grad_output is not None)
    rows = RowValues(wanted.names(), tiled.call.shape, tiled.device, tiled.dtype, tiled.weights)
    keys_seen = wanted.keys or wanted.first_key
    visible = visible_keys(tiled) if keys_seen else None
    gathered = VisibleKeys(tiled) if keys_seen and visible is None else None
    notes: list[Note] = [] if bits is None else [bits.note]
    if gathered is not None and wanted.first_key:  # which must be known before anything is summed, of all rows
        whole = tiled.whole or tiled
        for items, heads, part in whole.parts():
            for tile in part.tiles():
                gathered.note(items, heads, tile, part.blocked(tile))
        visible = gathered.keys()
    elif gathered is not None:
        notes.append(gathered.note)
    first = first_visible(visible) if visible is not None and wanted.first_key else None
    squares = KeySquares(tiled) if wanted.keys else None
    fill_rows(rows, tiled, wanted, spaces, first=first, squares=squares, grad_output=grad_output, notes=notes)
    estimated = visible is None  # then the sample tells which keys are seen
    visible = gathered.keys() if visible is None and gathered is not None else visible
    keys = torch.zeros((2, tiled.call.shape.heads), device=tiled.device, dtype=rows.dtype)
    if visible is not None and squares is not None:
        keys = squares.sums(visible)
    exact = frozenset() if estimated else frozenset({"k_rms"})
    facts = LayerFacts(
        measured=wanted.measured,
        approximate=wanted.measured - exact if sampled else frozenset(),
        head_dim=tiled.call.head_dim if tiled.call.query is None else tiled.call.query.shape[-1],
        keys=tiled.call.shape.keys,
        calls=1,
    )
    sums = _pooled(rows, tiled, wanted, keys, facts)
    return sums if grad_output is None else sums.merge(pooled_gradients(rows, tiled)), rows


def _pooled(rows: RowValues, tiled: TiledCall, wanted: Wanted, keys_2H: Tensor, facts: LayerFacts) -> AttentionSums:
    """Combine the rows of each head and add what the call itself says."""
    call, heads = tiled.call, tiled.call.shape.heads
    values = rows.sums(call.sinks)
    if call.padding is not None:
        values["masked_rows"] = values["masked_rows"] - call.padding.sum()
    if wanted.keys:
        values["k_n"], values["k_sq"] = keys_2H[0], keys_2H[1] / per_head(call.key_scale, heads, keys_2H).square()
    if call.scale is not None:
        parts = [per_head(part, heads, keys_2H) for part in (call.scale, call.query_scale, call.key_scale)]
        values["scale_n"], values["scale_sum"] = torch.ones_like(parts[0]), parts[0] * parts[1] * parts[2]
    moments: dict[str, Tensor] = {}
    if wanted.moments:
        moments["logit"] = rows.moments()
    if wanted.qk_apart:
        moments["qk"] = rows.moments("qk_")
    elif wanted.qk_alike:
        moments["qk"] = moments["logit"]
    values |= rows.variances
    if wanted.qk_alike and "logit_m2_v" in values:
        values["qk_m2_v"] = values["logit_m2_v"]
    if wanted.queries:
        query_scale = per_head(call.query_scale, heads, keys_2H)
        values["q_sq"] = values["q_sq"] / query_scale.square()
        if "q_sq_v" in values:
            values["q_sq_v"] = values["q_sq_v"] / query_scale**4
    return AttentionSums.build(
        values,
        moments=moments,
        largest=rows.extremum("largest") if "logit_max" in wanted.measured else None,
        negated_smallest=rows.extremum("smallest", -1) if wanted.smallest else None,
        facts=facts,
    )

"""Gradients of the loss at the two sides of the softmax, as sums of squares per head.

Axes: B batch, H query heads, G key heads, Q queries, K keys, V value dimension; b batch items, t rows and k columns of
a tile. Only allowed entries of rows with at least two allowed keys, all of them finite, enter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.masking import allowed_count, finite_indicator, window
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.sums import AttentionSums, state_dtype
from attn_monitor.tiles import Tile, TiledCall, multiply_heads, row_blocks, undisturbed


def attention_gradient_sums(call: AttentionCall, grad_output: Tensor) -> AttentionSums:
    """Return the gradient sums of a fused kernel, from the gradient of its output.

    dP = dO V^T and dS = P (dP - rowsum(P dP)), with P recomputed in tiles.

    Args:
        call: A call with `query`, `key` and `value`.
        grad_output: The gradient of the output, [B, H, Q, V].

    Raises:
        ValueError: If the call has no value, or the gradient does not fit the call.
    """
    if call.value is None or call.query is None:
        raise ValueError("The gradients of a fused kernel need query, key and value; this call lacks one.")
    with undisturbed(call.query):
        expected = (*call.query.shape[:3], call.value.shape[-1])
        if tuple(grad_output.shape) != expected:
            raise ValueError(f"`grad_output` expects the output's shape {expected}, got {tuple(grad_output.shape)}.")
        tiled = TiledCall.of(call)
        totals_3H = _zeros(3, call.shape.heads, tiled.device)
        for items, part in tiled.batches():
            for tile in part.tiles():
                totals_3H += _tile_sums(part, tile, grad_output[items, :, tile.rows].to(part.dtype))
        return AttentionSums.from_gradients(
            totals_3H[1], totals_3H[2], rows=totals_3H[0], approximate=GRADIENTS if call.dropout else frozenset()
        )


def qualifying_entries(call: AttentionCall) -> Tensor:
    """Return True for the entries whose gradients count, broadcastable to [B, H, Q, K]."""
    with undisturbed(call.query if call.logits is None else call.logits):
        tiled = TiledCall.of(call)
        entries_BHQK = torch.zeros(call.shape, dtype=torch.bool, device=tiled.device)
        for items, part in tiled.batches():
            for tile in part.tiles():
                blocked = part.blocked(tile)
                logits = part.finite_logits(tile, blocked)
                entries = _qualifying_rows(logits, blocked)[..., None] & logits.isfinite()
                entries_BHQK[items, :, tile.rows, : tile.columns] = entries
        return entries_BHQK


def softmax_gradient_sums(
    qualifying: Tensor, *, grad_logits: Tensor | None = None, grad_probs: Tensor | None = None
) -> AttentionSums:
    """Return the gradient sums of a softmax whose own gradients were seen.

    Args:
        qualifying: What `qualifying_entries` returned for the call.
        grad_logits: The gradient of the softmax input, [B, H, Q, K].
        grad_probs: The gradient of the softmax output, [B, H, Q, K].

    Raises:
        ValueError: If neither gradient is given, or one does not fit.
    """
    given = [grad for grad in (grad_logits, grad_probs) if grad is not None]
    if not given:
        raise ValueError("Expected the gradient of the logits, of the probabilities or both, got neither.")
    full = tuple(given[0].shape)
    fits = len(full) == qualifying.ndim == 4 and all(q in {1, g} for q, g in zip(qualifying.shape, full, strict=True))
    if not fits or any(tuple(grad.shape) != full for grad in given):
        raise ValueError(
            f"Expected gradients [B, H, Q, K] of one shape that the qualifying entries {tuple(qualifying.shape)} "
            f"broadcast to, got {[tuple(grad.shape) for grad in given]}."
        )
    shape = CallShape(*full)
    with undisturbed(given[0]):
        rows = qualifying.any(-1).expand(shape[:3]).sum((0, 2))
        logits, probs = (
            None if grad is None else _kept_squares(grad, qualifying) for grad in (grad_logits, grad_probs)
        )
        return AttentionSums.from_gradients(logits, probs, rows=rows)


def _zeros(count: int, heads: int, device: torch.device) -> Tensor:
    return torch.zeros((count, heads), device=device, dtype=state_dtype(device))


def _qualifying_rows(logits_bHtk: Tensor, blocked: Tensor | None) -> Tensor:
    """Return True for rows that are finite and have at least two allowed keys, [b, H, t]."""
    finite = finite_indicator(logits_bHtk).sum(-1)
    return (finite >= 2) & (finite == allowed_count(blocked, logits_bHtk.shape[-1]))


def _tile_sums(part: TiledCall, tile: Tile, grad_output_bHtV: Tensor) -> Tensor:
    """Return count, squares of dS and squares of dP of the qualifying rows, [3, H]."""
    value = part.call.value
    assert value is not None, "checked by the caller"
    blocked = part.blocked(tile)
    logits = part.finite_logits(tile, blocked)
    qualifying = _qualifying_rows(logits, blocked)
    grad_probs = multiply_heads(grad_output_bHtV, value, tile.columns)
    if blocked is not None:
        grad_probs.masked_fill_(blocked, 0)
    probs_sq = _row_squares(grad_probs)
    logits_sq = _row_squares(_softmax_backward(logits, grad_probs, part.call.sinks))
    squares = [torch.where(qualifying, squared, 0).sum((0, 2)) for squared in (logits_sq, probs_sq)]
    return torch.stack([qualifying.sum((0, 2)).to(squares[0].dtype), *squares])


def _softmax_backward(logits_bHtk: Tensor, grad_probs_bHtk: Tensor, sinks: Tensor | None) -> Tensor:
    """Return P (dP - rowsum(P dP)); both inputs are overwritten.

    Only differences of dP matter. Taken against the dP of the likeliest outcome, nothing cancels in a saturated row.
    """
    largest, index = logits_bHtk.max(-1, keepdim=True)
    shift = largest.nan_to_num(neginf=0)
    reference = grad_probs_bHtk.gather(-1, index)
    sink_weight = None
    if sinks is not None:
        sink = sinks.detach().to(logits_bHtk.dtype)[:, None, None]
        # The sink carries no value, so its dP is 0.
        reference = torch.where(shift >= sink, reference, 0)
        shift = torch.maximum(shift, sink)
        sink_weight = (sink - shift).exp()
    weights = logits_bHtk.sub_(shift).exp_()
    total = weights.sum(-1, keepdim=True)
    grad_probs_bHtk.sub_(reference)
    product = torch.linalg.vecdot(weights, grad_probs_bHtk)[..., None]
    if sink_weight is not None:
        total = total + sink_weight
        product = product - sink_weight * reference
    return grad_probs_bHtk.sub_(product / total).mul_(weights.div_(total))


def _row_squares(values_bHtk: Tensor) -> Tensor:
    """Return the sum of squares of each row in float64; scaled by the largest, so that 1e-25 squared is not 0."""
    largest = torch.linalg.vector_norm(values_bHtk, ord=float("inf"), dim=-1)
    largest = torch.where(largest == 0, 1, largest)
    scaled = values_bHtk / largest[..., None]
    dtype = state_dtype(values_bHtk.device)
    squares: Tensor = torch.linalg.vecdot(scaled, scaled).to(dtype)
    return squares * largest.to(dtype).square()


def _kept_squares(grad_BHQK: Tensor, qualifying: Tensor) -> Tensor:
    """Return the sum of squares over the qualifying entries, [H]."""
    shape = CallShape(*grad_BHQK.shape)
    total_H = _zeros(1, shape.heads, grad_BHQK.device)[0]
    if not grad_BHQK.numel():
        return total_H
    dtype = torch.float64 if grad_BHQK.dtype == torch.float64 else torch.float32
    batches, blocks = row_blocks(shape)
    for items in batches:
        kept = qualifying if qualifying.shape[0] == 1 else qualifying[items]
        for rows in blocks:
            grad = grad_BHQK[items, :, rows].to(dtype)
            total_H += _row_squares(torch.where(window(kept, rows, shape.keys), grad, 0)).sum((0, 2))
    return total_H

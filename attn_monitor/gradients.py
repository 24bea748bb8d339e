"""Gradients of the loss at the two sides of the softmax, as sums of squares per head.

Axes: B batch, H query heads, G key heads, Q queries, K keys, V value dimension; b batch items, t rows and k columns of
a tile. Only allowed entries of rows with at least two allowed keys, all of them finite, enter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.masking import window
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.relative import RelativeRows, known_finite
from attn_monitor.sums import AttentionSums, state_dtype
from attn_monitor.tiles import Tile, TiledCall, Workspace, blocks, multiply_heads, undisturbed


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
        work = Workspace(tiled.device, tiled.dtype)
        for items, heads, part in tiled.parts():
            for tile in part.tiles():
                grad = grad_output[items, heads, tile.rows].to(part.dtype)
                totals_3H[:, heads] += _tile_sums(part, tile, grad, work)
        return AttentionSums.from_gradients(
            totals_3H[1], totals_3H[2], rows=totals_3H[0], approximate=GRADIENTS if call.dropout else frozenset()
        )


def qualifying_entries(call: AttentionCall) -> Tensor:
    """Return True for the entries whose gradients count, broadcastable to [B, H, Q, K]."""
    with undisturbed(call.query if call.logits is None else call.logits):
        tiled = TiledCall.of(call)
        entries_BHQK = torch.zeros(call.shape, dtype=torch.bool, device=tiled.device)
        work = Workspace(tiled.device, tiled.dtype)
        for items, heads, part in tiled.parts():
            for tile in part.tiles():
                blocked = part.blocked(tile)
                rows = RelativeRows.of(part.logits(tile, work), blocked, work)
                allowed = torch.ones_like(rows.gaps)
                entries_BHQK[items, heads, tile.rows, : tile.columns] = blocked.zero_(allowed).mul_(
                    _qualifying_rows(rows)[..., None]
                )
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


def _qualifying_rows(rows: RelativeRows) -> Tensor:
    """Return True for rows that are finite and have at least two allowed keys, [b, H, t]."""
    return (rows.count >= 2) & (rows.count == rows.blocked.allowed)


def _tile_sums(part: TiledCall, tile: Tile, grad_output_bHtV: Tensor, work: Workspace) -> Tensor:
    """Return count, squares of dS and squares of dP of the qualifying rows, [3, H]."""
    value = part.call.value
    assert value is not None, "checked by the caller"
    rows = RelativeRows.of(part.logits(tile, work), part.blocked(tile), work)
    qualifying = _qualifying_rows(rows)
    logits = rows.gaps
    probs = torch._softmax(logits, -1, False, out=work.second(logits))
    sink_prob = _make_room(probs, rows.largest.to(state_dtype(part.device)), part.call.sinks)
    # Each row relative to its largest entry, so that the square of 1e-25 is not 0.
    size = grad_output_bHtV.abs().amax(-1)
    size = torch.where(size > 0, size, 1)
    grad_probs = multiply_heads(grad_output_bHtV / size[..., None], value, tile.columns, work)
    # A value of a padded key may be anything, and must not enter through 0 * nan.
    if known_finite(grad_probs.sum(-1)):
        rows.blocked.zero_(grad_probs)
    else:
        rows.blocked.zero_any_(grad_probs)
    dtype = state_dtype(part.device)
    probs_norm = torch.linalg.vector_norm(grad_probs, dim=-1)
    logits_norm = torch.linalg.vector_norm(_softmax_backward(probs, grad_probs, sink_prob, work), dim=-1, dtype=dtype)
    norms = [(norm.to(dtype) * size).square() for norm in (logits_norm, probs_norm)]
    return torch.stack([torch.where(qualifying, value, 0).sum((0, 2)) for value in (torch.ones_like(norms[0]), *norms)])


def _make_room(probs_bHtk: Tensor, largest_bHt: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Scale probabilities down, in place, for a learned sink that joins the outcomes, and return its probability."""
    if sinks is None:
        return None
    # With e relative to the likeliest key, the keys sum to 1 / max p.
    keys = -probs_bHtk.amax(-1).to(largest_bHt.dtype).log()
    sink_prob = torch.sigmoid(sinks.detach().to(largest_bHt.dtype)[:, None] - largest_bHt - keys)
    keys_prob = torch.sigmoid(largest_bHt + keys - sinks.detach().to(largest_bHt.dtype)[:, None])
    probs_bHtk.mul_(keys_prob.to(probs_bHtk.dtype)[..., None])
    return sink_prob.to(probs_bHtk.dtype)


def _softmax_backward(
    probs_bHtk: Tensor, grad_probs_bHtk: Tensor, sink_prob_bHt: Tensor | None, work: Workspace
) -> Tensor:
    """Return P (dP - sum P dP); both inputs are overwritten.

    In a saturated row dP of the likeliest key almost equals the sum, and their difference is all rounding. A second
    pass over the differences brings back what the first one lost.
    """
    scratch = work.third(probs_bHtk)
    taken: Tensor | float = 0.0
    for _ in range(2):
        mean = torch.mul(probs_bHtk, grad_probs_bHtk, out=scratch).sum(-1)
        if sink_prob_bHt is not None:  # the sink has no value, so its dP is 0, less what was taken
            mean = mean - sink_prob_bHt * taken
        grad_probs_bHtk.sub_(mean[..., None])
        taken = taken + mean
    return grad_probs_bHtk.mul_(probs_bHtk)


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
    cut = blocks(shape)
    for items in cut.items:
        for heads in cut.heads:
            kept = qualifying if qualifying.shape[0] == 1 else qualifying[items]
            kept = kept if kept.shape[1] == 1 else kept[:, heads]
            for rows in cut.rows:
                grad = grad_BHQK[items, heads, rows].to(dtype)
                kept_squares = _row_squares(torch.where(window(kept, rows, shape.keys), grad, 0))
                total_H[heads] += kept_squares.sum((0, 2))
    return total_H

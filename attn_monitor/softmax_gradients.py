"""Gradients at the two sides of a softmax that autograd itself delivers, as sums of squares per head.

Axes: B batch, H heads, Q queries, K keys; b batch items, t rows of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attn_monitor import crew
from attn_monitor.allowed import EntryBits, QualifyingEntries
from attn_monitor.catalog import GRADIENTS
from attn_monitor.passes import Wanted, fill_rows
from attn_monitor.precision import known_finite, row_norms
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.rows import RowValues
from attn_monitor.sums import AttentionSums, state_dtype
from attn_monitor.tiles import TiledCall, blocks, undisturbed
from attn_monitor.uncertainty import variance_of_sum
from attn_monitor.workspace import Workspaces


def qualifying_entries(
    call: AttentionCall,
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    spaces: Workspaces | None = None,
) -> QualifyingEntries:
    """Return the entries of a call whose gradients count, for a call whose forward pass has been measured.

    Args:
        call: The call.
        max_queries: Look at so many random rows at most.
        generator: For the choice of rows, on the CPU.
        spaces: Memory to compute in, if there is some already.
    """
    spaces = spaces or Workspaces()
    with undisturbed(call.query if call.logits is None else call.logits):
        return spaces.fitting(
            lambda shrink: _entries(TiledCall.of(call, shrink).at_most(max_queries, generator), call.shape, spaces)
        )


def _entries(tiled: TiledCall, whole: CallShape, spaces: Workspaces) -> QualifyingEntries:
    bits = EntryBits(tiled)
    wanted = Wanted.by(tiled.call, frozenset(), sampled=tiled.index is not None, gradients=False)
    rows = RowValues(wanted.names(), tiled.call.shape, tiled.device, tiled.dtype)
    fill_rows(rows, tiled, wanted, spaces, notes=[bits.note])
    return bits.entries(rows, tiled, whole)


def softmax_gradient_sums(
    entries: QualifyingEntries,
    *,
    grad_logits: Tensor | None = None,
    grad_probs: Tensor | None = None,
    spaces: Workspaces | None = None,
) -> AttentionSums:
    """Return the gradient sums of a softmax whose own gradients were seen.

    Args:
        entries: What `qualifying_entries` returned for the call.
        grad_logits: The gradient of the softmax input, [B, H, Q, K].
        grad_probs: The gradient of the softmax output, [B, H, Q, K].
        spaces: Memory to compute in, if there is some already.

    Raises:
        ValueError: If neither gradient is given, or one does not fit.
    """
    given = [grad for grad in (grad_logits, grad_probs) if grad is not None]
    if not given:
        raise ValueError("Expected the gradient of the logits, of the probabilities or both, got neither.")
    if any(tuple(grad.shape) != tuple(entries.shape) for grad in given):
        raise ValueError(
            f"Expected gradients of the shape of the logits {tuple(entries.shape)}, "
            f"got {[tuple(grad.shape) for grad in given]}."
        )
    with undisturbed(given[0]):
        spaces = spaces or Workspaces()
        qualifying = (entries.bits != 0).any(-1).to(state_dtype(given[0].device))
        rows = qualifying if entries.weights is None else qualifying * entries.weights
        variances: dict[str, Tensor] = {}
        totals: dict[str, Tensor] = {}
        for name, grad in (("grad_logits_sq", grad_logits), ("grad_probs_sq", grad_probs)):
            if grad is None:
                continue
            squares_BHQ = spaces.fitting(partial(_kept_squares, grad, entries, spaces))
            totals[name] = squares_BHQ.sum((0, 2))
            if entries.weights is not None:
                variances[f"{name}_v"] = variance_of_sum(squares_BHQ[None], entries.weights)[0]
        return AttentionSums.from_gradients(
            totals.get("grad_logits_sq"),
            totals.get("grad_probs_sq"),
            rows=rows.sum((0, 2)),
            variances=variances,
            approximate=frozenset() if entries.index is None else GRADIENTS,
        )


def _kept_squares(grad_BHQK: Tensor, entries: QualifyingEntries, spaces: Workspaces, shrink: int) -> Tensor:
    """Return the sum of squares over the qualifying entries of each row, as much as the row stands for, [B, H, Q]."""
    shape, device = entries.looked_at, grad_BHQK.device
    dtype = torch.float64 if grad_BHQK.dtype == torch.float64 else torch.float32
    norms = torch.zeros(shape[:3], device=device, dtype=dtype)
    count = crew.workers(device, math.prod(shape))
    cut = blocks(shape, shrink=shrink, workers=count)

    def square(items: slice, heads: slice, rows: slice, seen: Tensor) -> None:
        work = spaces.at(device, dtype)
        grad = work.take(1, seen.shape).copy_(seen)
        keep = work.second(grad).copy_(entries.keep(items, heads, rows))
        grad = grad.mul_(keep) if known_finite(grad.sum(-1)) else grad.masked_fill_(keep == 0, 0)
        row_norms(grad, norms[items, heads, rows])

    def jobs() -> Iterator[crew.Job]:
        for items in cut.items:
            for heads in cut.heads:
                grad_bHQK = entries.rows(grad_BHQK[items, heads])
                for rows in cut.rows if shape.keys else ():
                    yield partial(square, items, heads, rows, grad_bHQK[:, :, rows])

    crew.run(jobs(), count)
    squares = norms.to(state_dtype(device)).square()
    return squares if entries.weights is None else squares * entries.weights

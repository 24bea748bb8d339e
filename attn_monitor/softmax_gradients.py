"""Gradients at the two sides of a softmax that autograd itself delivers, as sums of squares per head.

Axes: B batch, H heads, Q queries, K keys; b batch items, t rows of a tile. Only allowed entries of rows with at least
two allowed keys, all of them finite, enter. Which these are must be kept from the forward to the backward pass: one bit
for each entry, a thirty-second of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attn_monitor.catalog import GRADIENTS
from attn_monitor.precision import known_finite, row_norms
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.relative import RelativeRows
from attn_monitor.sums import AttentionSums, state_dtype
from attn_monitor.tiles import TiledCall, blocks, undisturbed
from attn_monitor.uncertainty import variance_of_sum
from attn_monitor.workspace import Workspace, Workspaces

_BITS = 8


@dataclass(frozen=True, slots=True, eq=False)
class QualifyingEntries:
    """The entries whose gradients count.

    Attributes:
        bits: [B, H, Q, K / 8], eight keys to a byte.
        shape: Of the call.
        index: The rows that are looked at, as many as `bits` has; `None` for all.
        weights: How many rows each of them stands for; `None` for one.
    """

    bits: Tensor
    shape: CallShape
    index: Tensor | None = None
    weights: Tensor | None = None

    @property
    def looked_at(self) -> CallShape:
        """The sizes of what is looked at."""
        return self.shape._replace(queries=self.bits.shape[2])

    def keep(self, items: slice, heads: slice, rows: slice) -> Tensor:
        """Return 1 for the entries that count and 0 for the others, [b, H, t, K]."""
        shifts = torch.arange(_BITS, device=self.bits.device, dtype=torch.uint8)
        bits = self.bits[items, heads, rows, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
        return bits.flatten(-2)[..., : self.shape.keys]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor [b, H, Q, K] that are looked at."""
        return tensor if self.index is None else tensor.index_select(2, self.index)


def qualifying_entries(
    call: AttentionCall,
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    spaces: Workspaces | None = None,
) -> QualifyingEntries:
    """Return the entries of a call whose gradients count.

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
    shape = tiled.call.shape
    bits = torch.zeros((*shape[:3], -(-shape.keys // _BITS)), dtype=torch.uint8, device=tiled.device)
    work = spaces.at(tiled.device, tiled.dtype)
    for items, heads, part in tiled.parts():
        for tile in part.tiles():
            blocked = part.blocked(tile)
            logits = part.logits(tile, work)
            out = {name: logits.new_zeros(logits.shape[:3]) for name in ("allowed", "largest", "nonfinite")}
            blocked.fill_allowed(out["allowed"])
            RelativeRows.of(logits, blocked, work, out)
            qualifying = (out["allowed"] >= 2) & (out["nonfinite"] == 0)
            keep = blocked.zero_(work.second(logits).fill_(1)).mul_(qualifying[..., None])
            packed = _packed(keep, work)
            bits[items, heads, tile.rows, : packed.shape[-1]] = packed
    return QualifyingEntries(bits, whole, tiled.index, tiled.weights)


def _packed(keep_bHtk: Tensor, work: Workspace) -> Tensor:
    """Return eight columns of ones and zeros as one byte each."""
    columns = keep_bHtk.shape[-1]
    width = -(-columns // _BITS)
    padded = work.take(1, (*keep_bHtk.shape[:3], width * _BITS))
    padded[..., columns:] = 0
    padded[..., :columns] = keep_bHtk
    powers = torch.arange(_BITS, device=keep_bHtk.device, dtype=keep_bHtk.dtype).exp2()
    return torch.matmul(padded.unflatten(-1, (width, _BITS)), powers).to(torch.uint8)


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
    work = spaces.at(device, dtype)
    norms = torch.zeros(shape[:3], device=device, dtype=dtype)
    cut = blocks(shape, shrink=shrink)
    for items in cut.items:
        for heads in cut.heads:
            grad_bHQK = entries.rows(grad_BHQK[items, heads])
            for rows in cut.rows if shape.keys else ():
                seen = grad_bHQK[:, :, rows]
                grad = work.take(1, seen.shape).copy_(seen)
                keep = work.second(grad).copy_(entries.keep(items, heads, rows))
                grad = grad.mul_(keep) if known_finite(grad.sum(-1)) else grad.masked_fill_(keep == 0, 0)
                row_norms(grad, norms[items, heads, rows])
    squares = norms.to(state_dtype(device)).square()
    return squares if entries.weights is None else squares * entries.weights

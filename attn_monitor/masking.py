"""Which entries of an attention call are blocked.

Axes: B batch, H query heads, Q queries, K keys; t rows of a tile, k columns of a tile. Every mask has four axes, each
of full size or 1, and stays that small: nothing here expands a broadcast mask beyond one tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_monitor.records import AttentionCall

BLOCKING_BIAS = -9000.0
"""A bias at or below this blocks: -1e4 (-9984 in bfloat16), -1e9, finfo.min, -inf and their sums."""
BARE_FILL = -9.9e8
"""A bare logit at or below this is a fill: -1e9, -inf and finfo.min of every dtype but float16."""
FLOAT16_FILL = -65504.0
"""finfo.min of float16, which masked logits keep when they are upcast before the softmax."""


def four_axes(mask: Tensor) -> Tensor:
    """View a mask that broadcasts to [B, H, Q, K] with all four axes."""
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def window(tensor: Tensor, rows: slice, columns: int) -> Tensor:
    """View the rows and the first columns of a tensor that broadcasts to [B, H, Q, K]."""
    if tensor.shape[2] != 1:
        tensor = tensor[:, :, rows]
    return tensor[..., :columns] if tensor.shape[3] != 1 else tensor


def blocked_entries(call: AttentionCall, positions: Sequence[int], rows: slice, columns: int) -> Tensor | None:
    """Return True where an entry of the tile is blocked, broadcastable to [B, H, t, k]; `None` if nothing can be."""
    parts = [_blocked_by_mask(window(mask, rows, columns)) for mask in call.masks]
    if call.logits is not None:
        fill = _blocked_fill(window(call.logits, rows, columns))
        if call.query is not None and call.key is not None:
            # An infinite query makes products of -inf, which are no mask.
            fill &= _is_finite(call.query[:, :, rows])[..., None]
            finite_keys = _is_finite(call.key[:, :, :columns])
            fill &= finite_keys.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)[:, :, None]
        parts.append(fill)
        device = call.logits.device
    else:
        assert call.query is not None, "a call has either logits or query and key"
        device = call.query.device
    if call.is_causal:
        keys = torch.arange(columns, device=device)
        parts.append((keys > _as_tensor(positions[rows], device)[:, None])[None, None])
    if not parts:
        return None
    blocked = parts[0]
    for part in parts[1:]:
        blocked = blocked | part
    return blocked


def allowed_count(blocked: Tensor | None, columns: int) -> Tensor | int:
    """Count the allowed keys of each row, broadcastable to [B, H, t]."""
    if blocked is None:
        return columns
    return columns - blocked.expand(*blocked.shape[:3], columns).sum(-1)


def drop_(logits_BHtk: Tensor, blocked: Tensor | None) -> Tensor:
    """Set every blocked and every non-finite entry to -inf, in place; the finite entries are what is left."""
    infinity = float("inf")
    logits_BHtk.nan_to_num_(nan=-infinity, posinf=-infinity, neginf=-infinity)
    if blocked is not None:
        # Adding a small broadcast penalty is ten times faster on CPUs than a masked fill of the tile.
        penalty = torch.zeros(blocked.shape, dtype=logits_BHtk.dtype, device=blocked.device)
        logits_BHtk.add_(penalty.masked_fill_(blocked, -infinity))
    return logits_BHtk


def finite_indicator(values: Tensor) -> Tensor:
    """Return 1 where an entry is finite, 0 elsewhere, in plain arithmetic: bool tiles are slow on CPUs."""
    return values.sub(values).add_(1).nan_to_num_(nan=0)


def _blocked_by_mask(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= BLOCKING_BIAS


def _blocked_fill(logits: Tensor) -> Tensor:
    return (logits <= BARE_FILL) | (logits == FLOAT16_FILL)


def _is_finite(vectors: Tensor) -> Tensor:
    return vectors.isfinite().all(-1)


def _as_tensor(positions: Sequence[int], device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    # A blocking copy would wait for the device.
    return torch.tensor(positions, device="cpu").to(device, non_blocking=True)

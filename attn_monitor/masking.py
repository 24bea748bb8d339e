"""Which entries of an attention call are blocked.

Axes: B batch, H query heads, Q queries, K keys; t rows of a tile, k columns of a tile. Every mask has four axes, each
of full size or 1, and stays that small: nothing here expands a broadcast mask beyond one tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.precision import known_finite
from attn_monitor.records import AttentionCall
from attn_monitor.workspace import Workspace

BLOCKING_BIAS = -9000.0
"""A bias at or below this blocks: -1e4 (-9984 in bfloat16), -1e9, finfo.min, -inf and their sums."""
FILL = -50.0
"""What fills scores, or stands beside nothing but zeros in a mask, blocks at or below this: exp(-50) is 2e-22, and no
bias consists of zeros and such numbers. Shifted windows add -100."""
BARE_FILL = -9.9e8
"""A bare logit at or below this is a fill: -1e9, -inf and finfo.min of every dtype but float16."""
FLOAT16_FILL = -65504.0
"""finfo.min of float16, which masked logits keep when they are upcast before the softmax."""
_KEEP = 5
"""The piece of a workspace that holds what is kept of a tile, for as long as the tile is looked at."""
BURIED = 1e30
"""Low enough that exp gives 0, and finite, so that 0 times it is 0."""


def four_axes(mask: Tensor) -> Tensor:
    """View a mask that broadcasts to [B, H, Q, K] with all four axes."""
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def hardened(mask: Tensor) -> Tensor:
    """Return a float mask of nothing but zeros and low fills as a bool mask, any other mask as it is.

    Without waiting for a device: where that would be needed, the fills become -inf.
    """
    if not mask.is_floating_point() or not mask.numel():
        return mask
    if mask.device.type != "cpu":
        filled = mask <= FILL
        return torch.where((filled | (mask == 0)).all() & filled, -math.inf, mask)
    (least,) = mask.amin().reshape(1).tolist()
    if not BLOCKING_BIAS < least <= FILL:
        return mask
    (only,) = ((mask == 0) | (mask <= FILL)).all().reshape(1).tolist()
    return mask > FILL if only else mask


def window(tensor: Tensor, rows: slice, columns: int) -> Tensor:
    """View the rows and the first columns of a tensor that broadcasts to [B, H, Q, K]."""
    if tensor.shape[2] != 1:
        tensor = tensor[:, :, rows]
    return tensor[..., :columns] if tensor.shape[3] != 1 else tensor


@dataclass(frozen=True, slots=True, eq=False)
class Blocked:
    """Which entries of a tile are blocked, and how to keep them out. Plain arithmetic: bool tiles are slow on CPUs.

    Attributes:
        start: The first column in which an entry may be blocked.
        keep: 1 where an entry is allowed and 0 where it is blocked, broadcastable to [b, H, t, k - start]; `None` if
            nothing is blocked.
        allowed: How many keys each row may see, broadcastable to [b, H, t].
    """

    start: int
    keep: Tensor | None
    allowed: Tensor | int

    def zero_(self, tile: Tensor) -> Tensor:
        """Set finite blocked entries to 0; blocked entries that are not finite become nan."""
        if self.keep is not None:
            tile[..., self.start :].mul_(self.keep)
        return tile

    def zero_any_(self, tile: Tensor) -> Tensor:
        """Set blocked entries to 0 whatever they hold."""
        if self.keep is not None:
            tile[..., self.start :].masked_fill_(self.keep == 0, 0)
        return tile

    def bury_(self, tile: Tensor, times: int = 1) -> Tensor:
        """Lower blocked entries so far that a softmax gives them exactly 0, and stay finite; times -1 raises them."""
        if self.keep is not None:
            tile[..., self.start :].add_((self.keep - 1).mul_(times * BURIED))
        return tile

    def visible(self) -> Tensor | int:
        """Return 1 for the columns from `start` on that any row may see, broadcastable to [b, H, k - start]."""
        return 1 if self.keep is None else self.keep.amax(2)

    def fill_allowed(self, out: Tensor) -> None:
        """Write how many keys each row may see, [b, H, t]."""
        if isinstance(self.allowed, Tensor):
            out.copy_(self.allowed)
        else:
            out.fill_(self.allowed)


class Triangles:
    """The triangles that a causal mask cuts out of tiles: the same for all tiles of one size, so made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def blocked(self, start: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Blocked:
        """Return what is blocked in a tile of successive rows, whose first one sees the keys before `start`."""
        width = columns - start
        if width <= 0:
            return Blocked(columns, None, columns)
        if (rows, width) not in self._known:
            keep = torch.ones((1, 1, rows, width), dtype=dtype, device=device).tril(-1)
            self._known[rows, width] = keep, keep.sum(-1)
        keep, more = self._known[rows, width]
        return Blocked(start, keep, more + start)


def blocked_entries(
    call: AttentionCall,
    positions: Sequence[int],
    rows: slice,
    columns: int,
    dtype: torch.dtype,
    triangles: Triangles,
    work: Workspace,
) -> Blocked:
    """Return what is blocked in a tile of some rows and the first columns; its memory is that of the workspace."""
    parts = [_blocked_by_mask(window(mask, rows, columns)) for mask in call.masks]
    unfilled: Tensor | None = None
    if call.logits is not None:
        unfilled = _kept_by_fill(call, call.logits, rows, columns, dtype, work)
        device = call.logits.device
    else:
        assert call.query is not None, "a call has either logits or query and key"
        device = call.query.device
    nothing = not parts and unfilled is None
    if call.is_causal and nothing and isinstance(positions, range):
        return triangles.blocked(positions[rows.start] + 1, rows.stop - rows.start, columns, dtype, device)
    start = 0
    if call.is_causal:
        start = min(positions[rows.start] + 1, columns) if nothing else 0
        last = _as_tensor(positions[rows], device)[:, None]
        parts.append((torch.arange(start, columns, device=device) > last)[None, None])
    if (not parts and unfilled is None) or start == columns:
        return Blocked(columns, None, columns)
    keep = unfilled
    if parts:
        blocked = parts[0]
        for part in parts[1:]:
            blocked = blocked | part
        unmasked = (~blocked).to(dtype)
        keep = unmasked if unfilled is None else unfilled.mul_(unmasked)
    assert keep is not None, "nothing blocked is answered above"
    return Blocked(start, keep, start + keep.expand(*keep.shape[:3], columns - start).sum(-1))


def _blocked_by_mask(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= BLOCKING_BIAS


def _kept_by_fill(
    call: AttentionCall, logits: Tensor, rows: slice, columns: int, dtype: torch.dtype, work: Workspace
) -> Tensor | None:
    """Return 0 for what is filled as blocked entries are and 1 for the rest, `None` if nothing is known to be."""
    seen = window(logits, rows, columns)
    least = math.nan
    if seen.device.type == "cpu" and seen.numel():
        (least,) = seen.amin().reshape(1).tolist()
        if least > FLOAT16_FILL:
            return None
    keep = work.take(_KEEP, seen.shape)
    if math.isnan(least) or seen.dtype == torch.float64 or _holds_float16_fill(seen, keep):
        fill = seen <= BARE_FILL
        if seen.dtype != torch.bfloat16:  # which has no such number
            fill |= seen == FLOAT16_FILL
        keep.copy_(~fill)
    else:  # plain arithmetic: next above the fill, the spacing of float32 is 64
        keep.copy_(seen).sub_(BARE_FILL).clamp_(0, 1)
    if call.query is not None and call.key is not None:
        # An infinite query makes products of -inf, which are no mask.
        query, key = call.query[:, :, rows], call.key[:, :, :columns]
        if not known_finite(query.sum(-1, dtype=torch.float32)):
            torch.maximum(keep, (~query.isfinite().all(-1)).to(dtype)[..., None], out=keep)
        if not known_finite(key.sum(-1, dtype=torch.float32)):
            broken = (~key.isfinite().all(-1)).to(dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            torch.maximum(keep, broken[:, :, None], out=keep)
    return keep


def _holds_float16_fill(seen: Tensor, scratch: Tensor) -> bool:
    """Tell whether some logit is the fill of float16, as far as that is known without waiting for a device."""
    if seen.dtype == torch.bfloat16:
        return False
    if seen.device.type != "cpu" or seen.dtype == torch.float16:
        return True
    (nearest,) = scratch.copy_(seen).sub_(FLOAT16_FILL).abs_().amin().reshape(1).tolist()
    return bool(nearest == 0)


def _as_tensor(positions: Sequence[int], device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    # A blocking copy would wait for the device.
    return torch.tensor(positions, device="cpu").to(device, non_blocking=True)

"""What is allowed, gathered over the tiles of a call: which keys any query may see, and which gradients count.

Axes: B batch, H heads, Q queries, K keys; b batch items, t rows and k columns of a tile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_monitor.masking import Blocked
from attn_monitor.records import CallShape
from attn_monitor.rows import RowValues
from attn_monitor.tiles import Tile, TiledCall

_BITS = 8


@dataclass(frozen=True, slots=True, eq=False)
class QualifyingEntries:
    """The entries whose gradients count: allowed ones of rows with at least two allowed keys, all of them finite.

    They are kept from the forward to the backward pass, so one bit for each: a thirty-second of the logits.

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

    def of_heads(self, heads: slice) -> QualifyingEntries:
        """Return the entries of some of the heads."""
        bits = self.bits[:, heads]
        return replace(self, bits=bits, shape=self.shape._replace(heads=bits.shape[1]))

    @classmethod
    def beside(cls, parts: Sequence[QualifyingEntries]) -> QualifyingEntries:
        """Put the entries of several calls of one size side by side, all of whose rows are looked at."""
        first, *others = parts
        if not others:
            return first
        bits = torch.cat([part.bits for part in parts], dim=1)
        return replace(first, bits=bits, shape=first.shape._replace(heads=bits.shape[1]))

    def keep(self, items: slice, heads: slice, rows: slice) -> Tensor:
        """Return 1 for the entries that count and 0 for the others, [b, H, t, K]."""
        shifts = torch.arange(_BITS, device=self.bits.device, dtype=torch.uint8)
        bits = self.bits[items, heads, rows, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
        return bits.flatten(-2)[..., : self.shape.keys]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor [b, H, Q, K] that are looked at."""
        return tensor if self.index is None else tensor.index_select(2, self.index)


class EntryBits:
    """Gathers the bits of `QualifyingEntries`, tile by tile."""

    def __init__(self, tiled: TiledCall) -> None:
        shape = tiled.call.shape
        self._dtype = tiled.dtype
        self._bits = torch.zeros((*shape[:3], -(-shape.keys // _BITS)), dtype=torch.uint8, device=tiled.device)

    def note(self, items: slice, heads: slice, tile: Tile, blocked: Blocked) -> None:
        """Take note of what a tile allows."""
        rows = (1, 1, 1) if blocked.keep is None else blocked.keep.shape[:3]
        width = -(-tile.columns // _BITS)
        keep = torch.zeros((*rows, width * _BITS), dtype=self._dtype, device=self._bits.device)
        keep[..., : blocked.start] = 1
        if blocked.keep is not None:
            keep[..., blocked.start : tile.columns] = blocked.keep
        powers = torch.arange(_BITS, device=keep.device, dtype=keep.dtype).exp2()
        packed = torch.matmul(keep.unflatten(-1, (width, _BITS)), powers).to(torch.uint8)
        self._bits[items, heads, tile.rows, :width] = packed

    def entries(self, rows: RowValues, tiled: TiledCall, whole: CallShape) -> QualifyingEntries:
        """Return the entries of the rows that qualify.

        Args:
            rows: The rows, filled in.
            tiled: The call, or the rows of it that were looked at.
            whole: The sizes of the call.
        """
        bits = self._bits.mul_(rows.qualifying()[..., None])
        return QualifyingEntries(bits, whole, tiled.index, tiled.weights)


class VisibleKeys:
    """Gathers which keys some query of the head may see, tile by tile."""

    def __init__(self, tiled: TiledCall) -> None:
        shape = tiled.call.shape
        self._lock = threading.Lock()
        self._seen = torch.zeros((shape.batch, shape.heads, shape.keys), device=tiled.device, dtype=tiled.dtype)

    def note(self, items: slice, heads: slice, tile: Tile, blocked: Blocked) -> None:
        """Take note of what a tile allows."""
        self._seen[items, heads, : blocked.start] = 1
        seen = self._seen[items, heads, blocked.start : tile.columns]
        visible = torch.as_tensor(blocked.visible(), device=seen.device, dtype=seen.dtype)
        with self._lock:  # tiles of several threads share the keys
            seen.copy_(torch.maximum(seen, visible))

    def keys(self) -> Tensor:
        """Return True for the visible keys, [B, H, K]."""
        return self._seen > 0


def visible_keys(tiled: TiledCall) -> Tensor | None:
    """Return True where some query of the head may see the key, [B, H, K], or `None` where the tiles have to tell."""
    shape = tiled.call.shape
    if tiled.call.masks or tiled.call.logits is not None:
        return None
    last = tiled.queries - 1 if tiled.call.is_causal or not tiled.queries else shape.keys
    return (torch.arange(shape.keys, device=tiled.device) <= last).expand(shape.batch, shape.heads, shape.keys)


def first_visible(visible_BHK: Tensor, layers: Sequence[int] = ()) -> Tensor:
    """Return the first key that any query of any head of a layer may see, [B, 1], or [B, H] with several layers.

    K stands where there is none.

    Args:
        visible_BHK: Which keys are visible; H may be 1 for what holds for all heads.
        layers: How many heads each of several layers side by side has.
    """
    batch, heads, keys = visible_BHK.shape
    if not keys:
        return torch.zeros((batch, 1), device=visible_BHK.device, dtype=torch.long)
    counts = list(layers) if len(layers) > 1 and heads > 1 else [heads]
    index = torch.arange(keys, device=visible_BHK.device)
    found = [
        torch.where(visible.any(1, keepdim=True), index, keys).amin(-1).expand(-1, visible.shape[1])
        for visible in visible_BHK.split(counts, dim=1)
    ]
    return torch.cat(found, dim=1) if len(counts) > 1 else found[0][:, :1]

"""The logits of an attention call, one tile of query rows at a time, in a computation nobody else notices.

Axes: B batch, H query heads, G key heads, Q queries, K keys, D head dimension; b batch items, t rows and k columns of a
tile. Under a causal mask the columns that no row of the tile may see are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attn_monitor.masking import blocked_entries, drop_, four_axes, window
from attn_monitor.records import AttentionCall, CallShape

TILE_ELEMENTS = 2**19
"""Entries of a tile: 2 MiB in float32, which stays in a CPU's cache and still fills a GPU's launch."""
MIN_ROWS = 16
"""Rather fewer batch items at once than fewer rows than this: a thin product is a slow one."""
_SEED = 0x5EED


class Tile(NamedTuple):
    """Some query rows and the first so many keys."""

    rows: slice
    columns: int


@contextmanager
def undisturbed(tensor: Tensor | None) -> Iterator[None]:
    """Compute on the tensor's device in full precision, unseen by autograd, autocast and others' function modes."""
    with torch._C.DisableTorchFunction():
        device = "cpu" if tensor is None else tensor.device.type
        if not torch.amp.is_autocast_available(device):
            device = "cpu"
        with _full_matmul_precision(), torch.no_grad(), torch.autocast(device, enabled=False):
            yield


@contextmanager
def _full_matmul_precision() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has chosen through the newer fp32_precision, which the old getter refuses to read
        with _full_backend_precision():
            yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _full_backend_precision() -> Iterator[None]:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def row_blocks(shape: CallShape) -> tuple[list[slice], list[slice]]:
    """Cut the batch items and the query rows into blocks whose product has about `TILE_ELEMENTS` entries."""
    item = max(1, shape.heads * shape.keys)
    items = max(1, TILE_ELEMENTS // (item * max(1, min(MIN_ROWS, shape.queries))))
    rows = max(1, TILE_ELEMENTS // (item * max(1, min(items, shape.batch))))
    return _blocks(shape.batch, items), _blocks(shape.queries, rows)


def _blocks(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def per_head(value: float | Tensor | None, heads: int, like: Tensor) -> Tensor:
    """Return a scale that is a number, 0-dim or [H] as [H] like `like`; nan if unknown."""
    if value is None:
        value = math.nan
    if isinstance(value, Tensor):
        return value.detach().to(like.device, like.dtype, non_blocking=True).reshape(-1).expand(heads)
    return torch.full((heads,), value, device=like.device, dtype=like.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class TiledCall:
    """The rows of a call that are looked at, ready to be computed in tiles.

    Attributes:
        call: The call, its masks with four axes.
        positions: The query position of each row, for the causal mask.
        dtype: float32, or float64 if an input is.
    """

    call: AttentionCall
    positions: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, call: AttentionCall) -> TiledCall:
        """Prepare all rows of a call."""
        given = [tensor for tensor in (call.query, call.key, call.logits) if tensor is not None]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in given) else torch.float32
        call = replace(call, masks=tuple(four_axes(mask) for mask in call.masks))
        return cls(call, range(call.shape.queries), dtype)

    @property
    def device(self) -> torch.device:
        """Where the call lives."""
        tensor = self.call.query if self.call.logits is None else self.call.logits
        assert tensor is not None, "a call has either logits or query and key"
        return tensor.device

    def sampled(self, count: int, generator: torch.Generator | None = None) -> TiledCall:
        """Keep `count` random rows, one of each stretch of equal length, so that every position range is seen."""
        queries = self.call.shape.queries
        if generator is None:
            generator = torch.Generator("cpu").manual_seed(_SEED)
        jitter = torch.rand(count, generator=generator, device="cpu", dtype=torch.float64)
        starts = torch.arange(count, device="cpu") * queries // count
        ends = torch.arange(1, count + 1, device="cpu") * queries // count
        rows = starts + (jitter * (ends - starts)).long()
        index = rows.to(self.device, non_blocking=True)

        def pick(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or tensor.shape[2] == 1 else tensor.index_select(2, index)

        masks = tuple(mask if mask.shape[2] == 1 else mask.index_select(2, index) for mask in self.call.masks)
        call = replace(self.call, query=pick(self.call.query), logits=pick(self.call.logits), masks=masks)
        return replace(self, call=call, positions=rows.tolist())

    def batches(self) -> Iterator[tuple[slice, TiledCall]]:
        """Yield some batch items at a time, the keys and values converted once for all of their tiles."""
        for items in row_blocks(self.call.shape)[0]:
            call = self.call
            part = replace(
                call,
                query=None if call.query is None else call.query[items],
                key=None if call.key is None else call.key[items].to(self.dtype).contiguous(),
                value=None if call.value is None else call.value[items].to(self.dtype).contiguous(),
                logits=None if call.logits is None else call.logits[items],
                masks=tuple(mask if mask.shape[0] == 1 else mask[items] for mask in call.masks),
            )
            yield items, replace(self, call=part)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles; none if there are no keys."""
        shape = self.call.shape
        for rows in row_blocks(shape)[1]:
            columns = min(shape.keys, self.positions[rows.stop - 1] + 1) if self.call.is_causal else shape.keys
            if columns:
                yield Tile(rows, columns)

    def blocked(self, tile: Tile) -> Tensor | None:
        """Return True where an entry is blocked, broadcastable to [b, H, t, k]; `None` if nothing can be."""
        return blocked_entries(self.call, self.positions, tile.rows, tile.columns)

    def product(self, tile: Tile) -> Tensor:
        """Return scale * q.k, [b, H, t, k]."""
        query, key = self.call.query, self.call.key
        assert query is not None, "the product needs query"
        assert key is not None, "the product needs key"
        query_bHtD = query[:, :, tile.rows].to(self.dtype)
        scale = per_head(self.call.scale, query.shape[1], query_bHtD)
        return multiply_heads(query_bHtD * scale[:, None, None], key.to(self.dtype), tile.columns)

    def logits(self, tile: Tile, product: Tensor | None = None) -> Tensor:
        """Return what the softmax receives, [b, H, t, k], a tensor of our own; a given product is overwritten."""
        if self.call.logits is not None:
            return window(self.call.logits, tile.rows, tile.columns).to(self.dtype, copy=True)
        logits = self.product(tile) if product is None else product
        if self.call.softcap is not None:
            logits.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
        for mask in self.call.masks:
            if mask.is_floating_point():
                logits.add_(window(mask, tile.rows, tile.columns))
        return logits

    def finite_logits(self, tile: Tile, blocked: Tensor | None) -> Tensor:
        """Return the logits, with -inf wherever an entry is blocked or not finite."""
        return drop_(self.logits(tile), blocked)


def multiply_heads(rows_bHtD: Tensor, keys_bGKD: Tensor, columns: int) -> Tensor:
    """Multiply each query head with its key head, [b, H, t, k]; the group is folded into the rows, no key is copied."""
    batch, heads, count, dim = rows_bHtD.shape
    groups = keys_bGKD.shape[1]
    folded = rows_bHtD.reshape(batch, groups, heads // groups * count, dim)
    product = torch.matmul(folded, keys_bGKD[:, :, :columns].transpose(-1, -2))
    return product.view(batch, heads, count, columns)

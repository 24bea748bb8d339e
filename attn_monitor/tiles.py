"""The logits of an attention call, one tile of query rows at a time, in a computation nobody else notices.

Axes: B batch, H query heads, G key heads, Q queries, K keys, D head dimension; b batch items, t rows and k columns of a
tile. Under a causal mask the columns that no row of the tile may see are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attn_monitor.crew import workers
from attn_monitor.masking import Blocked, Triangles, blocked_entries, four_axes, hardened, window
from attn_monitor.precision import full_matmul_precision
from attn_monitor.records import AttentionCall, CallShape
from attn_monitor.sums import state_dtype
from attn_monitor.unseen import unseen
from attn_monitor.workspace import Workspace

TILE_ELEMENTS = 2**20
"""Entries of a tile: 4 MiB in float32, which stays in a CPU's cache, and is enough for several threads or a GPU."""
MIN_ROWS, MAX_ROWS = 32, 128
"""Thin products are slow ones; beyond this many rows rather take more heads at once, for less of a causal tile is
above the diagonal then."""
MOST_SHARES = 4
"""Into how many a tile is cut for threads that each compute one: smaller ones are mostly overhead."""
_SEED = 0x5EED


class Tile(NamedTuple):
    """Some query rows and the first so many keys."""

    rows: slice
    columns: int


@contextmanager
def undisturbed(tensor: Tensor | None) -> Iterator[None]:
    """Compute on the tensor's device in full precision, unseen by autograd, autocast and others' function modes."""
    with unseen():
        device = "cpu" if tensor is None else tensor.device.type
        casting = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        autocast = torch.autocast(device, enabled=False) if casting else nullcontext()
        with full_matmul_precision(), torch.no_grad(), autocast:
            yield


class Blocks(NamedTuple):
    """How a call is cut into tiles."""

    items: list[slice]
    heads: list[slice]
    rows: list[slice]


def blocks(shape: CallShape, groups: int = 1, *, is_causal: bool = False, shrink: int = 1, workers: int = 1) -> Blocks:
    """Cut batch items, heads and query rows into blocks whose product has about `TILE_ELEMENTS` entries.

    Args:
        shape: The sizes of the call.
        groups: The number of key heads: a block is some of the query heads of one, or all of those of several.
        is_causal: Whether columns are left out where a tile has few rows.
        shrink: By how much tiles are made smaller, where memory is scarce.
        workers: How many tiles are computed at the same time; they share the memory of one.
    """
    keys, elements = max(1, shape.keys), max(1, TILE_ELEMENTS // (shrink * min(workers, MOST_SHARES)))
    least = max(1, MIN_ROWS // shrink)
    rows = max(1, min(shape.queries, max(least, min(MAX_ROWS, elements // keys))))
    pairs = max(1, elements // (rows * keys))
    together = max(1, shape.heads // max(1, groups))
    heads = max(1, min(shape.heads, pairs // together * together or _divisor(together, pairs)))
    items = max(1, min(shape.batch, pairs // heads))
    if not is_causal:
        rows = max(rows, elements // (max(1, items * heads) * keys))
    return Blocks(_slices(shape.batch, items), _slices(shape.heads, heads), _slices(shape.queries, rows))


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def _slices(size: int, step: int) -> list[slice]:
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
        shrink: By how much tiles are smaller than usual.
        index: The rows that are looked at; `None` for all.
        whole: All rows, where some are looked at.
        weights: How many rows of the call each row stands for, [Q]; `None` for one.
        cut: Of a part, how its whole is cut into tiles.
        triangles: What a causal mask cuts out of the tiles.
    """

    call: AttentionCall
    positions: Sequence[int]
    dtype: torch.dtype
    queries: int
    shrink: int = 1
    index: Tensor | None = None
    whole: TiledCall | None = None
    weights: Tensor | None = None
    cut: Blocks | None = None
    triangles: Triangles = field(default_factory=Triangles)

    @classmethod
    def of(cls, call: AttentionCall, shrink: int = 1) -> TiledCall:
        """Prepare all rows of a call."""
        given = [tensor for tensor in (call.query, call.key, call.logits) if tensor is not None]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in given) else torch.float32
        call = replace(call, masks=tuple(hardened(four_axes(mask)) for mask in call.masks))
        return cls(call, range(call.shape.queries), dtype, call.shape.queries, shrink)

    @property
    def device(self) -> torch.device:
        """Where the call lives."""
        tensor = self.call.query if self.call.logits is None else self.call.logits
        assert tensor is not None, "a call has either logits or query and key"
        return tensor.device

    @property
    def workers(self) -> int:
        """How many tiles are computed at the same time."""
        return workers(self.device, math.prod(self.call.shape))

    def at_most(self, count: int | None, generator: torch.Generator | None = None) -> TiledCall:
        """Return the call itself, or `count` of its rows if it has more."""
        if count is None or self.call.shape.queries <= count:
            return self
        return self.sampled(count, generator)

    def sampled(self, count: int, generator: torch.Generator | None = None) -> TiledCall:
        """Keep `count` random rows, one of each of as many stretches, so that every range of positions is seen."""
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
        query, logits, padding = (pick(tensor) for tensor in (self.call.query, self.call.logits, self.call.padding))
        call = replace(self.call, query=query, logits=logits, padding=padding, masks=masks)
        weights = (ends - starts).to(self.device, state_dtype(self.device), non_blocking=True)
        return replace(self, call=call, positions=rows.tolist(), index=index, weights=weights, whole=self)

    def parts(self, *, values: bool = False) -> Iterator[tuple[slice, slice, TiledCall]]:
        """Yield some batch items and heads at a time, their tensors converted once for all of their tiles.

        Args:
            values: Whether the values are needed.
        """
        call, shape = self.call, self.call.shape
        groups = 1 if call.key is None else call.key.shape[1]
        cut = blocks(shape, groups, is_causal=call.is_causal, shrink=self.shrink, workers=self.workers)
        for items in cut.items:
            for heads in cut.heads:
                key_heads = self.key_heads(heads)
                part = replace(
                    call,
                    query=self._scaled(items, heads),
                    key=self._converted(call.key, items, key_heads),
                    value=self._converted(call.value, items, key_heads) if values else None,
                    scale=None if call.scale is None else 1.0,
                    logits=None if call.logits is None else call.logits[items, heads],
                    masks=tuple(_cut(mask, items, heads) for mask in call.masks),
                    sinks=None if call.sinks is None else call.sinks[heads],
                )
                yield items, heads, replace(self, call=part, cut=cut)

    def key_heads(self, heads: slice) -> slice:
        """Return the key heads that serve some query heads."""
        groups = 1 if self.call.key is None else self.call.key.shape[1]
        whole = self.call.shape.heads
        return slice(heads.start * groups // whole, -(-heads.stop * groups // whole))

    def _scaled(self, items: slice, heads: slice) -> Tensor | None:
        """Return scale * query, which is smaller than scale * q.k."""
        query = self.call.query
        if query is None:
            return None
        query = query[items, heads].to(self.dtype)
        if self.call.scale is None:
            return query
        return query * per_head(self.call.scale, self.call.shape.heads, query)[heads, None, None]

    def _converted(self, tensor: Tensor | None, items: slice, heads: slice) -> Tensor | None:
        return None if tensor is None else tensor[items, heads].to(self.dtype).contiguous()

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles of a part, those of the last rows first; none if there are no keys."""
        shape = self.call.shape
        # Under a causal mask these are the largest: taken last, one of them would keep the other threads waiting.
        for rows in reversed((self.cut or blocks(shape)).rows):
            columns = min(shape.keys, self.positions[rows.stop - 1] + 1) if self.call.is_causal else shape.keys
            if columns:
                yield Tile(rows, columns)

    def blocked(self, tile: Tile, work: Workspace) -> Blocked:
        """Return what is blocked in a tile, until the workspace is used for the next."""
        return blocked_entries(self.call, self.positions, tile.rows, tile.columns, self.dtype, self.triangles, work)

    def product(self, tile: Tile, work: Workspace) -> Tensor:
        """Return scale * q.k of a part, [b, H, t, k], in the first tile of the workspace."""
        query, key = self.call.query, self.call.key
        assert query is not None, "the product needs query"
        assert key is not None, "the product needs key"
        return multiply_heads(query[:, :, tile.rows], key, tile.columns, work)

    def logits(self, tile: Tile, work: Workspace, product: Tensor | None = None) -> Tensor:
        """Return what the softmax receives, [b, H, t, k], in the first tile of the workspace.

        Args:
            tile: Which rows and columns.
            work: Where to put them.
            product: The product of the tile if it is there already; it is overwritten.
        """
        if self.call.logits is not None:
            seen = window(self.call.logits, tile.rows, tile.columns)
            return work.take(1, seen.shape).copy_(seen)
        logits = self.product(tile, work) if product is None else product
        if self.call.softcap is not None:
            logits.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
        for mask in self.call.masks:
            if mask.is_floating_point():
                logits.add_(window(mask, tile.rows, tile.columns))
        return logits


def _cut(mask: Tensor, items: slice, heads: slice) -> Tensor:
    mask = mask if mask.shape[0] == 1 else mask[items]
    return mask if mask.shape[1] == 1 else mask[:, heads]


def multiply_heads(rows_bHtD: Tensor, keys_bGKD: Tensor, columns: int, work: Workspace) -> Tensor:
    """Multiply each query head with its key head, [b, H, t, k], into the first tile of the workspace.

    The heads of a group are folded into the rows, so that no key is copied.
    """
    batch, heads, count, dim = rows_bHtD.shape
    groups = keys_bGKD.shape[1]
    folded = rows_bHtD.reshape(batch * groups, heads // groups * count, dim)
    keys = keys_bGKD.flatten(0, 1)[:, :columns].transpose(-1, -2)
    out = work.take(1, (*folded.shape[:2], columns))
    return torch.bmm(folded, keys, out=out).view(batch, heads, count, columns)

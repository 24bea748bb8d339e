"""From the input of a softmax to an `AttentionCall`: its axes told apart, masks, scales and sinks gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.adapters import POOLED_HEADS, check_measurable
from attn_monitor.capture.canonical import canonical_factors
from attn_monitor.capture.cuts import Cut, local_gradient
from attn_monitor.capture.distributed import shard_of_axes, shard_of_scores
from attn_monitor.capture.layout import Axis
from attn_monitor.capture.local_tags import local_scores
from attn_monitor.capture.products import Product
from attn_monitor.capture.sighting import Sighting
from attn_monitor.capture.tags import SinkColumn, Tag, TagStore
from attn_monitor.records import AttentionCall
from attn_monitor.tensor_parallel import is_distributed

UNKNOWN_SCALE = (
    "its scores are multiplied by a factor that is not the same within a head (one per sample, say), so the scale, and "
    "what follows from it, are not known"
)
NO_LONGER_SCALED = (
    "its scores go through a function before the softmax (a relu, a power), so the logits are no scale times q.k: the "
    "scale, and what follows from query and key, are not known"
)


_CANONICAL = ((0,), (1,), (2,), (3,))
"""The groups where each of batch, heads, queries and keys is one dimension, and in its place already."""


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """How a tensor shaped like the softmax input becomes [B, H, Q, K].

    Attributes:
        parts: For each dimension of the input, the lengths it is made of.
        groups: Positions among all parts of batch, heads, queries and keys.
        axes: The axis behind each part, if known.
    """

    parts: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[Axis | None, ...]

    @property
    def pooled(self) -> bool:
        """Whether there may be heads that nothing told from batch or queries."""
        lengths = [length for lengths in self.parts for length in lengths]
        batch, rows = ([i for i in self.groups[n] if lengths[i] != 1] for n in (0, 2))
        return not self.groups[1] and (len(batch) > 0 or len(rows) > 1)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Bring a tensor that broadcasts to the softmax input into axes that broadcast to [B, H, Q, K]."""
        if tensor.dim() < len(self.parts):
            tensor = tensor.reshape((1,) * (len(self.parts) - tensor.dim()) + tuple(tensor.shape))
        if self.groups == _CANONICAL and all(len(lengths) == 1 for lengths in self.parts):
            return tensor
        full = [length for lengths in self.parts for length in lengths]
        apart = [
            length if size != 1 else 1
            for size, lengths in zip(tensor.shape, self.parts, strict=True)
            for length in lengths
        ]
        tensor = tensor.reshape(apart)
        shape: list[int] = []
        for group in self.groups:
            mixed = len({apart[i] != full[i] for i in group}) > 1
            if mixed:
                tensor = tensor.expand([full[i] if i in group else n for i, n in enumerate(tensor.shape)])
            shape.append(math.prod(tensor.shape[i] for i in group))
        order = [i for group in self.groups for i in group]
        return tensor.permute(order).reshape(shape)


def is_attention(tag: Tag | None, dim: int) -> bool:
    """Tell whether a softmax over this dimension of a tagged tensor is attention.

    Its axis must come from an activation: one that comes from a weight is a router or a classifier.
    """
    if tag is None or tag.kind != "scores" or tag.product is None:
        return False
    role = next((axis.role for axis in tag.layout[dim] if axis.role is not None), "right")
    return not tag.product.weights[0 if role == "left" else 1]


def from_softmax(tags: TagStore, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sighting, Tag] | None:
    """Read a call of any softmax; `None` if it is not attention."""
    logits = fn.argument(args, kwargs, 0, "input", "self")
    tag = tags.get(logits)
    if tag is None or tag.product is None or len(tag.layout) != logits.dim():
        return None
    dim = fn.argument(args, kwargs, 1, "dim")
    if dim is None:  # torch's own rule where the dimension is not given
        dim = 0 if logits.dim() in (0, 1, 3) else 1
    dim %= logits.dim()
    if not is_attention(tag, dim):
        return None
    part, whole = logits, tuple(logits.shape)
    how: tuple[Cut, ...] = ()
    if is_distributed(logits):
        tag, part, how = local_scores(tag, logits, dim)
    check_measurable(part)
    product = tag.product
    assert product is not None, "it stays when the scores are cut"
    # A softmax does not notice what is subtracted from a whole row; where the user did, it would hide the logits.
    given = part.detach() if tag.shift is None else part.detach() + tag.shift
    sink = tag.sink if tag.sink is not None and tag.layout[dim] == (tag.sink.axis,) else None
    keys = _keys_only(dim, sink)
    arrangement, swapped = _arrange(keys(given), tag, product, dim)
    logits_BHQK = arrangement(keys(given))
    batch, heads = (
        [axis for i in group if (axis := arrangement.axes[i]) is not None] for group in arrangement.groups[:2]
    )
    lengths = logits_BHQK.shape[2], logits_BHQK.shape[3]
    query, key = canonical_factors(product, batch, heads, lengths, swapped=swapped)
    scales = [scale.of_factor(heads) for scale in product.scales]
    scale = None if tag.bent else tag.scale.of_scores(heads)
    call = AttentionCall(
        query=query,
        key=key,
        logits=logits_BHQK,
        masks=_with_sum([arrangement(keys(mask.detach(), given.dim())) for mask in tag.masks]),
        sinks=_sink_per_head(given, dim, sink, arrangement) if sink is not None else None,
        scale=scale,
        query_scale=scales[1 if swapped else 0],
        key_scale=scales[0 if swapped else 1],
        plain=tag.plain,
        head_dim=product.depth,
    )
    notes = [POOLED_HEADS] if arrangement.pooled else []
    if scale is None:
        notes.append(NO_LONGER_SCALED if tag.bent else UNKNOWN_SCALE)
    differentiable = torch.is_grad_enabled() and logits.requires_grad

    local = local_gradient(how, whole) if is_distributed(logits) else None

    def canonical(tensor: Tensor) -> Tensor:
        return arrangement(keys(tensor if local is None else local(tensor)))

    if is_distributed(logits):
        shard, placed = shard_of_scores(tag, heads, how), True
    else:
        shard, placed = shard_of_axes(*_axes_of_queries(tags, product, swapped=swapped))

    sighting = Sighting(
        call=call,
        logits=logits,
        canonical=canonical,
        differentiable=differentiable,
        note="; ".join(notes),
        path="softmax",
        shard=shard,
        placed=placed,
    )
    # Keys that a layer generated, all of a sample at once, may be a classifier's weights.
    generated = any(axis.channels for axis in tag.layout[dim])
    return sighting, tag._replace(doubted=tag.doubted or generated)


def _axes_of_queries(tags: TagStore, product: Product, *, swapped: bool) -> tuple[list[Axis], list[Axis]]:
    """Return the axes of the queries that the scores have too, and those that met the keys."""
    query, dims = (product.right, product.right_dims) if swapped else (product.left, product.left_dims)
    tag = tags.get(query)
    if tag is None or len(tag.layout) != len(dims):
        return [], []
    named = list(zip(dims, tag.layout, strict=True))
    stay = [axis for dim, axes in named if dim in product.out_dims for axis in axes]
    return stay, [axis for dim, axes in named if dim not in product.out_dims for axis in axes]


def _with_sum(masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the masks and, where several were added one after the other, their sum: together they may block."""
    added = [mask for mask in masks if mask.is_floating_point()]
    return (*masks, sum(added[1:], start=added[0])) if len(added) > 1 else tuple(masks)


def _keys_only(dim: int, sink: SinkColumn | None) -> Callable[..., Tensor]:
    """Return what cuts the column of a learned sink off a tensor that broadcasts to the softmax input."""

    def keys(tensor: Tensor, dims: int | None = None) -> Tensor:
        position = dim - (tensor.dim() if dims is None else dims)
        if sink is None or -position > tensor.dim() or tensor.shape[position] == 1:
            return tensor
        return tensor.narrow(position, sink.start, sink.length)

    return keys


def _sink_per_head(given: Tensor, dim: int, sink: SinkColumn, arrangement: _Arrangement) -> Tensor | None:
    """Return the logits of a learned sink, [H]: those of the first row, for they are the same in all."""
    column = arrangement(given.narrow(dim, sink.length if sink.start == 0 else 0, 1))
    return column[0, :, 0, 0] if column.numel() else None


def _arrange(logits: Tensor, tag: Tag, product: Product, dim: int) -> tuple[_Arrangement, bool]:
    """Find batch, heads, queries and keys among the axes; also whether the keys are the product's left factor."""
    parts: list[tuple[int, ...]] = []
    axes: list[Axis | None] = []
    keys: list[int] = []
    for i, (size, dim_axes) in enumerate(zip(logits.shape, tag.layout, strict=True)):
        several = len(dim_axes) > 1
        parts.append(tuple(axis.size for axis in dim_axes) if several else (size,))
        found: list[Axis | None] = list(dim_axes) if several else [dim_axes[0] if dim_axes else None]
        if i == dim:
            keys = list(range(len(axes), len(axes) + len(found)))
        axes.extend(found)
    role = next((axis.role for i in keys if (axis := axes[i]) is not None and axis.role is not None), None)
    others = [i for i in range(len(axes)) if i not in keys]
    heads = [i for i in others if any(axes[i] is head for head in product.heads)]
    if role is not None:
        rows = [i for i in others if i not in heads and (axis := axes[i]) is not None and axis.role not in (None, role)]
    else:
        if not heads and len(axes) >= 4:
            heads = others[-2:-1]
        rows = [i for i in others if i not in heads][-1:]
    batch = [i for i in others if i not in rows and i not in heads]
    free = list(product.free.values())
    groups = (
        _ordered(batch, axes, list(product.shared.values())),
        _ordered(heads, axes, [product.heads]),
        _ordered(rows, axes, free),
        _ordered(keys, axes, free),
    )
    return _Arrangement(tuple(parts), groups, tuple(axes)), role == "left"


def _ordered(parts: list[int], axes: Sequence[Axis | None], order: Sequence[Sequence[Axis]]) -> tuple[int, ...]:
    """Return positions in the order in which the product has their axes."""
    places = {id(axis): n for n, axis in enumerate(axis for some in order for axis in some)}
    return tuple(sorted(parts, key=lambda i: places.get(id(axes[i]), -1)))

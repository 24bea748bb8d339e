"""From the arguments of a fused kernel to an `AttentionCall`: axes moved, masks and scales gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.cuts import Cut, local_gradient
from attn_monitor.capture.distributed import local_operands, shard_of_axes, shard_of_cuts
from attn_monitor.capture.layout import Axis, Layout, fresh, sizes
from attn_monitor.capture.products import Number
from attn_monitor.capture.sighting import Sighting, UnmeasurableError
from attn_monitor.capture.tags import Tag, TagStore
from attn_monitor.records import AttentionCall
from attn_monitor.tensor_parallel import is_distributed

POOLED_HEADS = "the heads, if there are several, are folded into the batch and could not be told apart: pooled as one"


def check_measurable(*tensors: Tensor) -> None:
    """Raise `UnmeasurableError` for tensors whose numbers can't be read here."""
    for tensor in tensors:
        if tensor.is_nested:
            raise UnmeasurableError("nested tensors are not measured; pass padded tensors to observe_attention")
        if is_distributed(tensor):
            raise UnmeasurableError(
                "distributed tensors (DTensor) are measured in scaled_dot_product_attention and softmax only; pass "
                "their local parts, x.to_local(), to this function or to observe_attention"
            )
        if tensor.device.type == "meta":
            raise UnmeasurableError("tensors on the meta device hold no numbers")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise UnmeasurableError("attention inside a torch.func transform is not measured")


def _groups(axes: Sequence[Axis], depth: Sequence[Axis]) -> tuple[list[int], list[int]]:
    """Split the axes folded into one leading dimension into positions of batch and of heads."""
    parents = {id(axis.parent) for axis in depth if axis.parent is not None}
    # Without such a kinship nothing tells heads from frames or windows.
    heads = [i for i, axis in enumerate(axes) if axis.parent is not None and id(axis.parent) in parents]
    return [i for i in range(len(axes)) if i not in heads], heads


def from_sdpa(tags: TagStore, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sighting | None:
    """Read a call of `F.scaled_dot_product_attention`; `None` where torch itself will refuse the shapes."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    query, key, value, mask, dropout, causal, scale = (
        fn.argument(args, kwargs, i, name) for i, name in enumerate(names)
    )
    given = query, key, value
    how: tuple[Cut, ...] | None = None
    if any(map(is_distributed, (*given, mask))):
        (query, key, value), mask, how = local_operands(tags, given, mask)
    check_measurable(query, key, value)
    if min(query.dim(), key.dim(), value.dim()) < 2 or query.shape[-1] != key.shape[-1] or not query.shape[-1]:
        return None
    grouped = bool(fn.argument(args, kwargs, 7, "enable_gqa"))
    wide = _widened((query.detach(), key.detach(), value.detach()), grouped=grouped)
    if wide is None:
        return None
    dims = wide[0].dim()
    found = [_layout(tags.get(tensor), tensor, dims) for tensor in (query, key)]
    fold, note = _fold(dims, _of_all(found[0], found[1], wide[0].shape))
    masks: tuple[Tensor, ...] = ()
    if mask is not None:
        shape = (*wide[0].shape[:-1], wide[1].shape[-2])
        whole = dims == 4 and mask.dim() == 4 and mask.shape[-2] == 1  # the same for every query
        masks = (mask.detach() if whole else fold(mask.detach().expand(shape)),)
    keys_fold = fold if dims != 4 else _as_it_is
    folded = fold(wide[0])
    query_scale, key_scale = (
        _scale(tags.get(tensor), layout, folded.shape[1]) for tensor, layout in zip((query, key), found, strict=True)
    )
    call = AttentionCall(
        query=folded,
        key=keys_fold(wide[1]),
        value=keys_fold(wide[2]),
        masks=masks,
        is_causal=bool(causal),
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
        query_scale=query_scale,
        key_scale=key_scale,
        head_dim=query.shape[-1],
        dropout=bool(dropout),
    )
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    kept = mask is None and all(x.grad_fn is not None and x._version == 0 for x in (query, key, value))
    sighting = Sighting(
        call=call, logits=None, canonical=fold, differentiable=differentiable, note=note, path="sdpa", kept=kept
    )
    if how is None:
        shard, placed = shard_of_axes(_head_axes(found[0]), found[0][-1])
        return replace(sighting, shard=shard, placed=placed)
    local = local_gradient(how, (*given[0].shape[:-1], given[2].shape[-1]))
    return replace(sighting, canonical=lambda tensor: fold(local(tensor)), shard=shard_of_cuts(how, 1), placed=True)


def _head_axes(query: Layout) -> Sequence[Axis]:
    if len(query) == 3:
        return [query[0][i] for i in _groups(query[0], query[-1])[1]]
    return query[-3] if len(query) > 3 else ()


def _widened(tensors: tuple[Tensor, Tensor, Tensor], *, grouped: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return query, key and value with the same leading dimensions, as torch broadcasts them; `None` if it won't.

    Grouped keys and values stay as few as they are, as long as there are as many of both.
    """
    dims = max(tensor.dim() for tensor in tensors)
    query, key, value = (x if x.dim() == dims else x.reshape((1,) * (dims - x.dim()) + tuple(x.shape)) for x in tensors)
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return query, key, value
    try:
        if not grouped or dims < 3:
            lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
            shapes = [lead] * 3
        else:
            batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
            groups = math.lcm(key.shape[-3], value.shape[-3])
            if query.shape[-3] % groups:
                return None
            key, value = (x.repeat_interleave(groups // x.shape[-3], dim=-3) for x in (key, value))
            shapes = [(*batch, query.shape[-3]), (*batch, groups), (*batch, groups)]
        query, key, value = (
            x.expand(*shape, *x.shape[-2:]) for x, shape in zip((query, key, value), shapes, strict=True)
        )
    except RuntimeError:
        return None
    return query, key, value


def _layout(tag: Tag | None, tensor: Tensor, dims: int) -> Layout:
    """Return the axes of a tensor with dimensions missing in front."""
    known = tag is not None and len(tag.layout) == tensor.dim()
    layout = tag.layout if tag is not None and known else fresh(tensor.shape)
    return (((),) * (dims - len(layout))) + layout


def _of_all(query: Layout, key: Layout, shape: torch.Size) -> Layout:
    """Return the axes of the queries, those of the keys where the queries were broadcast to them."""
    wide = zip(query, key, sizes(query), shape, strict=True)
    lead = [mine if size == full else other for mine, other, size, full in wide]
    return (*lead[:-2], *query[-2:])


def _scale(tag: Tag | None, layout: Layout, heads: int) -> Number:
    """Return what query or key has been multiplied with, a number or one value for each query head."""
    if tag is None or tag.kind != "activation":
        return 1.0
    scale = tag.scale.of_factor(layout[-3] if len(layout) >= 4 else ())
    if isinstance(scale, Tensor) and scale.numel() > 1 and heads % scale.numel() == 0:
        return scale.repeat_interleave(heads // scale.numel())
    return scale


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _unpack(layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return what gives the heads of a group back that were packed into the queries, for a short query (decoding)."""
    parents = {id(axis.parent) for axis in layout[3] if axis.parent is not None}
    packed = [axis for axis in layout[2] if axis.parent is not None and id(axis.parent) in parents]
    if not packed or layout[2][: len(packed)] != tuple(packed):
        return _as_it_is
    group = math.prod(axis.size for axis in packed)

    def unpack(tensor: Tensor) -> Tensor:
        apart: Tensor = tensor.unflatten(2, (group, -1))
        return apart.flatten(1, 2)

    return unpack


def _fold(dims: int, layout: Layout) -> tuple[Callable[[Tensor], Tensor], str]:
    """Return what brings a tensor with leading dimensions [...] into [B, H, ...], and a note."""
    if dims == 4:
        return _unpack(layout), ""
    if dims > 4:
        return lambda tensor: tensor.flatten(0, -4), ""
    if dims == 2:
        return lambda tensor: tensor[None, None], ""
    batch, heads = _groups(layout[0], layout[-1])
    if not heads:
        return lambda tensor: tensor[:, None], POOLED_HEADS
    lengths = [axis.size for axis in layout[0]]
    count = math.prod(lengths[i] for i in heads)

    def fold(tensor: Tensor) -> Tensor:
        apart: Tensor = tensor.unflatten(0, lengths)
        trailing = range(len(lengths), apart.dim())
        return apart.permute(*batch, *heads, *trailing).reshape(-1, count, *tensor.shape[1:])

    return fold, ""

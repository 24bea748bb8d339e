"""From the arguments of a fused kernel to an `AttentionCall`: axes moved, masks and scales gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, Layout, fresh
from attn_monitor.capture.sighting import Sighting, UnmeasurableError
from attn_monitor.capture.tags import TagStore
from attn_monitor.records import AttentionCall

POOLED_HEADS = "the heads, if there are several, are folded into the batch and could not be told apart: pooled as one"


def check_measurable(*tensors: Tensor) -> None:
    """Raise `UnmeasurableError` for tensors whose numbers can't be read here."""
    for tensor in tensors:
        if tensor.is_nested:
            raise UnmeasurableError("nested tensors are not measured; pass padded tensors to observe_attention")
        if type(tensor).__name__ == "DTensor":
            raise UnmeasurableError("distributed tensors are not measured")
        if tensor.device.type == "meta":
            raise UnmeasurableError("tensors on the meta device hold no numbers")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise UnmeasurableError("attention inside a torch.func transform is not measured")


def _groups(axes: Sequence[Axis], depth: Sequence[Axis]) -> tuple[list[int], list[int]]:
    """Split the axes folded into one leading dimension into positions of batch and of heads."""
    parents = {id(axis.parent) for axis in depth if axis.parent is not None}
    heads = [i for i, axis in enumerate(axes) if axis.parent is not None and id(axis.parent) in parents]
    if not heads and len(axes) > 1:
        heads = [len(axes) - 1]
    return [i for i in range(len(axes)) if i not in heads], heads


def from_sdpa(tags: TagStore, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sighting | None:
    """Read a call of `F.scaled_dot_product_attention`; `None` where torch itself will refuse the shapes."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    query, key, value, mask, dropout, causal, scale = (
        fn.argument(args, kwargs, i, name) for i, name in enumerate(names)
    )
    check_measurable(query, key, value)
    if query.dim() != key.dim() or query.dim() < 2 or query.shape[-1] != key.shape[-1] or not query.shape[-1]:
        return None
    found = (tags.get(query), tags.get(key))
    layout = found[0].layout if found[0] is not None and len(found[0].layout) == query.dim() else fresh(query.shape)
    fold, note = _fold(query.dim(), layout)
    head_axes = layout[-3] if query.dim() >= 4 else ()
    scales = [tag.scale.per_head(head_axes) if tag is not None and tag.kind == "activation" else 1.0 for tag in found]
    masks: tuple[Tensor, ...] = ()
    if mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        whole = query.dim() == 4 and mask.dim() == 4 and mask.shape[-2] == 1  # the same for every query
        masks = (mask.detach() if whole else fold(mask.detach().expand(shape)),)
    keys_fold = fold if query.dim() != 4 else _as_it_is
    call = AttentionCall(
        query=fold(query.detach()),
        key=keys_fold(key.detach()),
        value=keys_fold(value.detach()),
        masks=masks,
        is_causal=bool(causal),
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
        query_scale=scales[0],
        key_scale=scales[1],
        head_dim=query.shape[-1],
        dropout=bool(dropout),
    )
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return Sighting(call=call, logits=None, canonical=fold, differentiable=differentiable, note=note, path="sdpa")


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

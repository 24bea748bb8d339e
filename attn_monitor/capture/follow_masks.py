"""Rules for masks that fill blocked scores with a value."""

from __future__ import annotations

import math
from dataclasses import replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import dimension, fresh, proxy
from attn_monitor.capture.tags import Step, Tag, TagStore, kept
from attn_monitor.masking import FILL


def masked_fill(tags: TagStore, step: Step) -> None:
    """Follow ``scores.masked_fill(blocked, value)``."""
    if (tag := tags.get(step.args[0])) is not None:
        _fill(tags, tag, step.args[0], step.argument(1, "mask"), step.argument(2, "value"), step.out)


def where(tags: TagStore, step: Step) -> None:
    """Follow ``torch.where(allowed, scores, value)``, and as a method of the scores."""
    condition, chosen, other = (
        step.argument(0, "condition"),
        step.argument(1, "input", "self"),
        step.argument(2, "other"),
    )
    if not isinstance(condition, Tensor):
        return
    if condition.dtype not in (torch.bool, torch.uint8):  # scores.where(allowed, value)
        condition, chosen = step.argument(1, "condition"), condition
    found = tags.operand((chosen, other), step.out) if isinstance(step.out, Tensor) else None
    if found is not None and isinstance(condition, Tensor):
        index, tag = found
        blocked = ~condition.bool() if index == 0 else condition.bool()
        _fill(tags, tag, (chosen, other)[index], blocked, (other, chosen)[index], step.out)


def _fill(tags: TagStore, tag: Tag, source: Tensor, blocked: Tensor, value: Any, out: Tensor) -> None:
    layout = kept(tag, source, out)
    if tag.kind != "scores" or source.shape != out.shape:
        tags.carry(tag, out, layout, masks=())
    elif isinstance(value, Tensor) or value >= -FILL:
        # Whether the value is a mask's is decided with the numbers, without waiting for the device here; one that is
        # large is if the scores are negated yet (softmin).
        value = value.detach().to(torch.float32) if isinstance(value, Tensor) else value
        mask = torch.where(blocked, value, 0.0)
        tags.carry(tag, out, layout, masks=(*tag.masks, mask), plain=False)
    elif value <= FILL:
        tags.carry(tag, out, layout, masks=(*tag.masks, ~blocked))
    else:
        tags.carry(tag, out, layout, plain=False)


def set_item(tags: TagStore, step: Step) -> None:
    """Follow ``scores[blocked] = value``."""
    target, index, value = step.args
    written = tags.get(value)
    if (tag := tags.get(target)) is None:
        tags.written(target)
        if written is not None and written.kind == "scores" and not written.projection:
            _write(tags, written, value, target, index)
        return
    if tag.kind == "scores":
        blocked = _indexed(index, target.dim()) if not isinstance(value, Tensor) and value <= FILL else None
        masks = tag.masks if blocked is None else (*tag.masks, ~blocked)
        tags.put(target, tag._replace(masks=masks, plain=tag.plain and blocked is not None))
    else:
        tags.put(target, tag._replace(factors=None))
        tags.written(target)


def _write(tags: TagStore, tag: Tag, value: Tensor, target: Tensor, index: Any) -> None:
    """Follow scores that are written into a part of a larger tensor, as in banded attention."""
    layout = fresh(target.shape)
    if not fn.tensors(fn.flat([index])):
        part = proxy(target.shape)[index]
        for axes, stride in zip(reversed(tag.layout), reversed(part.stride()), strict=False):
            dim = dimension(stride, target.dim())
            if dim is not None and len(axes) == 1:
                layout = (*layout[:dim], (axes[0].resized(target.shape[dim]),), *layout[dim + 1 :])
            elif dim is not None and math.prod(axis.size for axis in axes) == target.shape[dim]:
                layout = (*layout[:dim], axes, *layout[dim + 1 :])
    product = replace(tag.product, left=None, right=None) if tag.product is not None else None
    tags.carry(tag, target, layout, product=product, masks=(), shift=None, sink=None, plain=False)


def _indexed(index: Any, dims: int) -> Tensor | None:
    """Return the entries that a bool index names, broadcastable to a tensor with `dims` dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    masks = [i for i, item in enumerate(items) if isinstance(item, Tensor)]
    rest = [item for item in items if not isinstance(item, Tensor)]
    if len(masks) != 1 or items[masks[0]].dtype is not torch.bool:
        return None
    if any(not isinstance(item, EllipsisType) and item != slice(None) for item in rest):
        return None
    mask: Tensor = items[masks[0]]
    after_ellipsis = any(isinstance(item, EllipsisType) for item in items[: masks[0]])
    trailing = len(items) - masks[0] - 1 if after_ellipsis else dims - mask.dim() - masks[0]
    return mask.reshape(mask.shape + (1,) * trailing)

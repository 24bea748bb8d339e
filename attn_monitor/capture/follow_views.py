"""Rules for what leaves a tensor what it is: views, reshapes, casts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, fresh, moved, proxy
from attn_monitor.capture.tags import Step, TagStore, kept


def same(tags: TagStore, step: Step) -> None:
    """Follow a function that keeps the shape and the meaning."""
    if (found := tags.operand(step.args[:2], step.out)) is not None:
        index, tag = found
        tags.carry(tag, step.out, kept(tag, step.args[index], step.out))


def reshape(tags: TagStore, step: Step) -> None:
    """Follow a reshape: axes are split and merged."""
    source, out = step.args[0], step.out
    tag = tags.get_or_new(source)
    masks = tuple(mask.expand(source.shape).reshape(out.shape) for mask in tag.masks)
    shift = tag.shift.expand(source.shape).reshape(out.shape) if tag.shift is not None else None
    tags.carry(tag, out, masks=masks, shift=shift)


def view(tags: TagStore, step: Step) -> None:
    """Follow a function that moves or cuts axes, by running it on a proxy too."""
    source, rest = step.args[0], step.args[1:]
    tag = tags.get_or_new(source)

    def run(tensor: Tensor) -> list[Tensor]:
        result = step.function(tensor, *rest, **step.kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    shifts: Sequence[Tensor | None]
    outs = [step.out] if isinstance(step.out, Tensor) else list(step.out)
    if step.function in fn.INDEXING and fn.tensors(fn.flat(rest)):
        layouts = [fresh(out.shape) for out in outs]
    else:
        layouts = [moved(tag.layout, part) for part in run(proxy(source.shape))]
    masks = [run(mask.expand(source.shape)) for mask in tag.masks]
    shifts = run(tag.shift.expand(source.shape)) if tag.shift is not None else [None] * len(outs)
    for i, (out, layout) in enumerate(zip(outs, layouts, strict=True)):
        tags.carry(tag, out, layout, masks=tuple(parts[i] for parts in masks), shift=shifts[i])


def rearrange(tags: TagStore, step: Step) -> None:
    """Follow a function that takes entries in another order: the axes are the same, masks no longer fit."""
    source, out = step.args[0], step.out
    if (tag := tags.get(source)) is None:
        return
    if source.dim() != out.dim():
        tags.put(out, None)
        return
    layout = tuple(
        axes if size == kept_size else (Axis(size),)
        for axes, kept_size, size in zip(tag.layout, source.shape, out.shape, strict=True)
    )
    tags.carry(tag, out, layout, masks=(), shift=None, sink=None, plain=tag.plain and tag.kind != "scores")


def as_strided(tags: TagStore, step: Step) -> None:
    """Follow a view by strides, as in overlapping windows: a dimension with size and stride of an old one is that."""
    source, out = step.args[0], step.out
    if (tag := tags.get(source)) is None:
        return
    known = {
        (size, stride): axes
        for size, stride, axes in zip(source.shape, source.stride(), tag.layout, strict=True)
        if size != 1
    }
    layout = tuple(
        known.get((size, stride), (Axis(size),)) for size, stride in zip(out.shape, out.stride(), strict=True)
    )
    tags.carry(tag, out, layout, masks=(), shift=None, sink=None, plain=False)

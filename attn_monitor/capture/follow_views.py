"""Rules for what leaves a tensor what it is: views, reshapes, casts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, Layout, fresh, moved, proxy, resized, sizes
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
    if not tag.masks and tag.shift is None:
        tags.carry(tag, out)
        return
    masks = tuple(mask.expand(source.shape).reshape(out.shape) for mask in tag.masks)
    shift = tag.shift.expand(source.shape).reshape(out.shape) if tag.shift is not None else None
    tags.carry(tag, out, masks=masks, shift=shift)


def view(tags: TagStore, step: Step) -> None:
    """Follow a function that moves or cuts axes, by running it on a proxy too."""
    source, rest = step.args[0], step.args[1:]
    if (tag := tags.get(source)) is None:
        return
    # What was changed in place has its new shape already; its axes tell the old one.
    shape = sizes(tag.layout) if step.function in fn.VIEW_IN_PLACE else tuple(source.shape)

    def run(tensor: Tensor) -> list[Tensor]:
        result = step.call(tensor, *rest, **step.kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    shifts: Sequence[Tensor | None]
    outs = [step.out] if isinstance(step.out, Tensor) else list(step.out)
    if step.function in fn.INDEXING and fn.tensors(fn.flat(rest)):
        layouts = [fresh(out.shape) for out in outs]
    else:
        layouts = _moved_quickly(step, tag.layout, outs) or [moved(tag.layout, part) for part in run(proxy(shape))]
    if not tag.masks and tag.shift is None:
        for out, layout in zip(outs, layouts, strict=True):
            tags.carry(tag, out, layout)
        return
    masks = [run(mask.expand(shape)) for mask in tag.masks if _expands(mask, shape)]
    shifts = run(tag.shift.expand(shape)) if tag.shift is not None else [None] * len(outs)
    for i, (out, layout) in enumerate(zip(outs, layouts, strict=True)):
        tags.carry(tag, out, layout, masks=tuple(parts[i] for parts in masks), shift=shifts[i])


def _expands(mask: Tensor, shape: Sequence[int]) -> bool:
    """Tell whether a mask fits: one that was carried along from scores to what is none any more need not."""
    sizes = list(zip(reversed(mask.shape), reversed(shape), strict=False))
    return mask.dim() <= len(shape) and all(size in {1, whole} for size, whole in sizes)


def _moved_quickly(step: Step, layout: Layout, outs: list[Tensor]) -> list[Layout] | None:
    """Return the layouts after the most frequent views without running them again; `None` for all others."""
    function, given = step.function, step.args[1:]
    if function in fn.CUT and all(out.dim() == len(layout) for out in outs):
        return [resized(layout, out.shape) for out in outs]
    if step.kwargs or not given:
        return None
    if function in fn.SLICE:
        items = given[0] if isinstance(given[0], tuple) else given
        return [resized(layout, outs[0].shape)] if all(type(item) is slice for item in items) else None
    if function in fn.SWAP:
        one, other = given
        dims = list(layout)
        dims[one], dims[other] = dims[other], dims[one]
        return [tuple(dims)]
    if function in fn.PERMUTE:
        return [tuple(layout[dim] for dim in (given[0] if len(given) == 1 else given))]
    if function in fn.UNSQUEEZE:
        at = given[0] % (len(layout) + 1)
        return [(*layout[:at], (), *layout[at:])]
    return None


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

"""Rules for what puts entries elsewhere: sorting, picking, scattering. Axes stay, keys no longer meet their scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture.layout import resized
from attn_monitor.capture.tags import Step, Tag, TagStore, without_factors
from attn_monitor.masking import FILL


def rearrange(tags: TagStore, step: Step) -> None:
    """Follow a function that takes entries in another order."""
    source, out = step.args[0], step.out
    if (tag := tags.get(source)) is None:
        return
    if source.dim() != out.dim():
        tags.put(out, None)
        return
    _reordered(tags, tag, source, out, lambda tensor: step.call(tensor, *step.args[1:], **step.kwargs))


def select_largest(tags: TagStore, step: Step) -> None:
    """Follow the largest scores of each row, and scores that were sorted."""
    source, (values, indices) = step.args[0], step.out
    tag = tags.get(source)
    if tag is None or tag.kind != "scores" or not source.dim():
        return
    dim = step.kwargs.get("dim", step.args[-1] if len(step.args) > 1 and step.args[-1] in _dims(step) else -1)
    _reordered(tags, tag, source, values, lambda tensor: tensor.gather(dim, indices))


def _dims(step: Step) -> tuple[int, ...]:
    """Return the argument at the place where a dimension may be given: behind k in topk, first in sort."""
    position = 2 if getattr(step.function, "__name__", "") == "topk" else 1
    return step.args[position : position + 1]


def _reordered(tags: TagStore, tag: Tag, source: Tensor, out: Tensor, run: Callable[[Tensor], Tensor]) -> None:
    layout = resized(tag.layout, out.shape)
    if tag.kind != "scores":
        tags.carry(tag, out, layout, masks=(), shift=None, sink=None)
        return
    masks = tuple(run(mask.expand(source.shape)) for mask in tag.masks)
    shift = run(tag.shift.expand(source.shape)) if tag.shift is not None else None
    tags.carry(without_factors(tag), out, layout, masks=masks, shift=shift, sink=None, plain=False)


def scatter(tags: TagStore, step: Step) -> None:
    """Follow scores that are written into places of another tensor, and values written into places of scores."""
    target, out = step.args[0], step.out
    dim, index, written = step.argument(1, "dim"), step.argument(2, "index"), step.argument(3, "src", "value")
    tag, source = tags.get(target), tags.get(written)
    scores = tag is not None and tag.kind == "scores" and not tag.projection
    if source is not None and source.kind == "scores" and not source.projection and not scores:
        _scatter_scores(tags, source, written, out, dim, index)
    elif tag is not None and scores and not step.kwargs.get("reduce"):
        _fill_places(tags, tag, out, written, lambda mask: mask.scatter(dim, index, True))
    elif out in tags:
        tags.put(out, None)


def _scatter_scores(tags: TagStore, tag: Tag, scores: Tensor, out: Tensor, dim: int, index: Tensor) -> None:
    # What is left of the tensor they were written into is a mask's if it is low enough, as -inf around the largest.
    around = out.detach().scatter(dim, index, 0.0)
    masks = [around]
    for mask in tag.masks:
        passing: Any = torch.ones_like if mask.dtype == torch.bool else torch.zeros_like
        masks.append(passing(around, dtype=mask.dtype).scatter(dim, index, mask.expand(scores.shape)))
    tags.carry(
        without_factors(tag),
        out,
        resized(tag.layout, out.shape),
        masks=tuple(masks),
        shift=None,
        sink=None,
        plain=False,
    )


def index_fill(tags: TagStore, step: Step) -> None:
    """Follow scores of which whole rows or columns are filled."""
    if (tag := tags.get(step.args[0])) is not None:
        dim, index, value = step.argument(1, "dim"), step.argument(2, "index"), step.argument(3, "value")
        _fill_places(tags, tag, step.out, value, lambda mask: mask.index_fill(dim, index, True))


def _fill_places(tags: TagStore, tag: Tag, out: Tensor, value: Any, mark: Callable[[Tensor], Tensor]) -> None:
    if tag.kind != "scores":
        tags.carry(tag, out, tag.layout)
    elif isinstance(value, (int, float)) and value <= FILL:
        blocked = mark(torch.zeros(out.shape, dtype=torch.bool, device=out.device))
        tags.carry(tag, out, tag.layout, masks=(*tag.masks, ~blocked))
    else:
        tags.carry(tag, out, tag.layout, plain=False)

"""Rules for what makes a tensor longer: concatenation, padding, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture.layout import Axis, Layout, extended
from attn_monitor.capture.products import Scale
from attn_monitor.capture.tags import BLOCKED, SinkColumn, Step, Tag, TagStore


def concatenate(tags: TagStore, step: Step) -> None:
    """Follow a concatenation, as in rotary embeddings and learned sinks."""
    pieces, out = step.argument(0, "tensors"), step.out
    dim = step.argument(1, "dim", "axis", default=0) % out.dim()
    given = [tags.get(piece) for piece in pieces]
    known = [tag for tag in given if tag is not None]
    if not known:
        return
    first = next((tag for tag in known if tag.kind not in ("activation", "weight")), known[0])
    if first.kind == "weight" and any(tag is None or tag.kind != "weight" for tag in given):
        first = next((tag for tag in known if tag.kind != "weight"), Tag("activation", first.layout))
    if first.kind == "scores" and _is_sink(pieces, given, first, dim):
        start = 0 if given[0] is first else pieces[0].shape[dim]
        with_sink(tags, first, out, dim, start, out.shape[dim] - 1)
        return
    scores = first.kind == "scores"
    same_scale = all(tag is not None and tag.scale.same(first.scale) for tag in given)
    scale = first.scale if scores or same_scale else Scale()
    product = replace(first.product, left=None, right=None) if scores and first.product is not None else first.product
    # The masks of the other pieces are unknown; what they were filled with is still seen in the logits.
    layout = extended(first.layout, dim, out.shape[dim])
    tags.carry(
        first,
        out,
        layout,
        scale=scale,
        product=product,
        masks=(),
        shift=None,
        sink=None,
        plain=first.plain and not scores,
    )


def stack(tags: TagStore, step: Step) -> None:
    """Follow a concatenation along a new dimension."""
    pieces, out = step.argument(0, "tensors"), step.out
    dim = step.argument(1, "dim", default=0) % out.dim()
    given = [tags.get(piece) for piece in pieces]
    first = given[0]
    if first is None or any(tag is None or tag.kind != first.kind for tag in given):
        tags.put(out, None)
        return
    same_scale = all(tag is not None and tag.scale.same(first.scale) for tag in given)
    product = replace(first.product, left=None, right=None) if first.product is not None else None
    layout = (*first.layout[:dim], (Axis(len(pieces)),), *first.layout[dim:])
    tags.carry(
        first,
        out,
        layout,
        scale=first.scale if same_scale else Scale(),
        product=product,
        masks=(),
        shift=None,
        sink=None,
        plain=first.plain and first.kind != "scores",
    )


def _is_sink(pieces: Sequence[Tensor], given: Sequence[Tag | None], scores: Tag, dim: int) -> bool:
    """Tell whether what is put beside scores is one column that is no score and the same for every row of a head."""
    if len(pieces) != 2 or scores.projection or scores.sink is not None:
        return False
    other = pieces[1 if given[0] is scores else 0]
    tag = given[1 if given[0] is scores else 0]
    if other.shape[dim] != 1 or (tag is not None and tag.kind == "scores" and not tag.projection):
        return False
    wide = [i for i, size in enumerate(other.shape) if size != 1 and other.stride(i) != 0]
    heads = scores.product.heads if scores.product is not None else ()
    return all(any(axis is head for axis in scores.layout[i] for head in heads) for i in wide)


def with_sink(tags: TagStore, scores: Tag, out: Tensor, dim: int, start: int, length: int) -> None:
    """Tag scores that a sink was put beside."""
    layout = extended(scores.layout, dim, out.shape[dim])
    masks = tuple(_lengthened(mask, out.dim() - dim, out.shape[dim], start) for mask in scores.masks)
    tags.carry(scores, out, layout, masks=masks, sink=SinkColumn(layout[dim][0], start, length))


def _lengthened(mask: Tensor, position: int, length: int, start: int) -> Tensor:
    """Return a mask that lets a new column pass; `position` counts the dimension from the end."""
    if mask.dim() < position or mask.shape[-position] == 1:
        return mask
    missing = list(mask.shape)
    missing[-position] = length - missing[-position]
    column = torch.ones if mask.dtype == torch.bool else torch.zeros
    new = column(missing, dtype=mask.dtype, device=mask.device)
    return torch.cat([new, mask] if start else [mask, new], dim=-position)


def pad(tags: TagStore, step: Step) -> None:
    """Follow a padding; one constant column beside scores is a sink (softmax with one added to its denominator)."""
    source, out = step.args[0], step.out
    if (tag := tags.get(source)) is None:
        return
    widths: Sequence[int] = step.argument(1, "pad")
    wide = {source.dim() - 1 - i // 2: (widths[i], widths[i + 1]) for i in range(0, len(widths), 2)}
    wide = {dim: width for dim, width in wide.items() if width != (0, 0)}
    value = step.argument(3, "value") or 0.0
    constant = step.argument(2, "mode", default="constant") == "constant" and value > BLOCKED
    if tag.kind == "scores" and constant and len(wide) == 1 and tag.sink is None and not tag.projection:
        (dim, (before, after)) = next(iter(wide.items()))
        if (before, after) in ((1, 0), (0, 1)):
            with_sink(tags, tag, out, dim, before, source.shape[dim])
            return
    masks: tuple[Tensor, ...] = ()
    if len(wide) == 1:
        (dim, (before, after)) = next(iter(wide.items()))
        if not (before and after):
            masks = tuple(_lengthened(mask, out.dim() - dim, out.shape[dim], before) for mask in tag.masks)
    layout = tag.layout
    for dim in wide:
        layout = extended(layout, dim, out.shape[dim])
    tags.carry(tag, out, layout, masks=masks, shift=None, sink=None, plain=tag.plain and tag.kind != "scores")


def repeat(tags: TagStore, step: Step) -> None:
    """Follow a repetition of the whole: the copies are the outer axis."""
    source, rest = step.args[0], step.args[1:] or tuple(step.kwargs.values())
    counts: Sequence[Any] = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    missing = step.out.dim() - len(counts)  # tile repeats the last dimensions
    _repeated(tags, source, step.out, [*[1] * missing, *counts], inner=False)


def repeat_interleave(tags: TagStore, step: Step) -> None:
    """Follow a repetition of each entry: the copies are the inner axis."""
    source, count, dim = step.args[0], step.argument(1, "repeats"), step.argument(2, "dim")
    if isinstance(count, int) and dim is not None:
        counts = [1] * source.dim()
        counts[dim] = count
        _repeated(tags, source, step.out, counts, inner=True)
    else:
        tags.put(step.out, None)


def _repeated(tags: TagStore, source: Tensor, out: Tensor, counts: Sequence[int], *, inner: bool) -> None:
    if (tag := tags.get(source)) is None:
        return
    added: Layout = ((),) * (out.dim() - source.dim())
    layout: list[tuple[Axis, ...]] = []
    for axes, count in zip((*added, *tag.layout), counts, strict=True):
        copies = (Axis(count),) if count != 1 else ()
        old = tuple(axis for axis in axes if axis.size != 1) if copies else axes
        layout.append((*old, *copies) if inner else (*copies, *old))
    tags.carry(tag, out, tuple(layout), masks=(), shift=None, sink=None, plain=tag.plain and tag.kind != "scores")

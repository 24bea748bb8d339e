"""Rules for what leaves a tensor what it is: views, reshapes, casts, concatenation."""

from __future__ import annotations

from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, fresh, moved, proxy
from attn_monitor.capture.products import Scale
from attn_monitor.capture.tags import Step, Tag, TagStore, kept


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
    tags.carry(tag, out, masks=masks)


def view(tags: TagStore, step: Step) -> None:
    """Follow a function that moves or cuts axes, by running it on a proxy too."""
    source, rest = step.args[0], step.args[1:]
    tag = tags.get_or_new(source)

    def run(tensor: Tensor) -> list[Tensor]:
        result = step.function(tensor, *rest, **step.kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    outs = [step.out] if isinstance(step.out, Tensor) else list(step.out)
    if step.function in fn.INDEXING and fn.tensors(fn.flat(rest)):
        layouts = [fresh(out.shape) for out in outs]
    else:
        layouts = [moved(tag.layout, part) for part in run(proxy(source.shape))]
    masks = [run(mask.expand(source.shape)) for mask in tag.masks]
    for i, (out, layout) in enumerate(zip(outs, layouts, strict=True)):
        tags.carry(tag, out, layout, masks=tuple(parts[i] for parts in masks))


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
    layout = list(first.layout)
    length = out.shape[dim]
    layout[dim] = (layout[dim][0].resized(length) if len(layout[dim]) == 1 else Axis(length),)
    scores = first.kind == "scores"
    same_scale = all(tag is not None and tag.scale.same(first.scale) for tag in given)
    scale = first.scale if scores or same_scale else Scale()
    # The masks of the other pieces are unknown; what they were filled with is still seen in the logits.
    tags.carry(first, out, tuple(layout), scale=scale, masks=(), plain=first.plain and not scores)

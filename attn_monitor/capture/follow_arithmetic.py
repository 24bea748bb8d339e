"""Rules for multiplication and addition: scales, gains, biases, softcaps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_monitor.capture.layout import fresh
from attn_monitor.capture.products import Scale
from attn_monitor.capture.tags import Step, Tag, TagStore, kept

UNNORMALISED = (
    "its scores q.k weigh values without a softmax that can be seen (sigmoid, relu, or exp and sum by hand); "
    "if it is a softmax, call observe_logits on the scores"
)


def multiply(tags: TagStore, step: Step) -> None:
    """Follow a multiplication by a scale, a gain or a mask of zeros and ones."""
    pair = (step.args[0], step.argument(1, "other"))
    found = tags.operand(pair, step.out)
    if found is None:
        # Of two unknown tensors the one that is not broadcast is the activation, the other its scale.
        index = next((i for i, x in enumerate(pair) if isinstance(x, Tensor) and x.shape == step.out.shape), None)
        if index is None:
            return
        found = index, tags.get_or_new(pair[index])
    index, tag = found
    _scale(tags, tag, pair[index], pair[1 - index], step.out, invert=False)


def divide(tags: TagStore, step: Step) -> None:
    """Follow a division by a scale or a normaliser."""
    numerator, divisor = step.args[0], step.argument(1, "other")
    if isinstance(numerator, Tensor):
        _scale(tags, tags.get_or_new(numerator), numerator, divisor, step.out, invert=True)


def _scale(tags: TagStore, tag: Tag, source: Tensor, other: Any, out: Tensor, *, invert: bool) -> None:
    if tag.kind == "weight" and isinstance(other, Tensor):
        other_tag = tags.get(other)
        if other_tag is None or other_tag.kind != "weight":
            tag = Tag("activation", tag.layout)
    scale, gain = _factor(other, source, tag, invert=invert)
    plain = tag.plain and (scale is not None or tag.kind != "scores")
    if scale is None and tag.kind == "activation" and gain is not None and gain.shape[-1:] != source.shape[-1:]:
        scale = Scale()  # a normaliser per row undoes whatever multiplied the row before
    changes = {"scale": scale or tag.scale, "plain": plain}
    if tag.shift is not None:
        known = not isinstance(other, Tensor) or other.numel() == 1
        shift = (tag.shift / other if invert else tag.shift * other) if known else None
        changes |= {"shift": shift, "sink": tag.sink if known else None}
    tags.carry(tag, out, kept(tag, source, out), **changes)


def _factor(other: Any, source: Tensor, tag: Tag, *, invert: bool) -> tuple[Scale | None, Tensor | None]:
    """Return the scale after multiplying with `other`, or `None` and the tensor that is no scale but a gain."""
    if not isinstance(other, Tensor):
        if invert and not other:
            return None, None
        return tag.scale.times(1.0 / other if invert else other), None
    value = other.detach()
    if value.numel() == 1:
        value = value.reshape(())
        return tag.scale.times(1.0 / value if invert else value), None
    wide = [i for i, size in enumerate(value.shape) if size != 1]
    dim = wide[0] - value.dim() + source.dim() if len(wide) == 1 else -1
    if 0 <= dim < source.dim() - 1 and len(tag.layout[dim]) == 1 and tag.layout[dim][0].role is None:
        vector = value.reshape(-1)
        return tag.scale.times(axis=tag.layout[dim][0], vector=1.0 / vector if invert else vector), value
    return None, value


def negate(tags: TagStore, step: Step) -> None:
    """Follow a change of sign: of scores a part of the scale, of half a query (rotary embedding) not."""
    if (tag := tags.get(step.args[0])) is not None:
        scale = tag.scale.times(-1.0) if tag.kind == "scores" else tag.scale
        tags.carry(tag, step.out, tag.layout, scale=scale or tag.scale)


def add(tags: TagStore, step: Step) -> None:
    """Follow an addition of a bias or a mask."""
    _sum(tags, step, sign=1.0)


def subtract(tags: TagStore, step: Step) -> None:
    """Follow a subtraction of a bias or a mask."""
    _sum(tags, step, sign=-1.0)


def reverse_subtract(tags: TagStore, step: Step) -> None:
    """Follow ``number - tensor``: a shift of what is negated."""
    negate(tags, step)


def _sum(tags: TagStore, step: Step, *, sign: float) -> None:
    pair, out = (step.args[0], step.argument(1, "other")), step.out
    found = tags.operand(pair, out)
    if found is None:
        return
    index, tag = found
    source, other = pair[index], pair[1 - index]
    layout = kept(tag, source, out)
    if tag.kind == "scores":
        row = tags.get(other)
        if row is not None and row.kind == "largest" and index == 0 and sign < 0 and source.shape == out.shape:
            shift = other.detach() if tag.shift is None else tag.shift + other.detach()
            tags.carry(tag, out, layout, shift=shift)
            return
        negated = index == 1 and sign < 0  # mask - scores
        masks, plain = tag.masks if source.shape == out.shape else (), tag.plain
        if isinstance(other, Tensor):
            plain = False
            if may_mask(tags, other) and step.kwargs.get("alpha", 1) == 1:
                masks = (*masks, -other.detach() if sign < 0 and index == 0 else other.detach())
        scale = (tag.scale.times(-1.0) if negated else None) or tag.scale
        tags.carry(tag, out, layout, masks=masks, plain=plain, scale=scale)
        return
    other_tag = tags.get(other)
    if tag.kind == "weight" and isinstance(other, Tensor) and (other_tag is None or other_tag.kind != "weight"):
        tag = Tag("activation", tag.layout)
    keep = not isinstance(other, Tensor) or (other_tag is not None and other_tag.scale.same(tag.scale))
    tags.carry(tag, out, layout, scale=tag.scale if keep else Scale())


def may_mask(tags: TagStore, tensor: Tensor) -> bool:
    """Tell whether something added may hold a mask, alone or beside a learned bias: it is not made of scores itself."""
    tag = tags.get(tensor)
    return tensor.is_floating_point() and (tag is None or tag.kind != "scores")


def largest(tags: TagStore, step: Step) -> None:
    """Follow the larger of two tensors, and the largest of each row, which may be subtracted before the softmax."""
    if isinstance(step.argument(1, "other"), Tensor):
        _either(tags, step)
        return
    tag = tags.get(step.args[0])
    values = step.out if isinstance(step.out, Tensor) else step.out[0]
    if tag is not None and tag.kind == "scores" and not tag.projection:
        tags.put(values, Tag("largest", fresh(values.shape)))
    else:
        tags.put(values, None)


def smallest(tags: TagStore, step: Step) -> None:
    """Follow the smaller of two tensors."""
    if isinstance(step.argument(1, "other"), Tensor):
        _either(tags, step)
    elif isinstance(step.out, Tensor):
        tags.put(step.out, None)


def _either(tags: TagStore, step: Step) -> None:
    pair = (step.args[0], step.argument(1, "other"))
    if (found := tags.operand(pair, step.out)) is not None:
        index, tag = found
        tags.carry(tag, step.out, kept(tag, pair[index], step.out))


def tanh(tags: TagStore, step: Step) -> None:
    """Follow a softcap: divided by the cap before, multiplied after, so that the scale at small logits comes out."""
    tag = tags.get(step.args[0])
    if tag is not None and tag.kind == "scores":
        tags.carry(tag, step.out, tag.layout, plain=False)
    else:
        tags.put(step.out, None)


def no_softmax(tags: TagStore, step: Step) -> None:
    """Note scores that go through something else than a softmax, to report them if they go on to weigh values."""
    tag = tags.get(step.args[0]) if step.args else None
    if tag is not None and tag.kind in ("scores", "unnormalised") and not tag.projection:
        tags.put(step.out, tag._replace(kind="unnormalised"))
    else:
        tags.put(step.out, None)

"""Rules for multiplication and functions of one tensor: scales, gains, softcaps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, fresh
from attn_monitor.capture.outer_products import broadcast_factors, is_outer
from attn_monitor.capture.products import Number, Scale
from attn_monitor.capture.tags import BLOCKED, Step, Tag, TagStore, kept, without_factors
from attn_monitor.masking import hardened

UNNORMALISED = (
    "its scores q.k weigh values without a softmax that can be seen (sigmoid, relu, or exp and sum by hand); "
    "if it is a softmax, call observe_logits on the scores"
)


def multiply(tags: TagStore, step: Step) -> None:
    """Follow a multiplication by a scale, a gain or a mask of zeros and ones."""
    pair, out = (step.args[0], step.argument(1, "other")), step.out
    if is_outer(tags, pair, out):
        tags.put(out, Tag("outer", fresh(out.shape), factors=(pair[0], pair[1])))
        return
    factors = broadcast_factors(tags, pair, out)
    found = tags.operand(pair, out)
    if found is None:
        # Of two unknown tensors the one that is not broadcast is the activation, the other its scale.
        whole = [isinstance(x, Tensor) and x.shape == out.shape for x in pair]
        if all(whole) or not any(whole):
            return
        index = whole.index(True)
        found = index, tags.get_or_new(pair[index])
    index, tag = found
    after = scaled(tags, tag, pair[index], pair[1 - index], invert=False)
    _put_scaled(tags, after, pair[index], pair[1 - index], out)
    if factors is not None and (made := tags.get(out)) is not None:
        tags.put(out, made._replace(factors=factors, since=Scale()))


def divide(tags: TagStore, step: Step) -> None:
    """Follow a division by a scale or a normaliser."""
    numerator, divisor = step.args[0], step.argument(1, "other")
    if isinstance(numerator, Tensor):
        tag = tags.get_or_new(numerator)
        after = scaled(tags, tag, numerator, divisor, invert=True)
        _put_scaled(tags, after, numerator, divisor, step.out)


def _put_scaled(tags: TagStore, after: Tag, source: Tensor, other: Any, out: Tensor) -> None:
    entries = after.factors is not None and source.shape == out.shape
    if entries and (after.scale.known if after.kind == "outer" else number(other) is not None):
        tags.put(out, after)
    else:
        tags.carry(after, out, kept(after, source, out))


def scaled(tags: TagStore, tag: Tag, source: Tensor, other: Any, *, invert: bool) -> Tag:
    """Return the tag after a multiplication with, or division by, `other`."""
    if tag.kind == "weight" and isinstance(other, Tensor):
        other_tag = tags.get(other)
        if other_tag is None or other_tag.kind != "weight":
            tag = Tag("activation", tag.layout)
    if (single := number(other)) is not None:
        return by_number(tag, single, invert=invert)
    value = other.detach() if isinstance(other, Tensor) else None
    changes: dict[str, Any] = {"masks": _lasting(tag.masks)}
    axis = _axis_of(value, source, tag) if value is not None else None
    if value is not None and axis is not None:
        vector = 1.0 / value if invert else value
        shift = None if tag.shift is None else tag.shift * vector
        return tag._replace(scale=tag.scale.times(axis=axis, vector=vector.reshape(-1)), shift=shift, **changes)
    if tag.shift is not None:  # rows were multiplied by what varies, which a softmax does notice
        changes |= {"shift": None, "sink": None}
    if tag.kind in ("scores", "outer") and not tag.projection:
        scale = tag.scale
        if value is None or tag.kind == "outer":
            scale = scale._replace(known=False)
        elif value.dtype is not torch.bool:
            scale = scale._replace(doubt=scale.doubt * _if_mask(value, invert=invert))
        return tag._replace(scale=scale, plain=False, **changes)
    changes["plain"] = tag.plain and tag.kind != "scores"
    changes["learned"] = tag.learned and (value is None or tags.is_learned(other))
    if tag.kind == "activation" and value is not None and value.shape[-1:] != source.shape[-1:]:
        changes["scale"] = Scale()  # a normaliser per row undoes whatever multiplied the row before
    return tag._replace(**changes)


def by_number(tag: Tag, factor: Number, *, invert: bool = False) -> Tag:
    """Return the tag after a multiplication with one number: what was added before changes its unit, too."""
    if invert and not isinstance(factor, Tensor) and not factor:
        return tag._replace(scale=tag.scale._replace(known=False), plain=False)
    factor = 1.0 / factor if invert else factor
    masks = tag.masks
    if any(mask.is_floating_point() for mask in masks):
        added = [mask * factor for mask in masks if mask.is_floating_point()]
        masks = (*_lasting(masks), *added)
    shift = tag.shift * factor if tag.shift is not None else None
    return tag._replace(scale=tag.scale.times(factor), since=tag.since.times(factor), masks=masks, shift=shift)


def _lasting(masks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what masks block, whatever happens to what they add."""
    return tuple(mask > BLOCKED if mask.is_floating_point() else mask for mask in map(hardened, masks))


def number(value: Any) -> Number | None:
    """Return a value that is one number, or a tensor that holds one."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 else None
    return value if isinstance(value, (int, float)) else None


def _axis_of(value: Tensor, source: Tensor, tag: Tag) -> Axis | None:
    """Return the axis along which a tensor scales another, `None` if it is none of batch or heads."""
    wide = [i for i, size in enumerate(value.shape) if size != 1]
    dim = wide[0] - value.dim() + source.dim() if len(wide) == 1 else -1
    if not 0 <= dim < source.dim() - 1 or len(tag.layout[dim]) != 1:
        return None
    (axis,) = tag.layout[dim]
    head = tag.product is not None and any(axis is head for head in tag.product.heads)
    return axis if (axis.role is None or head) and axis.size == value.shape[wide[0]] else None


def _if_mask(value: Tensor, *, invert: bool) -> Tensor:
    """Return 1 if a factor of scores is a mask of zeros and ones, nan if it is an unknown scale, without waiting."""
    mask = value == 1 if invert else (value == 1) | (value == 0)
    one = torch.ones((), device=value.device, dtype=torch.float32 if value.device.type == "mps" else torch.float64)
    return torch.where(mask.all(), one, math.nan)


def negate(tags: TagStore, step: Step) -> None:
    """Follow a change of sign: of scores a part of the scale, of half a query (rotary embedding) not."""
    if (tag := tags.get(step.args[0])) is not None:
        tags.carry(by_number(tag, -1.0) if tag.kind == "scores" else tag, step.out, tag.layout)


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
        tags.carry(tag, step.out, kept(tag, pair[index], step.out), plain=tag.plain and tag.kind != "scores")


def cap(tags: TagStore, step: Step) -> None:
    """Follow what changes some entries: the others are still what they were."""
    if (found := tags.operand(step.args[:2], step.out)) is not None:
        index, tag = found
        layout = kept(tag, step.args[index], step.out)
        tags.carry(tag, step.out, layout, plain=tag.plain and tag.kind != "scores")


def drop(tags: TagStore, step: Step) -> None:
    """Follow a dropout, which changes scores unless it is off."""
    tag, off = (
        tags.get(step.args[0]),
        not step.argument(1, "p", default=0.5) or not step.argument(2, "training", "train", default=True),
    )
    if tag is not None:
        tags.carry(tag, step.out, tag.layout, plain=tag.plain and (off or tag.kind != "scores"))


def tanh(tags: TagStore, step: Step) -> None:
    """Follow a softcap: divided by the cap before, multiplied after, so that the scale at small logits comes out."""
    tag = tags.get(step.args[0])
    if tag is not None and tag.kind == "scores":
        tags.carry(tag, step.out, tag.layout, plain=False, masks=_lasting(tag.masks))
    else:
        other(tags, step)


def other(tags: TagStore, step: Step) -> None:
    """Follow an activation through a function of its entries: its axes stay, its scale is gone."""
    tag, out = tags.get(step.args[0]), step.out
    if tag is not None and tag.kind == "activation" and isinstance(out, Tensor) and out.shape == step.args[0].shape:
        tags.put(out, Tag("activation", tag.layout, learned=tag.learned))
    else:
        tags.put(out, None)


def clamp(tags: TagStore, step: Step) -> None:
    """Follow a clamp, which from 0 on is a relu."""
    lowest = step.argument(1, "min")
    tag = tags.get(step.args[0])
    if isinstance(lowest, (int, float)) and lowest >= 0:
        no_softmax(tags, step)
    elif tag is not None:
        layout = kept(tag, step.args[0], step.out)
        tags.carry(tag, step.out, layout, plain=tag.plain and tag.kind != "scores")


def no_softmax(tags: TagStore, step: Step) -> None:
    """Note scores that go through something else than a softmax, to report them if they go on to weigh values.

    If a softmax comes yet, its logits are still to be measured, but they are no longer a scale times q.k.
    """
    source = next((arg for arg in step.args if isinstance(arg, Tensor)), None)  # second in torch.pow(2, scores)
    tag = tags.get(source)
    if tag is not None and source is not None and tag.kind == "scores" and not tag.projection:
        masks = _lasting(tag.masks) if step.function in fn.KEEPS_MASKS else ()
        layout = kept(tag, source, step.out)
        tags.carry(without_factors(tag), step.out, layout, masks=masks, shift=None, bent=True, plain=False)
    else:
        other(tags, step)

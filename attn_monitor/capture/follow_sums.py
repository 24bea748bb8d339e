"""Rules for sums: biases, masks, what a softmax does not notice."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from torch import Tensor

from attn_monitor.capture.follow_arithmetic import by_number, number, scaled
from attn_monitor.capture.products import Number, Scale
from attn_monitor.capture.tags import Step, Tag, TagStore, kept

Term: TypeAlias = "tuple[Any, Number]"
"""A term of a sum and what it is multiplied with."""


def add(tags: TagStore, step: Step) -> None:
    """Follow an addition of a bias or a mask."""
    combine(tags, (step.args[0], 1), (step.argument(1, "other"), step.kwargs.get("alpha", 1)), step.out)


def subtract(tags: TagStore, step: Step) -> None:
    """Follow a subtraction of a bias or a mask."""
    combine(tags, (step.args[0], 1), (step.argument(1, "other"), -step.kwargs.get("alpha", 1)), step.out)


def reverse_subtract(tags: TagStore, step: Step) -> None:
    """Follow ``other - tensor``."""
    combine(tags, (step.args[0], -step.kwargs.get("alpha", 1)), (step.argument(1, "other"), 1), step.out)


def lerp(tags: TagStore, step: Step) -> None:
    """Follow a mixture of two tensors."""
    weight = number(step.argument(2, "weight"))
    weight = math.nan if weight is None else weight  # each entry has one of its own
    combine(tags, (step.args[0], 1 - weight), (step.argument(1, "end"), weight), step.out)


def combine(tags: TagStore, first: Term, second: Term, out: Tensor) -> None:
    """Follow the sum of two terms, each times a factor."""
    terms = (first, second)
    found = tags.operand((first[0], second[0]), out)
    if found is None:
        return
    index, tag = found
    (source, factor), (other, other_factor) = terms[index], terms[1 - index]
    layout = kept(tag, source, out)
    if tag.kind == "scores":
        if source.shape != out.shape:
            tag = tag._replace(masks=())
        tags.carry(_plus(tags, tag, factor, other, other_factor), out, layout)
        return
    other_tag = tags.get(other)
    if tag.kind == "weight" and isinstance(other, Tensor) and (other_tag is None or other_tag.kind != "weight"):
        tag = Tag("activation", tag.layout)
    keep = not isinstance(other, Tensor) or (other_tag is not None and other_tag.scale.same(tag.scale))
    learned = tag.learned and (not isinstance(other, Tensor) or tags.is_learned(other))
    plain = _is_one(factor) and (_is_one(other_factor) or _is_one(-other_factor))
    tags.carry(tag, out, layout, scale=tag.scale if keep and plain else Scale(), learned=learned)


def _plus(tags: TagStore, scores: Tag, factor: Number, other: Any, other_factor: Number) -> Tag:
    """Return the tag of scores, times a factor, that something was added to, times another."""
    row = tags.get(other)
    if not _is_one(factor):
        scores = by_number(scores, factor)
    if row is not None and row.kind == "largest" and not isinstance(other_factor, Tensor) and other_factor < 0:
        shift = other.detach() * -other_factor
        return scores._replace(shift=shift if scores.shift is None else scores.shift + shift)
    if not isinstance(other, Tensor):
        return scores
    masks = scores.masks
    if may_mask(tags, other):
        masks = (*masks, other.detach() if _is_one(other_factor) else other.detach() * other_factor)
    return scores._replace(masks=masks, plain=False)


def _is_one(factor: Number) -> bool:
    return not isinstance(factor, Tensor) and factor == 1


def add_product(tags: TagStore, step: Step) -> None:
    """Follow ``input + value * tensor1 * tensor2``."""
    _add_product(tags, step, invert=False)


def add_quotient(tags: TagStore, step: Step) -> None:
    """Follow ``input + value * tensor1 / tensor2``."""
    _add_product(tags, step, invert=True)


def _add_product(tags: TagStore, step: Step, *, invert: bool) -> None:
    added, one, two = step.args[0], step.argument(1, "tensor1"), step.argument(2, "tensor2")
    value, out = step.kwargs.get("value", 1), step.out
    found = tags.operand((added, one) if invert else (added, one, two), out)
    if found is None:
        return
    index, tag = found
    source = (added, one, two)[index]
    if tag.kind != "scores":
        tags.carry(Tag("activation", tag.layout), out, kept(tag, source, out))
        return
    if index == 0:
        made_of_scores = not (may_mask(tags, one) and may_mask(tags, two))
        product = one.detach() / two.detach() if invert else one.detach() * two.detach()
        tag = _plus(tags, tag, 1, product, math.nan if made_of_scores else value)
    else:
        tag = _plus(tags, scaled(tags, tag, source, one if index == 2 else two, invert=invert), value, added, 1)
    tags.carry(tag, out, kept(tag, source, out))


def may_mask(tags: TagStore, tensor: Tensor) -> bool:
    """Tell whether something added may hold a mask, alone or beside a learned bias: it is not made of scores itself."""
    tag = tags.get(tensor)
    return tensor.is_floating_point() and (tag is None or tag.kind != "scores")

"""Rules for products: scores begin at the product of two activations and end where probabilities meet values."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attn_monitor.capture.follow_arithmetic import UNNORMALISED, may_mask
from attn_monitor.capture.layout import Layout, fresh, settled, sizes
from attn_monitor.capture.products import Dims, Scale, einsum_dims, matmul_dims, multiply
from attn_monitor.capture.tags import Step, Tag, TagStore


def matmul(tags: TagStore, step: Step) -> None:
    """Follow a matrix product of any spelling."""
    _matmul(tags, step.args[0], step.argument(1, "other", "mat2", "tensor2"), step.out)


def right_matmul(tags: TagStore, step: Step) -> None:
    """Follow ``left @ tensor`` where the right operand carries it out."""
    _matmul(tags, step.args[1], step.args[0], step.out)


def _matmul(tags: TagStore, left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.dim() >= 2 and right.dim() >= 2:
        _product(tags, left, right, matmul_dims(left.dim(), right.dim()), out)
    else:
        tags.put(out, None)


def baddbmm(tags: TagStore, step: Step) -> None:
    """Follow a batched product that a mask or bias is added to."""
    added, out = step.argument(0, "input", "self"), step.out
    beta, alpha = step.kwargs.get("beta", 1), step.kwargs.get("alpha", 1)
    _product(tags, step.argument(1, "batch1"), step.argument(2, "batch2"), matmul_dims(3, 3), out)
    if (tag := tags.get(out)) is not None and tag.kind == "scores":
        masks = (added.detach(),) if beta == 1 and may_mask(tags, added) else ()
        tags.put(out, tag._replace(scale=Scale(alpha), plain=beta == 0, masks=masks))


def einsum(tags: TagStore, step: Step) -> None:
    """Follow an einsum of two operands."""
    equation, *operands = step.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if isinstance(equation, str) and len(operands) == 2:
        left, right = operands
        if (dims := einsum_dims(equation, left.dim(), right.dim())) is not None:
            _product(tags, left, right, dims, step.out)
            return
    tags.put(step.out, None)


def distance(tags: TagStore, step: Step) -> None:
    """Follow the distances of queries and keys: scores that are no products."""
    left, right = step.argument(0, "x1"), step.argument(1, "x2")
    left_dims, right_dims, dims = matmul_dims(left.dim(), right.dim())
    _product(tags, left, right, (left_dims, (*right_dims[:-2], "n", "d"), dims), step.out)
    if (tag := tags.get(step.out)) is not None and tag.product is not None:
        tags.put(step.out, tag._replace(product=replace(tag.product, left=None, right=None), plain=False))


def mix(tags: TagStore, step: Step) -> None:
    """Follow a convolution over heads (talking heads)."""
    tag = tags.get(step.args[0])
    if tag is not None and tag.kind in ("scores", "probabilities") and not tag.projection:
        _mixed(tags, tag, step.out)
    else:
        tags.put(step.out, None)


def _product(tags: TagStore, left: Tensor, right: Tensor, dims: Dims, out: Tensor) -> None:
    given = (tags.get(left), tags.get(right))
    weights = tuple(tag is not None and tag.kind == "weight" for tag in given)
    tags.put(out, None)
    for tag, other_is_weight in zip(given, reversed(weights), strict=True):
        if tag is None or tag.kind not in ("probabilities", "unnormalised", "scores") or tag.projection:
            continue
        if other_is_weight and not tag.assured:  # more likely the projection of an activation
            continue
        if other_is_weight:  # heads mixed by a matrix
            _mixed(tags, tag, out)
            return
        # Scores that weigh values as they are are no attention but a linear recurrence (Mamba 2, linear attention).
        if tag.kind == "unnormalised":
            tags.report(UNNORMALISED)
        if tag.on_use is not None:
            tag.on_use()
        if tag.kind != "scores":  # probabilities x value: here the attention ends
            return
    if out.dim() < 2 or all(weights):
        return
    layouts = (_layout(left, given[0]), _layout(right, given[1]))
    scales = (_scale(given[0]), _scale(given[1]))
    product, layout = multiply(left, right, dims, layouts, scales, (weights[0], weights[1]))
    tags.put(out, Tag("scores", layout, product=product))


def _mixed(tags: TagStore, tag: Tag, out: Tensor) -> None:
    """Scores whose heads were mixed are still scores, but no longer of one query and key."""
    product = replace(tag.product, left=None, right=None) if tag.product is not None else None
    layout = tag.layout if sizes(tag.layout) == tuple(out.shape) else fresh(out.shape)
    tags.carry(tag, out, layout, product=product, plain=False, masks=(), shift=None, sink=None)


def _layout(tensor: Tensor, tag: Tag | None) -> Layout:
    return settled(tag.layout) if tag is not None and len(tag.layout) == tensor.dim() else fresh(tensor.shape)


def _scale(tag: Tag | None) -> Scale:
    """Return what a factor of a product had been multiplied with; a projection's scale is its own."""
    return tag.scale if tag is not None and tag.kind != "weight" else Scale()

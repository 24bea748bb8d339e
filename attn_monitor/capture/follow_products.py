"""Rules for products: scores begin at the product of two activations and end where probabilities meet values."""

from __future__ import annotations

from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.follow_arithmetic import UNNORMALISED
from attn_monitor.capture.follow_sums import may_mask
from attn_monitor.capture.layout import Axis, Layout, fresh, settled, sizes
from attn_monitor.capture.products import (
    Dims,
    Number,
    Scale,
    einsum_dims,
    inner_dims,
    matmul_dims,
    multiply,
    tensordot_dims,
)
from attn_monitor.capture.tags import Step, Tag, TagStore, without_factors


def matmul(tags: TagStore, step: Step) -> None:
    """Follow a matrix product of any spelling."""
    _matmul(tags, step.args[0], step.argument(1, "other", "mat2", "tensor2"), step.out)


def right_matmul(tags: TagStore, step: Step) -> None:
    """Follow ``left @ tensor`` where the right operand carries it out."""
    _matmul(tags, step.args[1], step.args[0], step.out)


def _matmul(tags: TagStore, left: Tensor, right: Tensor, out: Tensor) -> None:
    # A vector that is a weight makes one channel of an activation.
    if out.dim() and not any(x.dim() < 2 and tags.is_weight(x) for x in (left, right)):
        product(tags, left, right, matmul_dims(left.dim(), right.dim()), out)
    else:
        tags.put(out, None)


def linear(tags: TagStore, step: Step) -> None:
    """Follow a projection, or a product of two activations spelled as one."""
    source, weight, out = step.argument(0, "input"), step.argument(1, "weight"), step.out
    if tags.is_weight(weight):
        _project(tags, source, out)
    elif weight.dim() == 2:
        product(tags, source, weight, inner_dims(source.dim(), 2), out)
        _add_to_product(tags, step.argument(2, "bias"), 1, 1, out)
        if (tag := tags.get(out)) is not None:
            # A weight nobody declared, as one that was computed, is more likely than a key.
            tags.put(out, tag._replace(assured=False))


def convolution(tags: TagStore, step: Step) -> None:
    """Follow a convolution: a projection, or over the heads of scores (talking heads)."""
    tag = tags.get(step.args[0])
    if tag is not None and tag.kind in ("scores", "probabilities") and not tag.projection:
        _mixed(tags, tag, step.out)
    else:
        dim = step.out.dim() - (2 if step.function in fn.CONVOLUTION_1D else 3)
        tags.put(step.out, Tag("activation", _with_channels(fresh(step.out.shape), dim, step.out.shape[dim])))


def _project(tags: TagStore, source: Tensor, out: Tensor) -> None:
    tag = tags.get(source)
    if tag is not None and tag.kind == "scores" and not tag.projection and source.shape == out.shape:
        tags.carry(tag, out, tag.layout, plain=False, assured=False)
        return
    known = tag is not None and tag.kind == "activation" and len(tag.layout) == out.dim()
    learned = tags.is_learned(source)
    layout = tag.layout if tag is not None and known else fresh(out.shape)
    tags.put(out, Tag("activation", _with_channels(layout, out.dim() - 1, out.shape[-1]), learned=learned))


def _with_channels(layout: Layout, dim: int, size: int) -> Layout:
    return (*layout[:dim], (Axis(size, channels=True),), *layout[dim + 1 :])


def baddbmm(tags: TagStore, step: Step) -> None:
    """Follow a batched product that a mask or bias is added to."""
    left, right, out = step.argument(1, "batch1"), step.argument(2, "batch2"), step.out
    product(tags, left, right, matmul_dims(3, 3), out)
    _add_to_product(tags, step.args[0], step.kwargs.get("beta", 1), step.kwargs.get("alpha", 1), out)


def addmm(tags: TagStore, step: Step) -> None:
    """Follow a product, also one that is summed over the batch, that a mask or bias is added to."""
    left, right, out = step.argument(1, "mat1", "batch1"), step.argument(2, "mat2", "batch2"), step.out
    dims: Dims = matmul_dims(2, 2) if left.dim() == 2 else (("b", "m", "d"), ("b", "d", "n"), ("m", "n"))
    product(tags, left, right, dims, out)
    _add_to_product(tags, step.args[0], step.kwargs.get("beta", 1), step.kwargs.get("alpha", 1), out)


def _add_to_product(tags: TagStore, added: Tensor | None, beta: Number, alpha: Number, out: Tensor) -> None:
    tag = tags.get(out)
    if tag is None or tag.kind != "scores" or added is None:
        return
    masks: tuple[Tensor, ...] = ()
    if not tag.projection and may_mask(tags, added):
        masks = (added.detach() if beta == 1 else added.detach() * beta,)
    tags.put(out, tag._replace(scale=tag.scale.times(alpha), plain=False, masks=masks))


def einsum(tags: TagStore, step: Step) -> None:
    """Follow an einsum of two operands."""
    equation, *operands = step.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if isinstance(equation, str) and len(operands) == 2:
        left, right = operands
        if (dims := einsum_dims(equation, left.dim(), right.dim())) is not None:
            product(tags, left, right, dims, step.out)
            return
    tags.put(step.out, None)


def inner(tags: TagStore, step: Step) -> None:
    """Follow a product over the last dimensions."""
    left, right = step.args[0], step.argument(1, "other")
    if left.dim() and right.dim():
        product(tags, left, right, inner_dims(left.dim(), right.dim()), step.out)


def tensordot(tags: TagStore, step: Step) -> None:
    """Follow a product over some dimensions."""
    left, right, dims = step.argument(0, "a"), step.argument(1, "b"), step.argument(2, "dims", default=2)
    if not isinstance(dims, Tensor):
        product(tags, left, right, tensordot_dims(left.dim(), right.dim(), dims), step.out)


def distance(tags: TagStore, step: Step) -> None:
    """Follow the distances of queries and keys: scores that are no products."""
    left, right = step.argument(0, "x1"), step.argument(1, "x2")
    left_dims, right_dims, dims = matmul_dims(left.dim(), right.dim())
    product(tags, left, right, (left_dims, (*right_dims[:-2], "n", "d"), dims), step.out)
    if (tag := tags.get(step.out)) is not None:
        tags.put(step.out, without_factors(tag)._replace(plain=False))


def product(
    tags: TagStore,
    left: Tensor,
    right: Tensor,
    dims: Dims,
    out: Tensor,
    given: tuple[Tag | None, Tag | None] | None = None,
) -> None:
    """Follow a product of two tensors with named dimensions."""
    given = given or (tags.get(left), tags.get(right))
    weights = tuple(tag is not None and tag.kind == "weight" for tag in given)
    tags.put(out, None)
    for i, (tag, other_is_weight) in enumerate(zip(given, reversed(weights), strict=True)):
        if tag is None or tag.kind not in ("probabilities", "scores") or tag.projection:
            continue
        if other_is_weight and tag.kind == "scores" and not tag.assured:  # more likely the projection of an activation
            continue
        if other_is_weight:  # heads mixed by a matrix
            _mixed(tags, tag, out)
            return
        # Scores that weigh values as they are are no attention but a linear recurrence (Mamba 2, linear attention).
        if tag.bent:
            tags.report(UNNORMALISED)
        # Where each entry of a softmax has a value of its own, as experts have in a mixture, nothing is attended to.
        rows = any(dim in dims[2] and dim not in dims[1 - i] for dim in dims[i])
        if tag.on_use is not None and (rows or not tag.waits_for_rows):
            tag.on_use()
        if tag.kind != "scores" or tag.bent:  # probabilities x value: here the attention ends
            return
    if all(weights) and out.dim() == 2:  # of low rank, as adapters make them
        tags.put(out, Tag("weight", fresh(out.shape)))
    if not out.dim() or all(weights):
        return
    layouts = (_layout(left, given[0]), _layout(right, given[1]))
    scales = (_scale(given[0]), _scale(given[1]))
    made, layout = multiply(left, right, dims, layouts, scales, (weights[0], weights[1]))
    # A factor that is the same for all samples may be a classifier's weight, however it was made.
    common = len(layout) < 3 or any(dim in dims[0] and dim in dims[1] for dim in dims[2])
    doubted = not common or any(tag is not None and tag.learned for tag in given)
    tags.put(out, Tag("scores", layout, product=made, doubted=doubted))


def _mixed(tags: TagStore, tag: Tag, out: Tensor) -> None:
    """Scores whose heads were mixed are still scores, but no longer of one query and key."""
    layout = tag.layout if sizes(tag.layout) == tuple(out.shape) else fresh(out.shape)
    tags.carry(without_factors(tag), out, layout, plain=False, masks=(), shift=None, sink=None)


def _layout(tensor: Tensor, tag: Tag | None) -> Layout:
    return settled(tag.layout) if tag is not None and len(tag.layout) == tensor.dim() else fresh(tensor.shape)


def _scale(tag: Tag | None) -> Scale:
    """Return what a factor of a product had been multiplied with; a projection's scale is its own."""
    return tag.scale if tag is not None and tag.kind != "weight" else Scale()

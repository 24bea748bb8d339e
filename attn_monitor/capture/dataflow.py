"""Discovery by dataflow: follow the product of two activations through a model until a softmax receives it.

Each tensor of interest carries a tag. Views, reshapes, scalings, masks and additions carry the tag along. What is not
known to keep a tensor what it was ends it; only scores stay scores as long as they keep their shape, but have to prove
themselves by weighing values in the end. Nothing here computes with the model's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from attn_monitor.capture import follow_arithmetic, follow_masks, follow_pieces, follow_products, follow_views
from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import fresh
from attn_monitor.capture.tags import Step, Tag, TagStore

Rule: TypeAlias = Callable[[TagStore, Step], None]

_RULES: dict[fn.Function, Rule] = {
    function: rule
    for functions, rule in (
        (fn.SAME, follow_views.same),
        (fn.RESHAPE, follow_views.reshape),
        (fn.VIEW, follow_views.view),
        (fn.CONCATENATE, follow_pieces.concatenate),
        (fn.STACK, follow_pieces.stack),
        (fn.REARRANGE, follow_views.rearrange),
        (fn.PAD, follow_pieces.pad),
        (fn.REPEAT, follow_pieces.repeat),
        (fn.REPEAT_INTERLEAVE, follow_pieces.repeat_interleave),
        (fn.AS_STRIDED, follow_views.as_strided),
        (fn.LARGEST, follow_arithmetic.largest),
        (fn.SMALLEST, follow_arithmetic.smallest),
        (fn.MULTIPLY, follow_arithmetic.multiply),
        (fn.DIVIDE, follow_arithmetic.divide),
        (fn.NEGATE, follow_arithmetic.negate),
        (fn.ADD, follow_arithmetic.add),
        (fn.SUBTRACT, follow_arithmetic.subtract),
        (fn.REVERSE_SUBTRACT, follow_arithmetic.reverse_subtract),
        (fn.TANH, follow_arithmetic.tanh),
        (fn.NO_SOFTMAX, follow_arithmetic.no_softmax),
        (fn.MASKED_FILL, follow_masks.masked_fill),
        (fn.WHERE, follow_masks.where),
        (fn.SET_ITEM, follow_masks.set_item),
        (fn.MIXING, follow_products.mix),
        (fn.DISTANCE, follow_products.distance),
        (fn.MATMUL, follow_products.matmul),
        (fn.RIGHT_MATMUL, follow_products.right_matmul),
        (fn.BADDBMM, follow_products.baddbmm),
        (fn.EINSUM, follow_products.einsum),
    )
    for function in functions
}
_PROJECTIONS = frozenset({"linear", "embedding", "conv1d", "conv2d", "conv3d"})
"""Functions that make an activation of a weight."""


def follow(tags: TagStore, function: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Tag what a torch function returned, from the tags of what it was given."""
    if isinstance(out, Tensor) and out.is_nested:
        return  # has no axes to speak of
    rule = _RULES.get(function)
    if rule is not None:
        rule(tags, Step(function, args, kwargs, out))
        return
    if not isinstance(out, Tensor):
        return
    # What is made of weights alone (normalised, reparametrised) is a weight. A function in place returns a tensor
    # whose old tag no longer holds.
    given = fn.tensors((*args, *kwargs.values()))
    weights = bool(given) and all((tag := tags.get(tensor)) is not None and tag.kind == "weight" for tensor in given)
    if weights and getattr(function, "__name__", "") not in _PROJECTIONS:
        tags.put(out, Tag("weight", fresh(out.shape)))
        return
    scores = None if _makes_new(function) else next((t for t in given if _is_score(tags, t, out)), None)
    if scores is not None:
        tag = tags.get_or_new(scores)
        tags.carry(tag, out, tag.layout, plain=False, assured=False)
    elif out in tags:
        tags.put(out, None)


def _is_score(tags: TagStore, tensor: Tensor, out: Tensor) -> bool:
    tag = tags.get(tensor)
    same = tensor.shape == out.shape and out.is_floating_point()
    return same and tag is not None and tag.kind in ("scores", "unnormalised") and not tag.projection


def _makes_new(function: fn.Function) -> bool:
    """Tell whether a function takes nothing but the shape of its argument."""
    return getattr(function, "__name__", "").endswith("_like")

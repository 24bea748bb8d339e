"""Discovery by dataflow: follow the product of two activations through a model until a softmax receives it.

Each tensor of interest carries a tag. Views, reshapes, scalings, masks and additions carry the tag along; whatever
is not known to keep a tensor what it was ends it. Nothing here computes with the model's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from attn_monitor.capture import follow_arithmetic, follow_masks, follow_products, follow_views
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
        (fn.CONCATENATE, follow_views.concatenate),
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
    elif out in tags:
        tags.put(out, None)

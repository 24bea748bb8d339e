"""Discovery by dataflow: follow the product of two activations through a model until a softmax receives it.

Each tensor of interest carries a tag. Views, reshapes, scalings, masks and additions carry the tag along. What is not
known to keep a tensor what it was ends it; only scores stay scores as long as they keep their shape, but have to prove
themselves by weighing values in the end. Nothing here computes with the model's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

from torch import Tensor

from attn_monitor.capture import (
    follow_arithmetic,
    follow_entries,
    follow_masks,
    follow_order,
    follow_pieces,
    follow_products,
    follow_sums,
    follow_views,
)
from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import fresh
from attn_monitor.capture.local_tags import follow_parts
from attn_monitor.capture.tags import Step, Tag, TagStore
from attn_monitor.tensor_parallel import NoCommunication, is_distributed
from attn_monitor.unseen import unseen

Rule: TypeAlias = Callable[[TagStore, Step], None]
Rules: TypeAlias = "tuple[tuple[frozenset[fn.Function], Rule], ...]"


def _by_function(rules: Rules) -> dict[fn.Function, Rule]:
    return {function: rule for functions, rule in rules for function in functions}


_BEGINNINGS = _by_function(
    (
        (fn.RESHAPE, follow_views.reshape),
        (fn.MULTIPLY, follow_arithmetic.multiply),
        (fn.DIVIDE, follow_arithmetic.divide),
        (fn.DISTANCE, follow_products.distance),
        (fn.MATMUL, follow_products.matmul),
        (fn.RIGHT_MATMUL, follow_products.right_matmul),
        (fn.BADDBMM, follow_products.baddbmm),
        (fn.ADDMM, follow_products.addmm),
        (fn.EINSUM, follow_products.einsum),
        (fn.LINEAR, follow_products.linear),
        (fn.CONVOLUTION, follow_products.convolution),
        (fn.INNER, follow_products.inner),
        (fn.TENSORDOT, follow_products.tensordot),
        (fn.VECDOT, follow_entries.vecdot),
    )
)
"""What tells something about its result even if nothing is known about its arguments."""
_CONTINUATIONS = _by_function(
    (
        (fn.SAME, follow_views.same),
        (fn.VIEW, follow_views.view),
        (fn.AS_STRIDED, follow_views.as_strided),
        (fn.CONCATENATE, follow_pieces.concatenate),
        (fn.STACK, follow_pieces.stack),
        (fn.PAD, follow_pieces.pad),
        (fn.REPEAT, follow_pieces.repeat),
        (fn.REPEAT_INTERLEAVE, follow_pieces.repeat_interleave),
        (fn.REARRANGE, follow_order.rearrange),
        (fn.SELECT_LARGEST, follow_order.select_largest),
        (fn.SCATTER, follow_order.scatter),
        (fn.INDEX_FILL, follow_order.index_fill),
        (fn.LARGEST, follow_arithmetic.largest),
        (fn.SMALLEST, follow_arithmetic.smallest),
        (fn.NEGATE, follow_arithmetic.negate),
        (fn.CLAMP, follow_arithmetic.clamp),
        (fn.CAP | fn.CUT_OUT, follow_arithmetic.cap),
        (fn.DROP, follow_arithmetic.drop),
        (fn.TANH, follow_arithmetic.tanh),
        (fn.NO_SOFTMAX, follow_arithmetic.no_softmax),
        (fn.ADD, follow_sums.add),
        (fn.SUBTRACT, follow_sums.subtract),
        (fn.REVERSE_SUBTRACT, follow_sums.reverse_subtract),
        (fn.ADDCMUL, follow_sums.add_product),
        (fn.ADDCDIV, follow_sums.add_quotient),
        (fn.LERP, follow_sums.lerp),
        (fn.SUM, follow_entries.total),
        (fn.MEAN, follow_entries.mean),
        (fn.MASKED_FILL, follow_masks.masked_fill),
        (fn.WHERE, follow_masks.where),
        (fn.SET_ITEM, follow_masks.set_item),
    )
)
"""What tells something only if something is known already."""
_PROJECTIONS = frozenset({"linear", "embedding", "conv1d", "conv2d", "conv3d"})
"""Functions that make an activation of a weight."""


def follow(tags: TagStore, function: fn.Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Tag what a torch function returned, from the tags of what it was given."""
    known = fn.known_as(function)
    rule = _BEGINNINGS.get(known)
    if rule is None:
        # By far the most calls end here: nothing is known of their arguments, and nothing is to be learnt.
        if not tags.any_known(args) and not (kwargs and tags.any_known(kwargs.values())):
            return
        rule = _CONTINUATIONS.get(known, _other)
    if not args and (name := next((name for name in ("input", "self") if name in kwargs), None)) is not None:
        args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
    step = Step(known, args, kwargs, out, function)
    with unseen():
        if isinstance(out, Tensor) and out.is_nested:  # which has no axes to speak of
            return
        if is_distributed(out[0] if isinstance(out, (tuple, list)) and out else out):
            with NoCommunication():  # type: ignore[no-untyped-call] # torch has no hints for it
                rule(tags, step)
                follow_parts(tags, out)
        else:
            rule(tags, step)


def _other(tags: TagStore, step: Step) -> None:
    """Follow a function that no rule knows."""
    out = step.out
    if not isinstance(out, Tensor):
        return
    if _is_plain(tags, step):
        return
    # What is made of weights alone (normalised, reparametrised) is a weight. A function in place returns a tensor
    # whose old tag no longer holds.
    given = fn.tensors((*step.args, *step.kwargs.values()))
    found = [tags.get(tensor) for tensor in given]
    name = getattr(step.function, "__name__", "")
    if found and all(tag is not None and tag.kind == "weight" for tag in found) and name not in _PROJECTIONS:
        tags.put(out, Tag("weight", fresh(out.shape)))
        return
    # A function that takes nothing but the shape of its argument tells nothing about the entries.
    same = (
        [] if name.endswith("_like") else [tag for tag, t in zip(found, given, strict=True) if _continues(tag, t, out)]
    )
    scores = next((tag for tag in same if tag.kind != "activation"), None)
    if scores is not None:
        tags.carry(scores, out, scores.layout, plain=False, assured=False)
    elif same and name not in _PROJECTIONS:
        tags.put(out, Tag("activation", same[0].layout, learned=all(map(tags.is_learned, given))))
    elif out in tags:
        tags.put(out, None)
    if name.endswith("_") and not name.endswith("__"):
        tags.written(out)


def _is_plain(tags: TagStore, step: Step) -> bool:
    """Follow what is most frequent, a function of one activation and weights; tell whether it was that."""
    first, *rest = step.args or (None,)
    tag, out = tags.get(first), step.out
    if tag is None or tag.kind != "activation" or out.shape != first.shape or out is first or "out" in step.kwargs:
        return False
    others = [other for other in (*rest, *step.kwargs.values()) if isinstance(other, Tensor)]
    if not all(map(tags.is_weight, others)) or not out.is_floating_point():
        return False
    name = getattr(step.function, "__name__", "")
    if name in _PROJECTIONS or name.endswith("_like"):
        return False
    tags.put(out, Tag("activation", tag.layout, learned=tag.learned))
    return True


def _continues(tag: Tag | None, tensor: Tensor, out: Tensor) -> TypeGuard[Tag]:
    """Tell whether a result may be what an argument was, entry by entry."""
    if tag is None or tensor.shape != out.shape or not out.is_floating_point():
        return False
    return tag.kind == "activation" or (tag.kind == "scores" and not tag.projection)

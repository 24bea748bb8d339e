"""Discovery by dataflow: follow the product of two activations through a model until a softmax receives it.

Each tensor of interest carries a tag. Views, reshapes, scalings, masks and additions carry the tag along; whatever
is not known to keep a tensor what it was ends it. Nothing here computes with the model's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, Layout, fresh, moved, proxy, reshaped
from attn_monitor.capture.products import Product, Scale, einsum_dims, matmul_dims, multiply

BLOCKED = -9000.0
"""Additive mask entries and fill values at or below this are masks."""

UNNORMALISED = (
    "its scores q.k weigh values without a softmax that can be seen (sigmoid, relu, or exp and sum by hand); "
    "if it is a softmax, call observe_logits on the scores"
)

Kind: TypeAlias = Literal["activation", "weight", "scores", "probabilities", "unnormalised"]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tag:
    """What is known about a tensor.

    Attributes:
        kind: An activation, a weight, the scores of a product, attention probabilities, or scores that went through
            something else than a softmax.
        layout: Its axes.
        scale: What it has been multiplied with; for scores since the product.
        product: Of scores: where they come from.
        masks: Of scores: masks seen so far, broadcastable to the tensor, with the semantics of SDPA.
        plain: Of scores: nothing but scaling and masking happened since the product.
        on_use: Of probabilities: called once they meet a value.
    """

    kind: Kind
    layout: Layout
    scale: Scale = field(default_factory=Scale)
    product: Product | None = None
    masks: tuple[Tensor, ...] = ()
    plain: bool = True
    on_use: Callable[[], None] | None = None


class Dataflow:
    """The tags of the tensors that are alive, and the rules that make new ones.

    Args:
        report: Takes the reason when scores are seen to weigh values without a softmax.
    """

    def __init__(self, report: Callable[[str], None] = lambda reason: None) -> None:
        self._report = report
        self._tags: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._rules: dict[fn.Function, Callable[[fn.Function, Args, Kwargs, Any], None]] = {}
        for functions, rule in (
            (fn.SAME, self._same),
            (fn.RESHAPE, self._reshape),
            (fn.VIEW, self._view),
            (fn.CONCATENATE, self._concatenate),
            (fn.MULTIPLY, self._multiply),
            (fn.DIVIDE, self._divide),
            (fn.NEGATE, self._negate),
            (fn.ADD, self._add),
            (fn.SUBTRACT, self._subtract),
            (fn.REVERSE_SUBTRACT, self._reverse_subtract),
            (fn.MASKED_FILL, self._masked_fill),
            (fn.WHERE, self._where),
            (fn.SET_ITEM, self._set_item),
            (fn.TANH, self._tanh),
            (fn.NO_SOFTMAX, self._no_softmax),
            (fn.MIXING, self._mix),
            (fn.MATMUL, self._matmul),
            (fn.RIGHT_MATMUL, self._right_matmul),
            (fn.BADDBMM, self._baddbmm),
            (fn.EINSUM, self._einsum),
        ):
            self._rules.update(dict.fromkeys(functions, rule))

    def clear(self) -> None:
        """Forget every tensor."""
        self._tags.clear()

    def get(self, tensor: object) -> Tag | None:
        """Return the tag of a tensor."""
        if not isinstance(tensor, Tensor):
            return None
        tag: Tag | None = self._tags.get(tensor)
        if tag is None and isinstance(tensor, nn.Parameter):
            return Tag("weight", fresh(tensor.shape))
        return tag

    def put(self, tensor: object, tag: Tag | None) -> None:
        """Set or, with `None`, remove the tag of a tensor."""
        if not isinstance(tensor, Tensor):
            return
        if tag is not None:
            self._tags[tensor] = tag
        else:
            self._tags.pop(tensor, None)

    def follow(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Tag what a torch function returned, from the tags of what it was given."""
        rule = self._rules.get(function)
        if rule is not None:
            rule(function, args, kwargs, out)
            return
        if isinstance(out, Tensor):
            # Functions in place return a tensor whose old tag no longer holds; what is made of weights alone by
            # anything but a projection (normalised, reparametrised) is still a weight.
            given = fn.tensors((*args, *kwargs.values()))
            weights = bool(given) and getattr(function, "__name__", "") not in _PROJECTIONS
            weights = weights and all((tag := self.get(t)) is not None and tag.kind == "weight" for t in given)
            if weights:
                self.put(out, Tag("weight", fresh(out.shape)))
            elif out in self._tags:
                self.put(out, None)

    # -- what leaves a tensor what it is ------------------------------------------------------------------------

    def _carry(self, tag: Tag, out: Tensor, layout: Layout | None = None, **changes: Any) -> None:
        layout = layout if layout is not None else reshaped(tag.layout, out.shape)
        self.put(out, replace(tag, layout=layout, **changes))

    def _operand(self, candidates: Sequence[Any], out: Any) -> tuple[int, Tag] | None:
        """Return the operand a result continues: scores before all else, then the one that has its shape."""
        tagged = [(i, tag) for i, t in enumerate(candidates) if (tag := self.get(t)) is not None]
        if not tagged or not isinstance(out, Tensor):
            return None

        def rank(entry: tuple[int, Tag]) -> tuple[int, bool, bool, int]:
            i, tag = entry
            order = {"scores": 0, "probabilities": 0, "unnormalised": 0, "activation": 1, "weight": 1}
            same_shape = candidates[i].shape == out.shape
            true_scores = tag.kind == "scores" and tag.product is not None and any(tag.product.weights)
            return order[tag.kind], true_scores, not same_shape, i

        return min(tagged, key=rank)

    def _same(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (found := self._operand(args[:2], out)) is not None:
            tag = found[1]
            self._carry(tag, out, tag.layout if args[found[0]].shape == out.shape else fresh(out.shape))

    def _reshape(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        source = args[0]
        tag = self.get(source) or Tag("activation", fresh(source.shape))
        masks = tuple(mask.expand(source.shape).reshape(out.shape) for mask in tag.masks)
        self._carry(tag, out, masks=masks)

    def _view(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        source, rest = args[0], args[1:]
        tag = self.get(source) or Tag("activation", fresh(source.shape))

        def run(tensor: Tensor) -> list[Tensor]:
            result = function(tensor, *rest, **kwargs)
            return [result] if isinstance(result, Tensor) else list(result)

        outs = [out] if isinstance(out, Tensor) else list(out)
        if fn.tensors(rest) and function not in fn._spellings("expand_as"):
            layouts = [fresh(t.shape) for t in outs]  # indexed by a tensor
        else:
            layouts = [moved(tag.layout, view) for view in run(proxy(source.shape))]
        masks = [run(mask.expand(source.shape)) for mask in tag.masks]
        for i, (tensor, layout) in enumerate(zip(outs, layouts, strict=True)):
            self._carry(tag, tensor, layout, masks=tuple(views[i] for views in masks))

    def _concatenate(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        pieces = fn.argument(args, kwargs, 0, "tensors")
        dim = fn.argument(args, kwargs, 1, "dim", "axis", default=0) % out.dim()
        tags = [self.get(piece) for piece in pieces]
        known = [tag for tag in tags if tag is not None]
        if not known:
            return
        first = next((tag for tag in known if tag.kind != "activation"), known[0])
        if first.kind == "weight" and not all(tag is not None and tag.kind == "weight" for tag in tags):
            first = next((tag for tag in known if tag.kind != "weight"), Tag("activation", first.layout))
        layout = list(first.layout)
        layout[dim] = (layout[dim][0].resized(out.shape[dim]) if len(layout[dim]) == 1 else Axis(out.shape[dim]),)
        same = all(tag is not None and tag.scale.same(first.scale) for tag in tags)
        scores = first.kind == "scores"
        scale = first.scale if same or scores else Scale()
        # The other pieces' masks are unknown; what they fill with is still seen in the logits.
        self._carry(first, out, tuple(layout), scale=scale, masks=(), plain=first.plain and not scores)

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def _multiply(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._scale((args[0], fn.argument(args, kwargs, 1, "other")), out, invert=False)

    def _divide(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._scale((args[0], fn.argument(args, kwargs, 1, "other")), out, invert=True)

    def _scale(self, pair: tuple[Any, Any], out: Any, *, invert: bool) -> None:
        found = self._operand(pair if not invert else pair[:1], out)
        index = found[0] if found is not None else int(not isinstance(pair[0], Tensor))
        source, other = pair[index], pair[1 - index]
        if not isinstance(source, Tensor) or not isinstance(out, Tensor):
            return
        if found is None and isinstance(other, Tensor) and source.numel() == 1 < other.numel() and not invert:
            source, other = other, source  # temperature * scores, neither tagged yet
        tag = found[1] if found is not None else Tag("activation", fresh(source.shape))
        layout = tag.layout if source.shape == out.shape else fresh(out.shape)
        if isinstance(other, Tensor) and (both := self.get(other)) is not None and tag.kind == "weight":
            tag = replace(tag, kind=both.kind if both.kind == "weight" else "activation", product=None)
        elif tag.kind == "weight" and isinstance(other, Tensor):
            tag = replace(tag, kind="activation")
        scale, gain = _factor(other, source, tag, invert=invert)
        if scale is None and tag.kind != "scores" and gain is not None and gain.shape[-1:] != source.shape[-1:]:
            scale = Scale()  # a normaliser per row undoes whatever multiplied the row before
        plain = tag.plain and (scale is not None or tag.kind != "scores")
        self._carry(tag, out, layout, scale=scale or tag.scale, plain=plain)

    def _negate(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (tag := self.get(args[0])) is not None:
            self._carry(tag, out, tag.layout, scale=tag.scale.times(-1.0) or tag.scale)

    def _add(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._sum((args[0], fn.argument(args, kwargs, 1, "other")), out, sign=1.0, alpha=kwargs.get("alpha", 1))

    def _subtract(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._sum((args[0], fn.argument(args, kwargs, 1, "other")), out, sign=-1.0, alpha=kwargs.get("alpha", 1))

    def _reverse_subtract(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (tag := self.get(args[0])) is not None and tag.kind != "scores":
            self._carry(tag, out, tag.layout)

    def _sum(self, pair: tuple[Any, Any], out: Any, *, sign: float, alpha: Any) -> None:
        found = self._operand(pair, out)
        if found is None:
            return
        index, tag = found
        source, other = pair[index], pair[1 - index]
        same_shape = source.shape == out.shape
        layout = tag.layout if same_shape else fresh(out.shape)
        if tag.kind == "scores":
            masks, plain = tag.masks if same_shape else (), tag.plain
            if isinstance(other, Tensor):
                plain = False
                if self._may_mask(other) and alpha == 1:
                    masks = (*masks, other if sign > 0 or index == 1 else -other)
            scale = tag.scale if index == 0 or sign > 0 else tag.scale.times(-1.0) or tag.scale
            self._carry(tag, out, layout, masks=masks, plain=plain, scale=scale)
            return
        both = self.get(other)
        if tag.kind == "weight" and isinstance(other, Tensor) and (both is None or both.kind != "weight"):
            tag = Tag("activation", tag.layout)
        keep = not isinstance(other, Tensor) or (both is not None and both.scale.same(tag.scale))
        self._carry(tag, out, layout, scale=tag.scale if keep else Scale())

    def _may_mask(self, tensor: Tensor) -> bool:
        """A mask takes no gradient and is not itself made of scores (relative positions are)."""
        tag = self.get(tensor)
        return tensor.is_floating_point() and not tensor.requires_grad and (tag is None or tag.kind != "scores")

    # -- masks --------------------------------------------------------------------------------------------------

    def _masked_fill(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        mask, value = fn.argument(args, kwargs, 1, "mask"), fn.argument(args, kwargs, 2, "value")
        if (tag := self.get(args[0])) is not None:
            self._fill(tag, args[0], mask, value, out)

    def _where(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        condition = fn.argument(args, kwargs, 0, "condition")
        chosen, other = fn.argument(args, kwargs, 1, "input", "self"), fn.argument(args, kwargs, 2, "other")
        if condition.dtype not in (torch.bool, torch.uint8):  # Tensor.where(self, condition, other)
            chosen, condition = condition, chosen
        found = self._operand((chosen, other), out)
        if found is not None and isinstance(condition, Tensor):
            source = (chosen, other)[found[0]]
            blocked = ~condition if found[0] == 0 else condition
            self._fill(found[1], source, blocked, (other, chosen)[found[0]], out)

    def _fill(self, tag: Tag, source: Tensor, blocked: Tensor, value: Any, out: Any) -> None:
        if tag.kind != "scores" or source.shape != out.shape:
            self._carry(tag, out, tag.layout if source.shape == out.shape else fresh(out.shape))
            return
        if isinstance(value, Tensor):
            # Whether the value is a mask's is decided with the numbers, without waiting for the device here.
            mask = torch.where(blocked, value.detach().to(torch.float32), 0.0)
        elif value <= BLOCKED:
            mask = ~blocked
        else:
            self._carry(tag, out, tag.layout, plain=False)
            return
        self._carry(tag, out, tag.layout, masks=(*tag.masks, mask))

    def _set_item(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        target, index, value = args[0], args[1], args[2]
        if (tag := self.get(target)) is None:
            return
        if tag.kind == "scores":
            masks = tag.masks
            bool_index = isinstance(index, Tensor) and index.dtype is torch.bool
            if bool_index and not isinstance(value, Tensor) and value <= BLOCKED:
                masks = (*masks, ~index.reshape(index.shape + (1,) * (target.dim() - index.dim())))
            self.put(target, replace(tag, masks=masks, plain=False))
        elif tag.kind == "weight":
            self.put(target, None)

    # -- what becomes of scores -----------------------------------------------------------------------------------

    def _tanh(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (tag := self.get(args[0])) is not None and tag.kind == "scores":
            # softcap: scale/cap before, cap after, so that multiplying on gives the scale at small logits
            self._carry(tag, out, tag.layout, plain=False)
        else:
            self.put(out, None)

    def _no_softmax(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        tag = self.get(args[0]) if args else None
        if tag is not None and tag.kind in ("scores", "unnormalised") and not _projection(tag):
            self._carry(tag, out, tag.layout, kind="unnormalised")
        elif isinstance(out, Tensor) and out in self._tags:
            self.put(out, None)

    def _mix(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        if (tag := self.get(args[0])) is not None and tag.kind in ("scores", "probabilities") and not _projection(tag):
            self._mixed(tag, out)

    def _mixed(self, tag: Tag, out: Tensor) -> None:
        """Scores whose heads were mixed are still scores, but no longer of one query and key."""
        product = replace(tag.product, left=None, right=None) if tag.product is not None else None
        layout = tag.layout if tuple(out.shape) == tuple(_shape(tag.layout)) else fresh(out.shape)
        self._carry(tag, out, layout, product=product, plain=False, masks=())

    def _matmul(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        left, right = args[0], fn.argument(args, kwargs, 1, "other", "mat2", "tensor2")
        if isinstance(right, Tensor) and left.dim() >= 2 and right.dim() >= 2:
            self._product(left, right, matmul_dims(left.dim(), right.dim()), out)

    def _right_matmul(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        self._matmul(function, (args[1], args[0]), {}, out)

    def _baddbmm(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        added = fn.argument(args, kwargs, 0, "input", "self")
        left, right = fn.argument(args, kwargs, 1, "batch1"), fn.argument(args, kwargs, 2, "batch2")
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        self._product(left, right, matmul_dims(3, 3), out)
        if (tag := self.get(out)) is not None and tag.kind == "scores":
            masks = (added,) if beta == 1 and self._may_mask(added) else ()
            self.put(out, replace(tag, scale=Scale(alpha), plain=beta == 0, masks=masks))

    def _einsum(self, function: fn.Function, args: Args, kwargs: Kwargs, out: Any) -> None:
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = list(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return
        left, right = operands
        if (dims := einsum_dims(equation, left.dim(), right.dim())) is not None:
            self._product(left, right, dims, out)

    def _product(
        self, left: Tensor, right: Tensor, dims: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], out: Tensor
    ) -> None:
        tags = (self.get(left), self.get(right))
        weights = (_is_weight(tags[0]), _is_weight(tags[1]))
        self.put(out, None)
        for tag, other_is_weight in zip(tags, reversed(weights), strict=True):
            if tag is None or tag.kind not in ("probabilities", "unnormalised", "scores") or _projection(tag):
                continue
            if other_is_weight:  # heads mixed by a matrix
                self._mixed(tag, out)
                return
            if tag.kind == "unnormalised":
                self._report(UNNORMALISED)
            if tag.on_use is not None:
                tag.on_use()
            if tag.kind != "scores":  # probabilities x value: here the attention ends
                return
        if out.dim() < 2 or all(weights):
            return
        layouts = (_layout(left, tags[0]), _layout(right, tags[1]))
        scales = (_activation_scale(tags[0]), _activation_scale(tags[1]))
        product, layout = multiply(left, right, dims, layouts, scales, weights)
        self.put(out, Tag("scores", layout, product=product))


_PROJECTIONS = frozenset({"linear", "matmul", "bmm", "mm", "embedding", "einsum", "conv1d", "conv2d", "conv3d"})


def _is_weight(tag: Tag | None) -> bool:
    return tag is not None and tag.kind == "weight"


def _projection(tag: Tag) -> bool:
    """A product with a weight is a projection: as the factor of another product it is an activation."""
    return tag.product is not None and any(tag.product.weights)


def _layout(tensor: Tensor, tag: Tag | None) -> Layout:
    return tag.layout if tag is not None and len(tag.layout) == tensor.dim() else fresh(tensor.shape)


def _shape(layout: Layout) -> list[int]:
    return [torch.Size([axis.size for axis in dim]).numel() for dim in layout]


def _activation_scale(tag: Tag | None) -> Scale:
    return tag.scale if tag is not None and tag.kind != "weight" else Scale()


def _factor(other: Any, source: Tensor, tag: Tag, *, invert: bool) -> tuple[Scale | None, Tensor | None]:
    """Return the scale after multiplying with `other`, or `None` and the tensor that is no scale but a gain."""
    if not isinstance(other, Tensor):
        return (tag.scale.times(1.0 / other if invert else other) if other else None), None
    value = other.detach()
    if value.numel() == 1:
        value = value.reshape(())
        return tag.scale.times(1.0 / value if invert else value), None
    wide = [i for i, size in enumerate(value.shape) if size != 1]
    dim = wide[0] - value.dim() + source.dim() if len(wide) == 1 else -1
    if 0 <= dim < source.dim() - 1 and len(tag.layout[dim]) == 1 and tag.layout[dim][0].role is None:
        vector = value.reshape(-1)
        scale = tag.scale.times(axis=tag.layout[dim][0], vector=1.0 / vector if invert else vector)
        return scale, value
    return None, value

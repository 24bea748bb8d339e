"""What is known about the tensors that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, Layout, fresh, reshaped
from attn_monitor.capture.products import Product, Scale

BLOCKED = -9000.0
"""Fill values and additive mask entries at or below this are masks."""

Kind: TypeAlias = Literal["activation", "weight", "outer", "scores", "largest", "probabilities"]
_PRECEDENCE: dict[Kind, int] = {
    "scores": 0,
    "probabilities": 0,
    "activation": 1,
    "outer": 1,
    "largest": 1,
    "weight": 2,
}


class Step(NamedTuple):
    """One call of a torch function that has run.

    Attributes:
        function: The function it is known as.
        args: Its arguments.
        kwargs: Those given by name.
        out: What it returned.
        call: The function as it was called, an operator perhaps.
    """

    function: fn.Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    call: fn.Function

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument given by position or by any of its names."""
        return fn.argument(self.args, self.kwargs, position, *names, default=default)


class SinkColumn(NamedTuple):
    """A learned sink among scores: one more column, the same for every row of a head.

    Attributes:
        axis: The axis of the keys, which it lengthens.
        start: The first key.
        length: The number of keys.
    """

    axis: Axis
    start: int
    length: int


class Tag(NamedTuple):
    """What is known about a tensor.

    Attributes:
        kind: An activation, a weight, the entries of a product before they are summed up, the scores of a product, the
            largest scores of rows, or attention probabilities.
        layout: Its axes.
        scale: What it has been multiplied with; for scores since the product.
        product: Of scores: where they come from.
        masks: Of scores: masks seen so far, broadcastable to the tensor, with the semantics of SDPA.
        plain: Of scores: nothing but scaling and masking happened since the product.
        bent: Of scores: they went through a function that keeps neither their scale nor their sign, as a relu.
        assured: Of scores: nothing unknown happened since the product. Of probabilities: they are those of scores.
        doubted: Of scores: they may be a classifier's, and are an attention's if they go on to weigh values.
        sink: Of scores: the column among them that is none.
        shift: Of scores: what was subtracted from whole rows, which a softmax does not notice.
        on_use: Of probabilities: called once they meet a value.
        origin: Of probabilities that wait for that: what the softmax returned.
        held: The same, kept alive by what was made of it.
        waits_for_rows: Of probabilities: they are known for an attention's only where each row weighs all values.
        factors: Of the entries of a product, or what may be such: what was multiplied.
        since: What such entries have been multiplied with.
        learned: Of an activation: it is made of weights alone.
    """

    kind: Kind
    layout: Layout
    scale: Scale = Scale()
    product: Product | None = None
    masks: tuple[Tensor, ...] = ()
    plain: bool = True
    bent: bool = False
    assured: bool = True
    doubted: bool = False
    sink: SinkColumn | None = None
    shift: Tensor | None = None
    on_use: Callable[[], None] | None = None
    origin: weakref.ref[Tensor] | None = None
    held: Tensor | None = None
    waits_for_rows: bool = False
    factors: tuple[Tensor, Tensor] | None = None
    since: Scale = Scale()
    learned: bool = False

    def moved(self, layout: Layout) -> Tag:
        """Return the same with other axes: what most functions do, at a tenth of the cost of `_replace`."""
        return Tag._make((self.kind, layout, *self[2:]))

    @property
    def projection(self) -> bool:
        """Whether it is a product with a weight: as the factor of another product such is an activation."""
        return self.product is not None and any(self.product.weights)


class _Reference(weakref.ref[Tensor]):
    """A reference to a tensor that knows its place in the store; without an `__init__`, which would be slow."""

    __slots__ = ("key",)
    key: int


class TagStore:
    """The tags of tensors, for as long as the tensors live.

    Args:
        report: Takes the reason when scores are seen to weigh values without a softmax.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        # By identity, and without the wrappers of WeakTensorKeyDictionary: this is asked for every tensor there is.
        self._tags: dict[int, tuple[_Reference, Tag]] = {}
        # Python drops what a callback of a weak reference raises, a Ctrl-C above all: none of its lines may be ours.
        self._dead: list[weakref.ref[Tensor]] = []
        self._died = self._dead.append

    def __contains__(self, tensor: Tensor) -> bool:
        if self._dead:
            self._forget_dead()
        return id(tensor) in self._tags

    def clear(self) -> None:
        """Forget every tensor."""
        self._tags.clear()
        self._dead.clear()

    def _forget_dead(self) -> None:
        """Drop the tags of dead tensors, before another that lies at the same address takes them for its own."""
        while self._dead:
            reference = self._dead.pop()
            assert isinstance(reference, _Reference)
            entry = self._tags.get(reference.key)
            if entry is not None and entry[0] is reference:
                del self._tags[reference.key]  # which may be the end of further tensors

    def get(self, tensor: object) -> Tag | None:
        """Return the tag of a tensor; a parameter is a weight without one."""
        if self._dead:
            self._forget_dead()
        if (entry := self._tags.get(id(tensor))) is not None:
            return entry[1]
        if isinstance(tensor, Tensor) and _is_parameter(tensor):
            return Tag("weight", fresh(tensor.shape))
        return None

    def is_weight(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a weight."""
        if self._dead:
            self._forget_dead()
        entry = self._tags.get(id(tensor))
        return entry[1].kind == "weight" if entry is not None else _is_parameter(tensor)

    def is_learned(self, tensor: object) -> bool:
        """Tell whether a tensor is a weight or made of weights alone."""
        tag = self.get(tensor)
        return tag is not None and (tag.kind == "weight" or tag.learned)

    def any_known(self, values: Iterable[Any]) -> bool:
        """Tell whether anything is known about one of the tensors among arguments."""
        if self._dead:
            self._forget_dead()
        for value in values:
            if isinstance(value, (list, tuple)):
                if self.any_known(value):
                    return True
            elif id(value) in self._tags or (type(value) is not Tensor and isinstance(value, Tensor)):
                return True
        return False

    def weigh(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors that belong to a module for weights though they are no parameters."""
        for tensor in tensors:
            if tensor.is_floating_point():
                self.put(tensor, Tag("weight", fresh(tensor.shape)))

    def get_or_new(self, tensor: Tensor) -> Tag:
        """Return the tag of a tensor, one that knows nothing if it has none."""
        return self.get(tensor) or Tag("activation", fresh(tensor.shape))

    def put(self, tensor: object, tag: Tag | None) -> None:
        """Set or, with `None`, remove the tag of a tensor."""
        if not isinstance(tensor, Tensor):
            return
        if self._dead:
            self._forget_dead()
        if tag is not None:
            reference = _Reference(tensor, self._died)
            reference.key = key = id(tensor)
            self._tags[key] = (reference, tag)
        else:
            self._tags.pop(id(tensor), None)

    def written(self, tensor: Tensor) -> None:
        """Note that a tensor was written to: a buffer, or one it is a view of, holds activations from now on."""
        for changed in (tensor, tensor._base):
            if (tag := self.get(changed)) is not None and tag.kind == "weight":
                self.put(changed, None)

    def carry(self, tag: Tag, out: Tensor, layout: Layout | None = None, **changes: Any) -> None:
        """Tag a result as what one of its operands was, with some changes."""
        if tag.kind == "outer":
            self.put(out, None)  # whatever it is now, its sum is no product any more
            return
        if tag.origin is not None and (origin := tag.origin()) is not out:
            changes["held"] = origin
        layout = layout if layout is not None else reshaped(tag.layout, out.shape)
        if not changes and tag.factors is None:
            self.put(out, tag.moved(layout))
        else:
            self.put(out, tag._replace(**{"factors": None, "layout": layout, **changes}))

    def operand(self, candidates: Sequence[Any], out: Tensor) -> tuple[int, Tag] | None:
        """Return the operand that an elementwise result continues: scores before all else, then what has its shape."""
        tagged = [(i, tag) for i, tensor in enumerate(candidates) if (tag := self.get(tensor)) is not None]
        if len(tagged) < 2:
            return tagged[0] if tagged else None

        def rank(entry: tuple[int, Tag]) -> tuple[int, bool, bool, int]:
            i, tag = entry
            return _PRECEDENCE[tag.kind], tag.projection, candidates[i].shape != out.shape, i

        return min(tagged, key=rank)


def _is_parameter(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter: by its type where that is all it takes, for isinstance is slow here."""
    kind = type(tensor)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def without_factors(tag: Tag) -> Tag:
    """Return the tag of scores that are no longer those of one query and one key."""
    return tag._replace(product=replace(tag.product, left=None, right=None) if tag.product is not None else None)


def kept(tag: Tag, source: Tensor, out: Tensor) -> Layout:
    """Return the layout of an elementwise result: that of the operand unless it was broadcast."""
    return tag.layout if source.shape == out.shape else fresh(out.shape)

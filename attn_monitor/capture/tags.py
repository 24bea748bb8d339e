"""What is known about the tensors that are alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from attn_monitor.capture import functions as fn
from attn_monitor.capture.layout import Axis, Layout, fresh, reshaped
from attn_monitor.capture.products import Product, Scale

Kind: TypeAlias = Literal["activation", "weight", "scores", "largest", "probabilities", "unnormalised"]
_PRECEDENCE: dict[Kind, int] = {
    "scores": 0,
    "probabilities": 0,
    "unnormalised": 0,
    "activation": 1,
    "largest": 1,
    "weight": 2,
}


class Step(NamedTuple):
    """One call of a torch function that has run."""

    function: fn.Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

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
        kind: An activation, a weight, the scores of a product, the largest scores of rows, attention probabilities, or
            scores that went through something else than a softmax.
        layout: Its axes.
        scale: What it has been multiplied with; for scores since the product.
        product: Of scores: where they come from.
        masks: Of scores: masks seen so far, broadcastable to the tensor, with the semantics of SDPA.
        plain: Of scores: nothing but scaling and masking happened since the product.
        assured: Of scores: nothing unknown happened since the product.
        sink: Of scores: the column among them that is none.
        shift: Of scores: what was subtracted from whole rows, which a softmax does not notice.
        on_use: Of probabilities: called once they meet a value.
    """

    kind: Kind
    layout: Layout
    scale: Scale = Scale()
    product: Product | None = None
    masks: tuple[Tensor, ...] = ()
    plain: bool = True
    assured: bool = True
    sink: SinkColumn | None = None
    shift: Tensor | None = None
    on_use: Callable[[], None] | None = None

    @property
    def projection(self) -> bool:
        """Whether it is a product with a weight: as the factor of another product such is an activation."""
        return self.product is not None and any(self.product.weights)


class TagStore:
    """The tags of tensors, for as long as the tensors live.

    Args:
        report: Takes the reason when scores are seen to weigh values without a softmax.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self._tags: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._tags

    def clear(self) -> None:
        """Forget every tensor."""
        self._tags.clear()

    def get(self, tensor: object) -> Tag | None:
        """Return the tag of a tensor; a parameter is a weight without one."""
        if not isinstance(tensor, Tensor):
            return None
        tag: Tag | None = self._tags.get(tensor)
        if tag is None and isinstance(tensor, nn.Parameter):
            return Tag("weight", fresh(tensor.shape))
        return tag

    def get_or_new(self, tensor: Tensor) -> Tag:
        """Return the tag of a tensor, one that knows nothing if it has none."""
        return self.get(tensor) or Tag("activation", fresh(tensor.shape))

    def put(self, tensor: object, tag: Tag | None) -> None:
        """Set or, with `None`, remove the tag of a tensor."""
        if not isinstance(tensor, Tensor):
            return
        if tag is not None:
            self._tags[tensor] = tag
        else:
            self._tags.pop(tensor, None)

    def carry(self, tag: Tag, out: Tensor, layout: Layout | None = None, **changes: Any) -> None:
        """Tag a result as what one of its operands was, with some changes."""
        layout = layout if layout is not None else reshaped(tag.layout, out.shape)
        self.put(out, tag._replace(layout=layout, **changes))

    def operand(self, candidates: Sequence[Any], out: Tensor) -> tuple[int, Tag] | None:
        """Return the operand that an elementwise result continues: scores before all else, then what has its shape."""
        tagged = [(i, tag) for i, tensor in enumerate(candidates) if (tag := self.get(tensor)) is not None]

        def rank(entry: tuple[int, Tag]) -> tuple[int, bool, bool, int]:
            i, tag = entry
            return _PRECEDENCE[tag.kind], tag.projection, candidates[i].shape != out.shape, i

        return min(tagged, key=rank, default=None)


def kept(tag: Tag, source: Tensor, out: Tensor) -> Layout:
    """Return the layout of an elementwise result: that of the operand unless it was broadcast."""
    return tag.layout if source.shape == out.shape else fresh(out.shape)

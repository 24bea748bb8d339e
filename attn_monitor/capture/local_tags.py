"""What is known about a distributed tensor, said of the part that is in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from attn_monitor.capture.cuts import DIFFERENT, SEQUENCE, Cut, aligned, cuts
from attn_monitor.capture.layout import Axis, Layout
from attn_monitor.capture.products import Product, Scale
from attn_monitor.capture.sighting import UnmeasurableError
from attn_monitor.capture.tags import Tag, TagStore
from attn_monitor.tensor_parallel import UNEVEN, HeadShard, is_distributed, local_of


def follow_parts(tags: TagStore, out: Any) -> None:
    """Tag the parts of distributed activations: a model may go on with these alone."""
    for tensor in out if isinstance(out, (tuple, list)) else (out,):
        tag = tags.get(tensor) if is_distributed(tensor) else None
        if tag is not None and tag.kind == "activation":
            tags.put(tensor._local_tensor, local_tag(tag, tensor, strict=False))


@dataclass(slots=True)
class _Axes:
    """The axes that are cut, and what is left of them here.

    Attributes:
        parts: For the id of each cut axis what remains of it, and which part that is.
    """

    parts: dict[int, tuple[Axis, HeadShard]] = field(default_factory=dict)

    def cut(self, axis: Axis, part: HeadShard) -> None:
        """Cut an axis; of features the part is noted, since heads may be made of them."""
        if axis.size % part.count:
            raise UnmeasurableError(UNEVEN)
        mark = part if axis.channels else None
        left = replace(axis, size=axis.size // part.count, cut=None, shard=mark)
        self.parts[id(axis)] = left, part

    def of(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return what is left of axes."""
        return tuple(self.parts[id(axis)][0] if id(axis) in self.parts else axis for axis in axes)

    def scale(self, scale: Scale) -> Scale:
        """Return the scale of what is left."""
        number, doubt, vector = (_number(x) for x in (scale.number, scale.doubt, scale.vector))
        axis = scale.axis
        if axis is not None and id(axis) in self.parts and isinstance(vector, Tensor):
            axis, part = self.parts[id(axis)]
            vector = vector[part.place(axis.size)]
        return scale._replace(number=number, doubt=doubt, vector=vector, axis=axis)


def _number(number: Any) -> Any:
    """Return a factor as a plain number or tensor, as it is in all processes."""
    if not is_distributed(number):
        return number
    if cuts(number):
        raise UnmeasurableError("its scores are multiplied by a factor that is spread over processes")
    return local_of(number).detach()


def local_tag(tag: Tag, tensor: Any, *, strict: bool = True) -> Tag | None:
    """Return what is known of the part of a distributed tensor.

    Args:
        tag: What is known of all of it.
        tensor: The tensor.
        strict: Whether to raise where no part can be spoken of; else features are marked so that whoever makes heads
            of them raises.
    """
    try:
        axes, layout = _cut_axes(tag.layout, cuts(tensor))
        return tag._replace(layout=layout, scale=axes.scale(tag.scale), product=None, masks=(), shift=None, sink=None)
    except UnmeasurableError as error:
        if strict:
            raise
        shape = tensor._local_tensor.shape
        return Tag("activation", tuple((Axis(size, channels=True, shard=str(error)),) for size in shape))


def _cut_axes(layout: Layout, how: Sequence[Cut]) -> tuple[_Axes, Layout]:
    axes = _Axes()
    for cut in how:
        if not layout[cut.dim]:
            raise UnmeasurableError(UNEVEN)
        axes.cut(layout[cut.dim][0], cut.part)
    return axes, tuple(axes.of(dim) for dim in layout)


def local_scores(tag: Tag, logits: Any, dim: int) -> tuple[Tag, Tensor, tuple[Cut, ...]]:
    """Return what is known of the part of distributed scores, that part, and how the scores are cut.

    Args:
        tag: What is known of all scores.
        logits: The scores.
        dim: The axis of the softmax.

    Raises:
        UnmeasurableError: If no whole heads of whole samples are in this process.
    """
    product, how = tag.product, cuts(logits)
    assert product is not None, "only scores get here"
    batch_or_heads = {
        id(axis) for axis in (*product.heads, *(axis for axes in product.shared.values() for axis in axes))
    }
    for cut in how:
        first = tag.layout[cut.dim][:1]
        if cut.dim == dim or not first or id(first[0]) not in batch_or_heads:
            raise UnmeasurableError(SEQUENCE.format(what="scores", dim=cut.dim))
    axes, layout = _cut_axes(tag.layout, how)
    made = replace(
        product,
        shared={letter: axes.of(own) for letter, own in product.shared.items()},
        free={letter: axes.of(own) for letter, own in product.free.items()},
        heads=axes.of(product.heads),
        left=_factor(product, product.left, product.left_dims, axes),
        right=_factor(product, product.right, product.right_dims, axes),
        scales=(axes.scale(product.scales[0]), axes.scale(product.scales[1])),
    )
    shape = tuple(logits.shape)
    local = tag._replace(
        layout=layout,
        product=made,
        scale=axes.scale(tag.scale),
        masks=tuple(aligned(mask, how, shape) for mask in tag.masks),
        shift=None if tag.shift is None else aligned(tag.shift, how, shape),
    )
    return local, local_of(logits), how


def _factor(product: Product, factor: Any, dims: Sequence[str], axes: _Axes) -> Tensor | None:
    """Return the part of a factor that makes the scores of this process."""
    if not is_distributed(factor):
        return factor if isinstance(factor, Tensor) else None
    own = {cut.dim: cut.part for cut in cuts(factor)}
    for i, letter in enumerate(dims):
        outer = (product.shared.get(letter) or product.free.get(letter) or (None,))[0]
        part = axes.parts[id(outer)][1] if id(outer) in axes.parts and factor.shape[i] != 1 else None
        if own.pop(i, None) != part:
            raise UnmeasurableError(DIFFERENT.format(placements=str(tuple(factor.placements))))
    return local_of(factor)

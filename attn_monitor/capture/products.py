"""The product of two tensors, and how its axes become the batch, heads, queries and keys of an attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from attn_monitor.capture.heads import find_heads, free_axes, is_batch, shared_axes, side_of, with_heads_of_its_own
from attn_monitor.capture.layout import Axis, Layout

Number: TypeAlias = "float | Tensor"
Dims: TypeAlias = "tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]"
"""A letter per dimension of the left factor, the right factor and the product."""


_SURE = 1.0


class Scale(NamedTuple):
    """What a tensor has been multiplied with.

    Attributes:
        number: A number or 0-dim tensor.
        axis: The axis along which there is a value per slice.
        vector: These values.
        known: False where it was multiplied with more than that.
        doubt: nan where it was, 1 where it wasn't, if only the numbers tell.
    """

    number: Number = 1.0
    axis: Axis | None = None
    vector: Tensor | None = None
    known: bool = True
    doubt: Number = _SURE

    def times(self, number: Number = 1.0, axis: Axis | None = None, vector: Tensor | None = None) -> Scale:
        """Return the scale after another multiplication."""
        if axis is None:
            return self._replace(number=self.number * number)
        if self.axis is None:
            return self._replace(number=self.number * number, axis=axis, vector=vector)
        if self.axis is not axis or self.vector is None or vector is None:
            return self._replace(known=False)
        return self._replace(number=self.number * number, vector=self.vector * vector)

    def same(self, other: Scale) -> bool:
        """Tell whether both are known to be equal, without looking into a tensor."""
        numbers = self.number is other.number or (
            not isinstance(self.number, Tensor) and not isinstance(other.number, Tensor) and self.number == other.number
        )
        sure = self.known and other.known and self.doubt is other.doubt
        return numbers and sure and self.vector is other.vector

    def of_factor(self, heads: Sequence[Axis]) -> Number:
        """Return a number or one value per head; whatever else it was multiplied with belongs to the factor itself."""
        vector = self._spread(heads)
        return self.number if vector is None else self.number * vector

    def of_scores(self, heads: Sequence[Axis]) -> Number | None:
        """Return a number or one value per head, `None` where it is not the same within a head."""
        vector = self._spread(heads)
        if not self.known or (vector is None and self.vector is not None):
            return None
        number = self.number if self.doubt is _SURE else self.number * self.doubt
        return number if vector is None else number * vector

    def _spread(self, heads: Sequence[Axis]) -> Tensor | None:
        """Return the vector with one value per head, where heads may be several axes."""
        position = next((i for i, head in enumerate(heads) if head is self.axis), None)
        if position is None or self.vector is None:
            return None
        shape = [-1 if i == position else 1 for i in range(len(heads))]
        return self.vector.reshape(shape).expand([head.size for head in heads]).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of two tensors with named dimensions.

    Attributes:
        left: The first factor, `None` where its heads have been mixed since.
        right: The second factor.
        left_dims: A letter per dimension of `left`; alike for `right_dims` and `out_dims`.
        shared: By letter, the axes of the dimensions both factors and the product have, in the order of the product.
        free: By letter, the axes of the dimensions only one factor and the product have, in the order of the factors.
        heads: Those of all these that are heads, outermost first; none if nothing told which, so that all are pooled as
            one.
        scales: What `left` and `right` had been multiplied with.
        weights: Whether `left` and `right` are weights, not activations.
        depth: The length of the contracted axis: d_k.
    """

    left: Tensor | None
    right: Tensor | None
    left_dims: tuple[str, ...]
    right_dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    shared: dict[str, tuple[Axis, ...]]
    free: dict[str, tuple[Axis, ...]]
    heads: tuple[Axis, ...]
    scales: tuple[Scale, Scale]
    weights: tuple[bool, bool]
    depth: int


@cache
def matmul_dims(left: int, right: int) -> Dims:
    """Name the dimensions of a matmul of tensors with these numbers of dimensions."""
    batch = tuple(f"b{i}" for i in range(max(left, right) - 2))
    rows, columns = ("m",) if left > 1 else (), ("n",) if right > 1 else ()
    left_dims = (*batch[len(batch) - max(left - 2, 0) :], *rows, "d")
    right_dims = (*batch[len(batch) - max(right - 2, 0) :], "d", *columns)
    return left_dims, right_dims, (*batch, *rows, *columns)


def einsum_dims(equation: str, left: int, right: int) -> Dims | None:
    """Name the dimensions of an einsum of two operands, `None` for an equation with repeated letters."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        return None
    named: list[tuple[str, ...]] = []
    for term, count in zip(operands, (left, right), strict=True):
        head, dots, tail = term.partition("...")
        missing = count - len(head) - len(tail)
        named.append((*head, *(f".{i}" for i in range(missing, 0, -1)), *tail) if dots else tuple(term))
    ellipsis = max((tuple(d for d in dims if d[0] == ".") for dims in named), key=len)
    if arrow:
        head, dots, tail = output.partition("...")
        out = (*head, *ellipsis, *tail) if dots else tuple(output)
    else:
        letters = "".join(operands).replace(".", "")
        out = (*ellipsis, *sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(dims)) != len(dims) for dims in (*named, out)):
        return None
    return named[0], named[1], out


def inner_dims(left: int, right: int) -> Dims:
    """Name the dimensions of a product over the last dimensions, all others side by side."""
    return tensordot_dims(left, right, ([left - 1], [right - 1]))


def tensordot_dims(left: int, right: int, dims: Any) -> Dims:
    """Name the dimensions of a tensordot: over so many dimensions, or over those that are listed for each factor."""
    pairs = (range(left - dims, left), range(dims)) if isinstance(dims, int) else dims
    one, other = ([pair] if isinstance(pair, int) else list(pair) for pair in pairs)
    met = {dim % left: f"c{i}" for i, dim in enumerate(one)}
    left_dims = tuple(met.get(i, f"l{i}") for i in range(left))
    met = {dim % right: f"c{i}" for i, dim in enumerate(other)}
    right_dims = tuple(met.get(i, f"r{i}") for i in range(right))
    return left_dims, right_dims, tuple(dim for dim in (*left_dims, *right_dims) if dim[0] != "c")


def multiply(
    left: Tensor,
    right: Tensor,
    dims: Dims,
    layouts: tuple[Layout, Layout],
    scales: tuple[Scale, Scale],
    weights: tuple[bool, bool],
) -> tuple[Product, Layout]:
    """Describe a product and the layout of its result."""
    left_dims, right_dims, out_dims = dims
    left_axes = dict(zip(left_dims, layouts[0], strict=True))
    right_axes = dict(zip(right_dims, layouts[1], strict=True))
    left_sizes = dict(zip(left_dims, left.shape, strict=True))
    right_sizes = dict(zip(right_dims, right.shape, strict=True))

    contracted = [dim for dim in left_dims if dim in right_axes and dim not in out_dims]
    sides = (
        side_of("left", left_axes, right_dims, out_dims, weight=weights[0]),
        side_of("right", right_axes, left_dims, out_dims, weight=weights[1]),
    )
    alone = with_heads_of_its_own(sides)
    shared = {
        dim: shared_axes(left_axes.get(dim, ()), right_axes.get(dim, ()), sides)
        for dim in out_dims
        if is_batch(dim) or (dim in left_axes and dim in right_axes)
    }
    free: dict[str, tuple[Axis, ...]] = {}
    for side, sizes in zip(sides, (left_sizes, right_sizes), strict=True):
        # Two free dimensions of a weight, as in a projection straight into heads, are one embedding split in two.
        parent = Axis(math.prod(sizes[dim] for dim in side.free)) if side.weight else None
        free |= {dim: free_axes(side, dim, sizes[dim], parent, split=side is alone) for dim in side.free}
    heads = find_heads(shared, free, sides, alone, right_sizes)
    made = shared | free
    product = Product(
        left=left,
        right=right,
        left_dims=left_dims,
        right_dims=right_dims,
        out_dims=out_dims,
        shared=shared,
        free=free,
        heads=heads,
        scales=(_along(scales[0], left_axes, made), _along(scales[1], right_axes, made)),
        weights=weights,
        depth=math.prod(left_sizes[dim] for dim in contracted),
    )
    return product, tuple(made[dim] for dim in out_dims)


def _along(scale: Scale, own: dict[str, tuple[Axis, ...]], made: dict[str, tuple[Axis, ...]]) -> Scale:
    """Return the scale of a factor along the axis of the product that its own axis has become."""
    if scale.axis is None:
        return scale
    for dim, axes in own.items():
        for mine, common in zip(axes, made.get(dim, ()), strict=False):
            if mine is scale.axis and mine.size == common.size and len(axes) == len(made[dim]):
                return scale._replace(axis=common)
    return scale

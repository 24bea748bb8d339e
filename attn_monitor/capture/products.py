"""The product of two tensors, and how its axes become the batch, heads, queries and keys of an attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from attn_monitor.capture.layout import Axis, Layout, Role

Number: TypeAlias = "float | Tensor"
Dims: TypeAlias = "tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]"
"""A letter per dimension of the left factor, the right factor and the product."""


class Scale(NamedTuple):
    """What a tensor has been multiplied with: a number or 0-dim tensor, and possibly a value per slice of an axis."""

    number: Number = 1.0
    axis: Axis | None = None
    vector: Tensor | None = None

    def times(self, number: Number = 1.0, axis: Axis | None = None, vector: Tensor | None = None) -> Scale | None:
        """Return the scale after another multiplication, `None` if it can't be told."""
        if axis is None:
            return Scale(self.number * number, self.axis, self.vector)
        if self.axis is None:
            return Scale(self.number * number, axis, vector)
        if self.axis is not axis or self.vector is None or vector is None:
            return None
        return Scale(self.number * number, axis, self.vector * vector)

    def same(self, other: Scale) -> bool:
        """Tell whether both are known to be equal, without looking into a tensor."""
        numbers = self.number is other.number or (
            not isinstance(self.number, Tensor) and not isinstance(other.number, Tensor) and self.number == other.number
        )
        return numbers and self.vector is other.vector

    def per_head(self, heads: Sequence[Axis]) -> Number:
        """Return a number or one value per head; a vector along another axis belongs to the tensor itself."""
        if self.vector is not None and len(heads) == 1 and heads[0] is self.axis:
            return self.number * self.vector
        return self.number


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of two tensors with named dimensions.

    Attributes:
        left: The first factor, `None` where its heads have been mixed since.
        right: The second factor.
        left_dims: A letter per dimension of `left`; alike for `right_dims` and `out_dims`.
        shared: By letter, the axes of the dimensions both factors and the product have, in the order of the product.
        heads: Those of them that are heads.
        heads_known: False if nothing told which axis the heads are, so that all are pooled as one.
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
    heads: tuple[Axis, ...]
    heads_known: bool
    scales: tuple[Scale, Scale]
    weights: tuple[bool, bool]
    depth: int


def matmul_dims(left: int, right: int) -> Dims:
    """Name the dimensions of a matmul of tensors with these numbers of dimensions."""
    batch = tuple(f"b{i}" for i in range(max(left, right) - 2))
    left_dims = (*batch[len(batch) - (left - 2) :], "m", "d")
    right_dims = (*batch[len(batch) - (right - 2) :], "d", "n")
    return left_dims, right_dims, (*batch, "m", "n")


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
    parents = {
        id(axis.parent) for dim in contracted for axis in (*left_axes[dim], *right_axes[dim]) if axis.parent is not None
    }
    # Two free dimensions of a weight, as in a projection straight into heads, are one embedding split in two.
    parent = [
        Axis(math.prod(sizes[d] for d in own if d not in other)) if is_weight else None
        for own, other, sizes, is_weight in (
            (left_axes, right_axes, left_sizes, weights[0]),
            (right_axes, left_axes, right_sizes, weights[1]),
        )
    ]
    layout: list[tuple[Axis, ...]] = []
    shared: dict[str, tuple[Axis, ...]] = {}
    for dim in out_dims:
        batch = dim in left_axes and dim in right_axes
        # A matmul broadcasts, so a leading dimension may be missing in one factor and is still a batch dimension.
        if batch or dim.startswith(("b0", "b1", "b2", "b3", "b4", ".")):
            axes = _shared_axes(left_axes.get(dim, ()), right_axes.get(dim, ()), parents)
            shared[dim] = axes
            layout.append(axes)
        else:
            role: Role = "left" if dim in left_axes else "right"
            size = (left_sizes if role == "left" else right_sizes)[dim]
            layout.append((Axis(size, parent[0 if role == "left" else 1], role),))

    heads = _sibling_heads(list(shared.values()), parents)
    known = True
    if not heads:
        heads, known = _guess_heads(list(shared.values()), [right_sizes.get(dim, 1) for dim in shared])
    product = Product(
        left=left,
        right=right,
        left_dims=left_dims,
        right_dims=right_dims,
        out_dims=out_dims,
        shared=shared,
        heads=heads,
        heads_known=known,
        scales=scales,
        weights=weights,
        depth=math.prod(left_sizes[dim] for dim in contracted),
    )
    return product, tuple(layout)


def _shared_axes(left: tuple[Axis, ...], right: tuple[Axis, ...], parents: set[int]) -> tuple[Axis, ...]:
    """Return the axes of a dimension both factors have: the left one's unless it is broadcast or knows less."""
    lengths = [math.prod(axis.size for axis in axes) for axes in (left, right)]
    if lengths[0] == 1:
        return right or left
    siblings = [any(axis.parent is not None and id(axis.parent) in parents for axis in axes) for axes in (left, right)]
    return right if lengths[0] == lengths[1] and siblings == [False, True] else left


def _sibling_heads(shared: list[tuple[Axis, ...]], parents: set[int]) -> tuple[Axis, ...]:
    """Return the axes that were split off together with the contracted one.

    In the first dimension they may be folded into the batch; in a later one, what is with them is heads too.
    """
    heads: list[Axis] = []
    for i, axes in enumerate(shared):
        siblings = [axis for axis in axes if axis.parent is not None and id(axis.parent) in parents]
        heads += axes if siblings and i > 0 else siblings
    return tuple(heads)


def _guess_heads(shared: list[tuple[Axis, ...]], right_sizes: list[int]) -> tuple[tuple[Axis, ...], bool]:
    """Choose the head axes where no axis is a sibling of the contracted one."""
    if len(shared) >= 2:
        # Grouped queries against a broadcast key head: the heads are (key head, group).
        grouped = len(shared) >= 3 and right_sizes[-1] == 1
        return tuple(axis for axes in shared[-2 if grouped else -1 :] for axis in axes), True
    if len(shared) == 1 and len(shared[0]) >= 2:
        return shared[0][-1:], True
    return (), False

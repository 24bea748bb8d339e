"""Which axis of a tensor is which: axes are followed through views and reshapes.

A layout lists, for each dimension of a tensor, the axes that dimension is made of, outermost first. Folding heads
into the batch gives one dimension of two axes; splitting an embedding into heads gives two axes with one parent.
That is how the head axis is recognised without knowing the model: it is the sibling of the contracted axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from attn_monitor.tensor_parallel import HeadShard

Role: TypeAlias = Literal["left", "right"]


@dataclass(slots=True, eq=False)  # made for every view of every tensor, and freezing makes that three times slower
class Axis:
    """An axis of a tensor, compared by identity, never changed.

    Attributes:
        size: Its length.
        parent: The axis it was split from.
        role: The side of a product whose free axis it is.
        cut: The axis whose outer (0) or inner (1) half it is: together the halves are that axis again.
        channels: Whether it was made by a weight: a softmax over it is a router's or a classifier's.
        stride: How many entries of the parent are from one of its own to the next.
        shard: Which part of the features of a projection it is or was split from, where they are spread over processes;
            the reason where that is not known.
    """

    size: int
    parent: Axis | None = None
    role: Role | None = None
    cut: tuple[Axis, int] | None = None
    channels: bool = False
    stride: int = 1
    shard: HeadShard | str | None = None

    def resized(self, size: int) -> Axis:
        """Return the axis that remains of this one after slicing or concatenation."""
        if size == self.size:
            return self
        return Axis(size, self.parent, self.role, None, self.channels, self.stride, self.shard)


Layout: TypeAlias = tuple[tuple[Axis, ...], ...]


def fresh(shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor about which nothing is known."""
    return tuple((Axis(size),) for size in shape)


def sizes(layout: Layout) -> tuple[int, ...]:
    """Return the shape that a layout describes."""
    return tuple(dim[0].size if len(dim) == 1 else math.prod(axis.size for axis in dim) for dim in layout)


def settled(layout: Layout) -> Layout:
    """Return the layout of a product that becomes the factor of another: what its axes were to the first is over."""
    if all(axis.role is None for dim in layout for axis in dim):
        return layout
    return tuple(
        tuple(
            axis
            if axis.role is None
            else Axis(axis.size, axis.parent, None, None, axis.channels, axis.stride, axis.shard)
            for axis in dim
        )
        for dim in layout
    )


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout after a reshape: axes merge into one dimension or split into siblings.

    Where the new shape cuts an axis unevenly nothing can be said: only what is the same at both ends stays.
    """
    before, after = sizes(layout), tuple(shape)
    if math.prod(before) != math.prod(after):
        return fresh(shape)
    if (whole := _regrouped(layout, after)) is not None:
        return whole
    lead = _common(before, after)
    trail = _common(before[lead:][::-1], after[lead:][::-1])
    end = len(after) - trail
    return (*layout[:lead], *fresh(after[lead:end]), *layout[len(before) - trail :])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many sizes are the same from the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _regrouped(layout: Layout, shape: Sequence[int]) -> Layout | None:
    remaining = [axis for dim in layout for axis in dim if axis.size != 1]
    result: list[tuple[Axis, ...]] = []
    for size in shape:
        dim: list[Axis] = []
        missing = size
        while missing > 1:
            if not remaining:
                return None
            axis = remaining.pop(0)
            if missing % axis.size == 0:
                dim.append(axis)
                missing //= axis.size
            elif axis.size % missing == 0:
                # A second split of the same axis yields siblings of the first: they share the outermost parent.
                parent = axis.parent or axis
                inner = axis.size // missing
                dim.append(Axis(missing, parent, axis.role, (axis, 0), axis.channels, axis.stride * inner, axis.shard))
                remaining.insert(0, Axis(inner, parent, axis.role, (axis, 1), axis.channels, axis.stride, axis.shard))
                missing = 1
            else:
                return None
            if len(dim) > 1:
                _mend(dim)
        result.append(tuple(dim))
    return tuple(result) if not remaining else None


def _mend(dim: list[Axis]) -> None:
    """Put the halves of an axis together again where they meet."""
    while len(dim) >= 2 and (outer := dim[-2].cut) is not None and (inner := dim[-1].cut) is not None:
        if outer[0] is not inner[0] or (outer[1], inner[1]) != (0, 1):
            return
        dim[-2:] = [outer[0]]


def resized(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout after dimensions got shorter or longer, none of them moved."""
    return tuple(
        axes if now == size else (axes[0].resized(size) if len(axes) == 1 else Axis(size),)
        for axes, now, size in zip(layout, sizes(layout), shape, strict=True)
    )


def extended(layout: Layout, dim: int, length: int) -> Layout:
    """Return the layout after a dimension got longer."""
    axes = layout[dim]
    return (*layout[:dim], (axes[0].resized(length) if len(axes) == 1 else Axis(length),), *layout[dim + 1 :])


# Strides no slice step can turn into one another.
_PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121, 1000133, 1000151)


def proxy(shape: Sequence[int]) -> Tensor:
    """Return a tensor without memory whose strides name its dimensions, to run a view operation on."""
    return torch.empty_strided(tuple(shape), _PRIMES[: len(shape)], device="meta")


def dimension(stride: int, dims: int) -> int | None:
    """Return the dimension of a proxy that this stride belongs to."""
    return next((i for i, prime in enumerate(_PRIMES[:dims]) if stride and stride % prime == 0), None)


def moved(layout: Layout, view: Tensor) -> Layout:
    """Return the layout of `view`, what a view operation made of the `proxy` of a tensor with this layout."""
    dims: list[tuple[Axis, ...]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        source = dimension(stride, len(layout))
        if source is None:
            dims.append((Axis(size),) if size != 1 else ())
        elif len(layout[source]) == 1:
            dims.append((layout[source][0].resized(size),))
        else:
            whole = size == math.prod(axis.size for axis in layout[source])
            dims.append(layout[source] if whole else (Axis(size),))
    return tuple(dims)

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

Role: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """An axis of a tensor, compared by identity.

    Attributes:
        size: Its length.
        parent: The axis it was split from.
        role: The side of a product whose free axis it is.
    """

    size: int
    parent: Axis | None = None
    role: Role | None = None

    def resized(self, size: int) -> Axis:
        """Return the axis that remains of this one after slicing or concatenation."""
        return self if size == self.size else Axis(size, self.parent, self.role)


Layout: TypeAlias = tuple[tuple[Axis, ...], ...]


def fresh(shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor about which nothing is known."""
    return tuple((Axis(size),) for size in shape)


def sizes(layout: Layout) -> tuple[int, ...]:
    """Return the shape that a layout describes."""
    return tuple(math.prod(axis.size for axis in dim) for dim in layout)


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout after a reshape: axes merge into one dimension or split into siblings.

    Where the new shape cuts an axis unevenly nothing can be said, and all axes are fresh.
    """
    remaining = [axis for dim in layout for axis in dim if axis.size != 1]
    result: list[tuple[Axis, ...]] = []
    for size in shape:
        dim: list[Axis] = []
        while (missing := size // max(math.prod(axis.size for axis in dim), 1)) > 1:
            if not remaining:
                return fresh(shape)
            axis = remaining.pop(0)
            if missing % axis.size == 0:
                dim.append(axis)
            elif axis.size % missing == 0:
                # A second split of the same axis yields siblings of the first: they share the outermost parent.
                parent = axis.parent or axis
                dim.append(Axis(missing, parent, axis.role))
                remaining.insert(0, Axis(axis.size // missing, parent, axis.role))
            else:
                return fresh(shape)
        result.append(tuple(dim))
    return tuple(result) if not remaining else fresh(shape)


# Strides no slice step can turn into one another.
_PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121, 1000133, 1000151)


def proxy(shape: Sequence[int]) -> Tensor:
    """Return a tensor without memory whose strides name its dimensions, to run a view operation on."""
    return torch.empty_strided(tuple(shape), _PRIMES[: len(shape)], device="meta")


def moved(layout: Layout, view: Tensor) -> Layout:
    """Return the layout of `view`, what a view operation made of the `proxy` of a tensor with this layout."""
    dims: list[tuple[Axis, ...]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        source = next((i for i, prime in enumerate(_PRIMES[: len(layout)]) if stride and stride % prime == 0), None)
        if source is None:
            dims.append((Axis(size),) if size != 1 else ())
        elif len(layout[source]) == 1:
            dims.append((layout[source][0].resized(size),))
        else:
            whole = size == math.prod(axis.size for axis in layout[source])
            dims.append(layout[source] if whole else (Axis(size),))
    return tuple(dims)

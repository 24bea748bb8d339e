"""Which axes of a product are heads: those that were split off together with the contracted axis.

Heads that both factors have are batched over. Grouped and multi-query attention have heads that only the queries have,
side by side with the rows or folded into them; there they are known by that kinship alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeAlias

from attn_monitor.capture.layout import Axis, Role

Named: TypeAlias = "Mapping[str, tuple[Axis, ...]]"
"""The axes of each dimension, by its letter."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A factor of a product.

    Attributes:
        role: Which.
        axes: Its axes by dimension.
        free: Its dimensions that only it has and that are not contracted.
        parents: What its contracted axes were split from.
        weight: Whether it is a weight.
    """

    role: Role
    axes: Named
    free: tuple[str, ...]
    parents: frozenset[int]
    weight: bool

    def akin(self, axis: Axis) -> bool:
        """Tell whether an axis was split off together with the contracted one."""
        return axis.parent is not None and id(axis.parent) in self.parents

    @property
    def own_heads(self) -> list[Axis]:
        """What among its free axes looks like heads."""
        return [axis for dim in self.free for axis in self.axes[dim] if self.akin(axis)]

    @property
    def others(self) -> bool:
        """Whether it has a free axis that is akin to nothing."""
        return any(not self.axes[dim] or not all(map(self.akin, self.axes[dim])) for dim in self.free)

    @property
    def doubtful(self) -> bool:
        """Whether there are several free dimensions, and nothing tells if one of them holds heads."""
        return len(self.free) > 1 and not self.parents


def side_of(role: Role, axes: Named, other: Collection[str], out: Collection[str], *, weight: bool) -> Side:
    """Describe a factor by its axes and the dimensions of the other factor and of the product."""
    met = [axis for dim in axes if dim in other and dim not in out for axis in axes[dim]]
    free = tuple(dim for dim in axes if dim in out and dim not in other and not is_batch(dim))
    return Side(role, axes, free, frozenset(id(axis.parent) for axis in met if axis.parent is not None), weight)


@cache
def is_batch(dim: str) -> bool:
    """Tell whether a dimension is batched over though one factor may lack it, as those in front in a matmul."""
    return dim.startswith(("b0", "b1", "b2", "b3", "b4", "."))


def with_heads_of_its_own(sides: tuple[Side, Side]) -> Side | None:
    """Return the factor that alone has some of the heads, `None` if neither has.

    Where both have, heads attend to heads, and they are what rows and keys are made of.
    """
    having = [side for side in sides if side.own_heads]
    return having[0] if len(having) == 1 and any(side.others for side in sides) else None


def free_axes(side: Side, dim: str, size: int, parent: Axis | None, *, split: bool) -> tuple[Axis, ...]:
    """Return the axes that a free dimension of a factor has in the product: one, and the heads apart if there are."""
    axes, role = side.axes[dim], side.role
    if not split or not any(map(side.akin, axes)):
        made = any(side.akin(axis) or axis.channels for axis in axes) and not side.weight
        return (Axis(size, parent, role, channels=made),)
    parts: list[Axis] = []
    for head, run in groupby(axes, side.akin):
        if head:
            parts += [Axis(axis.size, axis.parent, role, channels=True, stride=axis.stride) for axis in run]
        else:
            parts.append(Axis(math.prod(axis.size for axis in run), parent, role))
    return tuple(parts)


def shared_axes(left: tuple[Axis, ...], right: tuple[Axis, ...], sides: tuple[Side, Side]) -> tuple[Axis, ...]:
    """Return the axes of a dimension both factors have: the left one's unless it is broadcast or knows less."""
    lengths = [math.prod(axis.size for axis in axes) for axes in (left, right)]
    if lengths[0] == 1:
        return right or left
    siblings = [any(side.akin(axis) for side in sides for axis in axes) for axes in (left, right)]
    return right if lengths[0] == lengths[1] and siblings == [False, True] else left


def find_heads(
    shared: Named, free: Named, sides: tuple[Side, Side], alone: Side | None, right_sizes: Mapping[str, int]
) -> tuple[Axis, ...]:
    """Return the axes that are heads, outermost first; none where that is not known."""
    heads = _sibling_heads(list(shared.values()), sides)
    if alone is not None:
        return _in_order(heads, shared, free, alone)
    if any(side.doubtful for side in sides) or (not heads and all(side.own_heads for side in sides)):
        return ()
    if heads:
        return tuple(heads)
    return _guess_heads(list(shared.values()), [right_sizes.get(dim, 1) for dim in shared])


def _sibling_heads(shared: list[tuple[Axis, ...]], sides: tuple[Side, Side]) -> list[Axis]:
    """Return the axes both factors have that were split off together with the contracted one.

    In the first dimension they may be folded into the batch; in a later one, what is with them is heads too.
    """
    heads: list[Axis] = []
    for i, axes in enumerate(shared):
        siblings = [axis for axis in axes if any(side.akin(axis) for side in sides)]
        heads += axes if siblings and i > 0 else siblings
    return heads


def _in_order(heads: list[Axis], shared: Named, free: Named, alone: Side) -> tuple[Axis, ...]:
    """Return heads of both factors and of one alone, in the order in which that one was split into them."""
    own = [axis for dim in alone.free for axis in free[dim] if alone.akin(axis)]
    place: dict[int, int] = {id(axis): axis.stride for axis in own}
    for dim, common in shared.items():
        mine = alone.axes.get(dim, ())
        if len(mine) == len(common):
            place |= {id(axis): one.stride for axis, one in zip(common, mine, strict=True) if alone.akin(one)}
    every = [*heads, *own]
    if all(id(axis) in place for axis in every):
        every.sort(key=lambda axis: -place[id(axis)])
    return tuple(every)


def _guess_heads(shared: list[tuple[Axis, ...]], right_sizes: list[int]) -> tuple[Axis, ...]:
    """Choose the head axes where no axis is a sibling of the contracted one."""
    if len(shared) >= 2:
        # Grouped queries against a broadcast key head: the heads are (key head, group).
        grouped = len(shared) >= 3 and right_sizes[-1] == 1
        return tuple(axis for axes in shared[-2 if grouped else -1 :] for axis in axes)
    # Of what is folded into one dimension nothing tells heads from frames or windows.
    return ()

"""From the factors of a product to the queries and keys of an attention, in canonical axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import takewhile

from torch import Tensor

from attn_monitor.capture.layout import Axis
from attn_monitor.capture.products import Product


def canonical_factors(
    product: Product, batch: Sequence[Axis], heads: Sequence[Axis], lengths: tuple[int, int], *, swapped: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return query [B, H, Q, D] and key [B, G, K, D], `None` where they no longer fit the logits.

    Args:
        product: What the logits are of.
        batch: The axes of the logits that are batch.
        heads: Those that are heads, outermost first.
        lengths: How many queries and keys the logits have.
        swapped: Whether the keys are the left factor.
    """
    if product.left is None or product.right is None:
        return None, None
    batch, heads = ([axis for axis in group if axis.size != 1] for group in (batch, heads))
    common = {id(axis) for axes in product.shared.values() for axis in axes if axis.size != 1}
    alone = {id(axis) for axes in product.free.values() for axis in axes} & {id(axis) for axis in heads}
    if {id(axis) for axis in (*batch, *heads)} != common | alone:
        return None, None
    query, key = (product.left, product.left_dims), (product.right, product.right_dims)
    if swapped:
        query, key = key, query
    served = _served(*key, product, heads)
    made = (_canonical(*query, product, batch, heads), _canonical(*key, product, batch, heads[: len(heads) - served]))
    return made if (made[0].shape[2], made[1].shape[2]) == lengths else (None, None)


def _served(key: Tensor, dims: tuple[str, ...], product: Product, heads: Sequence[Axis]) -> int:
    """Return of how many of the head axes, from the innermost on, the key knows nothing: one serves a whole group."""
    sizes = zip(dims, key.shape, strict=True)
    own = {id(axis) for dim, size in sizes if size != 1 for axis in _axes(product, dim)}
    return len(list(takewhile(lambda axis: id(axis) not in own, reversed(heads))))


def _axes(product: Product, dim: str) -> tuple[Axis, ...]:
    return product.shared.get(dim) or product.free.get(dim) or ()


def _canonical(
    tensor: Tensor, dims: tuple[str, ...], product: Product, batch: Sequence[Axis], heads: Sequence[Axis]
) -> Tensor:
    """Bring a factor of the product into [B, heads, rows, D]."""
    wanted = {id(axis) for axis in (*batch, *heads)}
    tensor, names = _apart(tensor.detach(), dims, product, wanted)
    for axis in (*batch, *heads):
        if id(axis) not in names:
            tensor = tensor.unsqueeze(0).expand(axis.size, *tensor.shape)
            names.insert(0, id(axis))
    places = [[names.index(id(axis)) for axis in group] for group in (batch, heads)]
    free = [i for i, name in enumerate(names) if isinstance(name, str) and name in product.out_dims]
    depth = [i for i, name in enumerate(names) if isinstance(name, str) and name not in product.out_dims]
    depth.sort(key=lambda i: product.left_dims.index(str(names[i])))  # alike in both factors
    rest = [i for i in range(tensor.dim()) if i not in (*places[0], *places[1], *free, *depth)]
    groups = ([*rest, *places[0]], places[1], free, depth)
    if groups == ([0], [1], [2], [3]):
        return tensor
    shape = [math.prod(tensor.shape[i] for i in group) for group in groups]
    return tensor.permute([i for group in groups for i in group]).reshape(shape)


def _apart(
    tensor: Tensor, dims: tuple[str, ...], product: Product, wanted: Collection[int]
) -> tuple[Tensor, list[object]]:
    """Take apart what dimensions are made of: each is then named by its axis, or by its letter if that is all it is."""
    names: list[object] = []
    for dim in reversed(dims):
        position = tensor.dim() - len(names) - 1
        axes, common = _axes(product, dim), dim in product.shared
        needed = [axis for axis in axes if id(axis) in wanted]
        if not needed or (tensor.shape[position] == 1 and not common):
            names.insert(0, None if common else dim)
            continue
        # One factor may be broadcast along a dimension they share.
        whole = list(tensor.shape)
        whole[position] = math.prod(axis.size for axis in axes)
        if whole != list(tensor.shape):
            tensor = tensor.expand(whole)
        if len(axes) > 1:
            tensor = tensor.unflatten(position, [axis.size for axis in axes])
        names[:0] = [id(axis) if common or id(axis) in wanted else dim for axis in axes]
    return tensor, names

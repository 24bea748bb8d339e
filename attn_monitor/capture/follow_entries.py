"""Rules for products whose entries are multiplied first and summed up then, as people do for one query."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.capture.follow_products import product
from attn_monitor.capture.layout import fresh
from attn_monitor.capture.products import Scale
from attn_monitor.capture.tags import Step, Tag, TagStore


def vecdot(tags: TagStore, step: Step) -> None:
    """Follow a product of vectors that are broadcast against each other."""
    left, right, dim = step.argument(0, "x"), step.argument(1, "y"), step.argument(2, "dim", default=-1)
    _broadcast(tags, left, right, dim, step.out)


def total(tags: TagStore, step: Step) -> None:
    """Follow the sum over a dimension: of the entries of a product, or of the probabilities of several rows."""
    _total(tags, step, mean=False)


def mean(tags: TagStore, step: Step) -> None:
    """Follow a mean over a dimension, which is a sum with another scale."""
    _total(tags, step, mean=True)


def _total(tags: TagStore, step: Step, *, mean: bool) -> None:
    source, dim = step.args[0], step.argument(1, "dim", "axis")
    if (tag := tags.get(source)) is None:
        return
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if tag.factors is not None and isinstance(dim, int):
        scale = tag.scale if tag.kind == "outer" else tag.since
        scale = scale.times(1 / source.shape[dim]) if mean else scale
        _broadcast(tags, *tag.factors, dim, step.out, scale)
        _keep_dim(tags, step, dim % source.dim())
    elif tag.kind == "probabilities" and tag.assured and step.out.dim():
        tags.carry(tag, step.out, fresh(step.out.shape))


def _keep_dim(tags: TagStore, step: Step, dim: int) -> None:
    tag = tags.get(step.out)
    if tag is not None and tag.kind == "scores":
        kept = step.out.dim() > len(tag.layout)
        layout = (*tag.layout[:dim], (), *tag.layout[dim:]) if kept else tag.layout
        tags.put(step.out, tag._replace(layout=layout, doubted=True))


def _broadcast(tags: TagStore, left: Tensor, right: Tensor, dim: int, out: Tensor, scale: Scale | None = None) -> None:
    """Follow a product over one dimension of two tensors whose other dimensions are broadcast."""
    full = torch.broadcast_shapes(left.shape, right.shape)
    summed = dim % len(full)
    named: list[tuple[str, ...]] = []
    factors: list[tuple[Tensor, Tag | None]] = []
    for tensor, other in ((left, right), (right, left)):
        size, other_size = ([1] * (len(full) - t.dim()) + list(t.shape) for t in (tensor, other))
        wide = [i for i in range(len(full)) if size[i] != 1 or other_size[i] == 1]
        named.append(tuple(f"o{i}" for i in wide))
        tag, start = tags.get(tensor), len(full) - tensor.dim()
        if tag is not None:
            tag = tag._replace(layout=tuple(tag.layout[i - start] if i >= start else () for i in wide))
        factors.append((tensor.reshape([size[i] for i in wide]), tag))
    if not all(f"o{summed}" in dims for dims in named):
        return
    names = tuple(f"o{i}" for i in range(len(full)) if i != summed)
    (one, one_tag), (two, two_tag) = factors
    product(tags, one, two, (named[0], named[1], names), out, (one_tag, two_tag))
    if scale is not None and (tag := tags.get(out)) is not None and tag.kind == "scores":
        tags.put(out, tag._replace(scale=scale))

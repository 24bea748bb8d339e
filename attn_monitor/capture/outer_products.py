"""Products that are written out: what is multiplied entry by entry may be summed up later, as queries times keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_monitor.capture.layout import resized
from attn_monitor.capture.tags import TagStore


def is_outer(tags: TagStore, pair: tuple[Any, Any], out: Tensor) -> bool:
    """Tell whether two activations were multiplied, each with all entries of the other: a product, once summed up."""
    if out.dim() < 3 or not all(isinstance(x, Tensor) and x.shape != out.shape and x.dim() > 1 for x in pair):
        return False
    kinds = [tag.kind for x in pair if (tag := tags.get(x)) is not None and not tag.projection]
    return not {"weight", "scores", "outer", "largest"} & set(kinds)


def broadcast_factors(tags: TagStore, pair: tuple[Any, Any], out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return two activations one of which is broadcast to the other, `None` if they are not that.

    Most such products are gains and gates. Their sum over a dimension that both have is a product: of one query with
    many keys, or of one row of probabilities with values.
    """
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() for x in pair) or out.dim() < 2:
        return None
    if any(x is out for x in pair):  # multiplied in place, so one of them is no longer what it was
        return None
    for tag in map(tags.get, pair):
        if tag is None or tag.projection:
            continue
        if tag.kind not in ("activation", "probabilities") or (tag.kind == "probabilities" and not tag.assured):
            return None
    whole = [x.shape == out.shape for x in pair]
    thin = [_thin(tags, x) if alike else x for x, alike in zip(pair, whole, strict=True)]
    narrow = [x.shape != out.shape and x.numel() > 1 for x in thin]
    return (thin[0], thin[1]) if any(whole) and narrow.count(True) == 1 else None


def _thin(tags: TagStore, tensor: Tensor) -> Tensor:
    """Return an expanded tensor as it was before."""
    thin = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            thin = thin.narrow(dim, 0, 1)
    if thin.shape == tensor.shape:
        return tensor
    if (tag := tags.get(tensor)) is not None:
        tags.put(thin, tag._replace(layout=resized(tag.layout, thin.shape)))
    return thin

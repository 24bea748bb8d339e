"""Attention that is spread over processes: the operands that are here, and which of the heads they have.

It is measured where each process has some of the samples or of the heads, whole and alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attn_monitor.capture.cuts import SEQUENCE, Cut, aligned, cuts, different
from attn_monitor.capture.layout import Axis
from attn_monitor.capture.local_tags import local_tag
from attn_monitor.capture.sighting import UnmeasurableError
from attn_monitor.capture.tags import Tag, TagStore
from attn_monitor.tensor_parallel import UNEVEN, HeadShard, is_distributed, local_of


def local_operands(
    tags: TagStore, operands: tuple[Any, Any, Any], mask: Any
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, tuple[Cut, ...]]:
    """Return the parts of query, key and value, all [B, H, rows, D], and of a mask, and how the queries are cut.

    Raises:
        UnmeasurableError: If no whole heads of whole samples are in this process.
    """
    query, key, value = operands
    if not all(is_distributed(x) and x.dim() == 4 for x in operands):
        raise UnmeasurableError(
            "distributed tensors (DTensor) are measured where query, key and value all are, with shape [B, H, rows, D]"
        )
    how = cuts(query)
    for cut in how:
        if cut.dim > 1:
            raise UnmeasurableError(SEQUENCE.format(what="queries", dim=cut.dim))
    for other in (key, value):
        # Where there is one head for all, or one sample, it is everywhere.
        same = tuple(cut for cut in how if other.shape[cut.dim] != 1)
        if cuts(other) != same or other.device_mesh != query.device_mesh:
            if any(cut.dim > 1 for cut in cuts(other)):
                raise UnmeasurableError(SEQUENCE.format(what="keys", dim=max(cut.dim for cut in cuts(other))))
            raise UnmeasurableError(different(operands))
    parts = local_of(query), local_of(key), local_of(value)
    for operand, part in zip(operands, parts, strict=True):
        if (tag := tags.get(operand)) is not None:
            tags.put(part, local_tag(tag, operand))
    shape = (*query.shape[:-1], key.shape[-2])
    return parts, None if mask is None else aligned(mask, how, shape), how


def shard_of_axes(heads: Sequence[Axis], depth: Sequence[Axis]) -> tuple[HeadShard | None, bool]:
    """Return which part of the heads there is, by the axes that the features of a projection were split into.

    Args:
        heads: Those of the queries that are heads.
        depth: Those that meet the keys; of a single head nothing else is left.

    Returns:
        The part, `None` where they are all, and whether that is known.

    Raises:
        UnmeasurableError: If they are a part, and nobody knows which.
    """
    known = [axis for axis in heads if axis.channels] or [axis for axis in depth if axis.channels]
    for axis in known:
        if isinstance(axis.shard, str):
            raise UnmeasurableError(axis.shard)
        if axis.shard is not None:
            return axis.shard, True
    return None, bool(known)


def shard_of_cuts(how: Sequence[Cut], dim: int) -> HeadShard | None:
    """Return which part of the heads there is where the heads are this dimension of a distributed tensor."""
    return next((cut.part for cut in how if cut.dim == dim), None)


def shard_of_scores(tag: Tag, heads: Sequence[Axis], how: Sequence[Cut]) -> HeadShard | None:
    """Return which part of the heads the part of distributed scores has.

    Args:
        tag: What is known of the part.
        heads: The axes that turned out to be heads, outermost first.
        how: How the scores are cut.

    Raises:
        UnmeasurableError: If the heads of a part are not side by side.
    """
    shards = [(heads.index(axis), cut.part) for cut in how if (axis := tag.layout[cut.dim][0]) in heads]
    if not shards:
        return None
    if len(shards) > 1 or any(axis.size > 1 for axis in heads[: shards[0][0]]):
        raise UnmeasurableError(UNEVEN)
    return shards[0][1]

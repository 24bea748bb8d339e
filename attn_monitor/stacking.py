"""Attention calls of several layers as one call that has all their heads.

What is done to a tile takes some forty operations, which cost the same few microseconds each for a small tile as for
none. So small calls are laid side by side before they are looked at.

Axes: B batch, H query heads of one call, G key heads, Q queries, K keys; N heads of several calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from attn_monitor.masking import four_axes
from attn_monitor.records import AttentionCall
from attn_monitor.sums import state_dtype
from attn_monitor.tiles import per_head


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What is to be measured of an attention call.

    Attributes:
        call: The call.
        grad_output: The gradient of the output of a fused kernel, [B, H, Q, V].
        forward: Whether the forward pass is measured.
        entries: Whether the entries are wanted that the gradients of a softmax will need.
    """

    call: AttentionCall
    grad_output: Tensor | None = None
    forward: bool = True
    entries: bool = False

    @property
    def size(self) -> int:
        """How many numbers it holds, those of the logits included where they are not made yet."""
        shape = self.call.shape
        return shape.batch * shape.heads * shape.queries * shape.keys + sum(tensor.numel() for tensor in self._tensors)

    @property
    def alike(self) -> Hashable:
        """What looks have in common that can be taken together; `None` for one that is taken alone."""
        call = self.call
        if call.padding is not None:
            return None
        tensors = (call.query, call.key, call.value, call.logits, self.grad_output, *map(four_axes, call.masks))
        groups = 1 if call.key is None else call.shape.heads // call.key.shape[1]
        given = (call.scale is None, call.sinks is None, call.is_causal, call.softcap, call.plain, call.head_dim)
        return self.forward, self.entries, call.dropout, groups, given, tuple(map(_kind, tensors))

    def copied(self) -> Look:
        """Return the same with memory of its own, which nobody else writes to."""
        call = self.call
        query, key, value, logits, sinks, grad = (
            None if tensor is None else tensor.clone()
            for tensor in (call.query, call.key, call.value, call.logits, call.sinks, self.grad_output)
        )
        masks = tuple(mask.clone() for mask in call.masks)
        return replace(
            self,
            call=replace(call, query=query, key=key, value=value, logits=logits, sinks=sinks, masks=masks),
            grad_output=grad,
        )

    @property
    def _tensors(self) -> list[Tensor]:
        call = self.call
        given = (call.query, call.key, call.value, self.grad_output, *call.masks)
        return [tensor for tensor in given if tensor is not None]


def stacked(looks: Sequence[Look]) -> Look:
    """Return several looks that are `alike` as one, the heads of one call after those of the other."""
    first, *others = looks
    if not others:
        return first
    calls = [look.call for look in looks]
    call = replace(
        first.call,
        query=_beside([call.query for call in calls]),
        key=_beside([call.key for call in calls]),
        value=_beside([call.value for call in calls]),
        logits=_beside([call.logits for call in calls]),
        sinks=_beside([call.sinks for call in calls], dim=0),
        masks=tuple(_beside_masks(calls, number) for number in range(len(first.call.masks))),
        scale=None if first.call.scale is None else _per_head([call.scale for call in calls], calls),
        query_scale=_per_head([call.query_scale for call in calls], calls),
        key_scale=_per_head([call.key_scale for call in calls], calls),
        layers=tuple(call.shape.heads for call in calls),
    )
    return replace(first, call=call, grad_output=_beside([look.grad_output for look in looks]))


def heads_of(counts: Sequence[int]) -> list[slice]:
    """Return where the heads of each call are among those of all, from how many each has."""
    return [slice(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def _kind(tensor: Tensor | None) -> Hashable:
    """Return all of a tensor but how many heads it has."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.device, (tensor.shape[0], *tensor.shape[2:])


def _beside(tensors: Sequence[Tensor | None], dim: int = 1) -> Tensor | None:
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known, dim) if known else None


def _beside_masks(calls: Sequence[AttentionCall], number: int) -> Tensor:
    masks = [(four_axes(call.masks[number]), call.shape.heads) for call in calls]
    return torch.cat([mask.expand(-1, heads, -1, -1) for mask, heads in masks], dim=1)


def _per_head(parts: Sequence[float | Tensor | None], calls: Sequence[AttentionCall]) -> float | Tensor:
    """Return one scale for all calls if they share it, else one value per head."""
    one = parts[0]
    if isinstance(one, float) and all(isinstance(part, float) and part == one for part in parts):
        return one
    device = next(tensor.device for tensor in (calls[0].query, calls[0].logits) if tensor is not None)
    like = torch.empty(0, device=device, dtype=state_dtype(device))
    return torch.cat([per_head(part, call.shape.heads, like) for part, call in zip(parts, calls, strict=True)])

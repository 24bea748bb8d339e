"""Sequences of different lengths, packed one after the other, brought into [N, H, L, D] with padding that is known.

Axes: N sequences, T tokens of all of them, L tokens of the longest, H heads, D dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.records import AttentionCall


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Where the sequences lie, without waiting for the device.

    Attributes:
        starts: The first token of each sequence, [N].
        lengths: The number of tokens of each, [N].
        longest: At least the largest of these.
    """

    starts: Tensor
    lengths: Tensor
    longest: int

    @classmethod
    def of(cls, boundaries: Tensor, longest: int) -> Packed:
        """Read cumulative lengths [N + 1], the first of them 0."""
        boundaries = boundaries.detach()
        return cls(boundaries[:-1].long(), (boundaries[1:] - boundaries[:-1]).long(), int(longest))

    def present(self) -> Tensor:
        """Return True where a sequence has a token, [N, L]."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]

    def pad(self, tensor_THD: Tensor) -> Tensor:
        """Return [N, H, L, D], 0 where there is no token."""
        present = self.present()
        index = torch.where(present, self.starts[:, None] + torch.arange(self.longest, device=present.device), 0)
        if not len(tensor_THD):
            return tensor_THD.new_zeros(*index.shape, *tensor_THD.shape[1:]).transpose(1, 2)
        return tensor_THD.detach()[index].masked_fill(~present[..., None, None], 0).transpose(1, 2)


def reach(
    queries: Tensor | int, keys: Tensor | int, longest: tuple[int, int], left: int, right: int, device: torch.device
) -> Tensor | None:
    """Return which keys a window lets each query see, [N, 1, Q, K] or [1, 1, Q, K]; `None` for all.

    The window is aligned at the bottom right: the last query sees the last key.

    Args:
        queries: The number of queries, of each sequence [N] or of all.
        keys: The number of keys, likewise.
        longest: Q and K.
        left: How many keys to the left are seen, negative for all.
        right: How many to the right.
        device: Where to put it.
    """
    if left < 0 and right < 0:
        return None
    shift = torch.as_tensor(keys - queries, device=device).reshape(-1, 1, 1, 1)
    row = torch.arange(longest[0], device=device)[:, None]
    distance = torch.arange(longest[1], device=device) - row - shift
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def padded_call(
    tensors: tuple[Tensor, Tensor, Tensor],
    present: tuple[Tensor, Tensor],
    *,
    scale: float | None,
    seen: Tensor | None = None,
    biases: Sequence[Tensor] = (),
    is_causal: bool = False,
    softcap: float | None = None,
    dropout: bool = False,
) -> AttentionCall:
    """Return the call of padded query, key and value [N, H, L, D], with the padding masked and not counted.

    Args:
        tensors: Query, key and value.
        present: Where there is a query, and a key, [N, L].
        scale: Of the product, 1 / sqrt(D) by default.
        seen: Which keys each query may see, broadcastable to [N, H, Q, K].
        biases: What is added to the logits.
        is_causal: Query i sees key j if j <= i.
        softcap: Of the logits.
        dropout: Whether probabilities are dropped.
    """
    query, key, value = tensors
    mask = present[0][:, None, :, None] & present[1][:, None, None, :]
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        masks=(mask if seen is None else mask & seen, *biases),
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap or None,
        head_dim=query.shape[-1],
        dropout=dropout,
        padding=~present[0][:, None, :, None],
    )

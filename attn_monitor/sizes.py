"""The sizes of queries and keys: squares of their entries, part by part, so that no copy of the whole is made.

Axes: B batch, H query heads, G key heads, Q queries, K keys, D head dimension; b batch items of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.masking import finite_indicator
from attn_monitor.precision import known_finite
from attn_monitor.sums import state_dtype
from attn_monitor.tiles import TiledCall


class KeySquares:
    """Count and sum of squares of the finite entries of each key.

    Args:
        tiled: The call; its key is known.
    """

    def __init__(self, tiled: TiledCall) -> None:
        key = tiled.call.key
        assert key is not None, "chosen only where the key is known"
        self._heads = tiled.call.shape.heads
        self._squares = torch.zeros((2, *key.shape[:3]), device=tiled.device, dtype=tiled.dtype)

    def put(self, items: slice, key_heads: slice, keys_bGKD: Tensor) -> None:
        """Take the keys of some batch items and key heads."""
        for number, values in enumerate(finite_squares(keys_bGKD)):
            self._squares[number, items, key_heads] = values

    def sums(self, visible_BHK: Tensor) -> Tensor:
        """Return count and sum of squares of the key entries that each query head meets, [2, H]."""
        squares_2BHK = self._squares.repeat_interleave(self._heads // self._squares.shape[2], dim=2)
        return torch.where(visible_BHK, squares_2BHK, 0).to(state_dtype(visible_BHK.device)).sum((1, 3))


def finite_squares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return count and sum of squares of the finite entries along the last axis."""
    squares = torch.linalg.vector_norm(values, dim=-1).square()
    if known_finite(squares):
        return torch.full_like(squares, values.shape[-1]), squares
    kept = finite_indicator(values)
    return kept.sum(-1), torch.linalg.vector_norm(values.nan_to_num(nan=0, posinf=0, neginf=0), dim=-1).square()

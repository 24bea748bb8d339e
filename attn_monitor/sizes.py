"""The sizes of queries and keys: squares of their entries, part by part, so that no copy of the whole is made.

Axes: B batch, H query heads, G key heads, Q queries, K keys, D head dimension; b batch items of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.precision import known_finite
from attn_monitor.sums import state_dtype
from attn_monitor.tiles import TiledCall


class KeySquares:
    """Count and sum of squares of the entries of each key, 0 of one with a nan or inf in it.

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
    """Return count and sum of squares of the entries along the last axis, 0 of a vector with a nan or inf in it."""
    squares = torch.linalg.vector_norm(values, dim=-1).square()
    counts = torch.full_like(squares, values.shape[-1])
    if known_finite(squares):
        return counts, squares
    # What is inf only by squaring is no reason to leave a vector out.
    whole = values.isfinite().all(-1)
    return counts.where(whole, 0), squares.where(whole, 0)

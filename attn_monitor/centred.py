"""A tile of logits without its row means: what every row statistic starts from, with nothing left to cancel.

Axes: b batch items, H query heads, t rows and k columns of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.masking import BURIED, Blocked
from attn_monitor.sums import state_dtype
from attn_monitor.tiles import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class CentredRows:
    """The finite allowed logits of some rows, relative to the mean of their row.

    Attributes:
        centred: [b, H, t, k], the logits minus `shift`; 0 where an entry is blocked or not finite.
        shift: What was subtracted from each row, [b, H, t].
        count: How many entries of each row are allowed and finite, [b, H, t].
        largest: The largest of them as it was, [b, H, t].
        smallest: The smallest of them as it was, [b, H, t], if it was asked for.
        blocked: What is blocked.
        kept: 1 where an entry is allowed and finite, [b, H, t, k]; `None` if all allowed entries are finite.
    """

    centred: Tensor
    shift: Tensor
    count: Tensor
    largest: Tensor
    smallest: Tensor | None
    blocked: Blocked
    kept: Tensor | None

    @classmethod
    def of(cls, tile: Tensor, blocked: Blocked, work: Workspace, *, smallest: bool = False) -> CentredRows:
        """Centre a tile of logits, in place.

        Args:
            tile: The logits.
            blocked: What is blocked.
            work: The third tile of it is used.
            smallest: Whether the smallest logits are wanted.
        """
        blocked.zero_(tile)
        sums = tile.sum(-1)
        kept = lowest = None
        if known_finite(sums):
            count = torch.as_tensor(blocked.allowed, device=tile.device).to(tile.dtype).expand(sums.shape)
            largest = blocked.bury_(tile).amax(-1)
            if smallest:
                lowest = blocked.bury_(tile, times=-2).amin(-1)
            blocked.zero_(tile)
        else:
            kept = torch.sub(tile, tile, out=work.third(tile)).add_(1).nan_to_num_(nan=0)
            blocked.zero_(kept)
            count = kept.sum(-1)
            tile.nan_to_num_(nan=0, posinf=0, neginf=0).mul_(kept)
            sums = tile.sum(-1)
            depth = (1 - kept).mul_(BURIED)
            largest = (tile - depth).amax(-1)
            if smallest:
                lowest = (tile + depth).amin(-1)
        shift = sums / count.clamp(min=1)
        tile.sub_(shift[..., None])
        if kept is None:
            blocked.zero_(tile)
        else:
            tile.mul_(kept)
        return cls(tile, shift, count, largest, lowest, blocked, kept)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return count, mean and sum of squared deviations of each row."""
        # What is left of the mean after rounding: 1e-7 of a large offset is not small beside a small spread.
        rest = self.centred.sum(-1) / self.count.clamp(min=1)
        deviation = torch.linalg.vector_norm(self.centred, dim=-1).square() - self.count * rest.square()
        return self.count, self.shift.to(state_dtype(rest.device)) + rest, deviation.clamp_(min=0)

    def bury_blocked_(self) -> Tensor:
        """Return the centred tile itself with all other entries lowered so far that a softmax gives them 0."""
        if self.kept is None:
            return self.blocked.bury_(self.centred)
        return self.centred.add_(self.kept.sub_(1).mul_(BURIED))


def known_finite(sums: Tensor) -> bool:
    """Tell whether sums, and so all their terms, are known to be finite without waiting for a device.

    On the CPU there is nothing to wait for; elsewhere the answer is that it is not known.
    """
    if sums.device.type != "cpu":
        return False
    (total,) = sums.sum().reshape(1).tolist()
    return math.isfinite(total)

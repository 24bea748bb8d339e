"""A tile of logits relative to their row maxima: what every row statistic starts from, with nothing left to cancel.

Near its maximum a logit minus the maximum is exact, however large both are, and that is where the probability lies.

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
class RelativeRows:
    """The finite allowed logits of some rows, relative to the largest of their row.

    Attributes:
        gaps: [b, H, t, k], the logits minus `largest`; far below 0 where an entry is blocked or not finite.
        largest: The largest logit of each row, exact, [b, H, t].
        smallest: The smallest logit of each row, exact, [b, H, t], if it was asked for.
        sums: The sum of each row, [b, H, t].
        count: How many entries of each row are allowed and finite, [b, H, t].
        blocked: What is blocked.
        kept: 1 where an entry is allowed and finite, [b, H, t, k]; `None` if all allowed entries are finite.
    """

    gaps: Tensor
    largest: Tensor
    smallest: Tensor | None
    sums: Tensor
    count: Tensor
    blocked: Blocked
    kept: Tensor | None

    @classmethod
    def of(cls, tile: Tensor, blocked: Blocked, work: Workspace, *, smallest: bool = False) -> RelativeRows:
        """Make a tile of logits relative, in place.

        Args:
            tile: The logits.
            blocked: What is blocked.
            work: The third tile of it is used.
            smallest: Whether the smallest logits are wanted.
        """
        sums = blocked.zero_(tile).sum(-1)
        kept = lowest = None
        if known_finite(sums):
            count = torch.as_tensor(blocked.allowed, device=tile.device).to(tile.dtype).expand(sums.shape)
            if smallest:
                lowest = blocked.bury_(tile, times=-1).amin(-1)
                blocked.zero_(tile)
            largest = blocked.bury_(tile).amax(-1)
        else:
            kept = torch.sub(tile, tile, out=work.third(tile)).add_(1).nan_to_num_(nan=0)
            count = blocked.zero_(kept).sum(-1)
            sums = tile.nan_to_num_(nan=0, posinf=0, neginf=0).mul_(kept).sum(-1)
            depth = (1 - kept).mul_(BURIED)
            if smallest:
                lowest = (tile + depth).amin(-1)
            largest = tile.sub_(depth).amax(-1)
        return cls(tile.sub_(largest[..., None]), largest, lowest, sums, count, blocked, kept)

    def moments(self, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return count, mean and sum of squared deviations of each row, in two passes.

        Args:
            scratch: A tile that is overwritten.
        """
        count = self.count.clamp(min=1)
        shift = self.sums / count - self.largest
        centred = torch.sub(self.gaps, shift[..., None], out=scratch)
        if self.kept is None:
            self.blocked.zero_(centred)
        else:
            centred.mul_(self.kept)
        # What is left of the mean after rounding: 1e-7 of a large offset is not small beside a small spread.
        rest = centred.sum(-1) / count
        deviation = torch.linalg.vector_norm(centred, dim=-1).square() - self.count * rest.square()
        mean = self.largest.to(state_dtype(rest.device)) + shift + rest
        return self.count, mean, deviation.clamp_(min=0)


def known_finite(sums: Tensor) -> bool:
    """Tell whether sums, and so all their terms, are known to be finite without waiting for a device.

    On the CPU there is nothing to wait for; elsewhere the answer is that it is not known.
    """
    if sums.device.type != "cpu":
        return False
    (total,) = sums.sum().reshape(1).tolist()
    return math.isfinite(total)

"""A tile of logits relative to their row maxima: what every row statistic starts from, with nothing left to cancel.

Near its maximum a logit minus the maximum is exact, however large both are, and that is where the probability lies.

Axes: b batch items, H query heads, t rows and k columns of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.masking import BURIED, Blocked
from attn_monitor.precision import known_finite
from attn_monitor.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class RelativeRows:
    """The finite allowed logits of some rows, relative to the largest of their row.

    Attributes:
        gaps: [b, H, t, k], the logits minus `largest`; far below 0 where an entry is blocked or not finite.
        largest: The largest logit of each row, exact, [b, H, t].
        sums: The sum of each row, [b, H, t].
        count: How many entries of each row are allowed and finite, broadcastable to [b, H, t].
        blocked: What is blocked.
        kept: 1 where an entry is allowed and finite, [b, H, t, k]; `None` if all allowed entries are finite.
    """

    gaps: Tensor
    largest: Tensor
    sums: Tensor
    count: Tensor | int
    blocked: Blocked
    kept: Tensor | None

    @classmethod
    def of(
        cls, tile: Tensor, blocked: Blocked, work: Workspace, out: Mapping[str, Tensor], prefix: str = ""
    ) -> RelativeRows:
        """Make a tile of logits relative, in place.

        Args:
            tile: The logits.
            blocked: What is blocked.
            work: The third tile of it is used.
            out: Where `largest` and `nonfinite` go, and `smallest` if it is wanted.
            prefix: Of these names.
        """
        sums = blocked.zero_(tile).sum(-1)
        largest, smallest = out[f"{prefix}largest"], out.get(f"{prefix}smallest")
        if known_finite(sums):
            if smallest is not None:
                torch.amin(blocked.bury_(tile, times=-1), -1, out=smallest)
                blocked.zero_(tile)
            torch.amax(blocked.bury_(tile), -1, out=largest)
            return cls(tile.sub_(largest[..., None]), largest, sums, blocked.allowed, blocked, None)
        kept = torch.sub(tile, tile, out=work.third(tile)).add_(1).nan_to_num_(nan=0)
        count = blocked.zero_(kept).sum(-1)
        out[f"{prefix}nonfinite"].copy_(blocked.allowed - count)
        sums = tile.nan_to_num_(nan=0, posinf=0, neginf=0).mul_(kept).sum(-1)
        depth = (1 - kept).mul_(BURIED)
        if smallest is not None:
            torch.amin(tile + depth, -1, out=smallest)
        torch.amax(tile.sub_(depth), -1, out=largest)
        return cls(tile.sub_(largest[..., None]), largest, sums, count, blocked, kept)

    def moments(self, scratch: Tensor, out: Mapping[str, Tensor], prefix: str = "") -> None:
        """Write an approximate mean of each row, and what deviates from it, in two passes.

        Args:
            scratch: A tile that is overwritten.
            out: Where `shift`, `rest` and `spread` go.
            prefix: Of these names.
        """
        count = self.count.clamp(min=1) if isinstance(self.count, Tensor) else max(self.count, 1)
        shift = torch.sub(self.sums / count, self.largest, out=out[f"{prefix}shift"])
        centred = torch.sub(self.gaps, shift[..., None], out=scratch)
        if self.kept is None:
            self.blocked.zero_(centred)
        else:
            centred.mul_(self.kept)
        torch.sum(centred, -1, out=out[f"{prefix}rest"])
        torch.linalg.vector_norm(centred, dim=-1, out=out[f"{prefix}spread"])

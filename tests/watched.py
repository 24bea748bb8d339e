"""A model under a probe, its records, and a module that applies any function to query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.spellings import D, E, H


def watched(model: nn.Module, *inputs: Tensor, **options: Any) -> dict[str, AttentionStatistics]:
    """Run forward and backward under a probe that must not skip anything."""
    with AttentionProbe(model, **options) as probe:
        out = model(*inputs)
        out.square().sum().backward()
    assert not probe.skipped
    return dict(probe.compute())


def only(found: dict[str, AttentionStatistics]) -> AttentionStatistics:
    (stats,) = found.values()
    return stats


class Free(nn.Module):
    """Applies a function to projected query, key and value [B, T, E], and a few parameters."""

    def __init__(self, function: Callable[[Free, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.packs = False
        self.qkv = nn.Linear(E, 3 * E)
        self.matrix = nn.Parameter(torch.randn(E, 13))
        self.mixing = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, *self.qkv(x).chunk(3, -1))


def in_heads(*parts: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (H, D)).transpose(1, 2) for part in parts]

"""What the cases about Lightning share: a network, its data, and its log."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.cases.support import SelfAttention, normal, serve


class Block(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.attn = SelfAttention(12, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def data(steps: int, seed: int = 5) -> Any:
    return serve(normal(steps, 5, 12, seed=seed))

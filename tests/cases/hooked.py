"""Small models of the cases about hooks."""

from __future__ import annotations

from torch import Tensor, nn

from tests.cases.support import SelfAttention


class PlusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SelfAttention(12, 2), SelfAttention(12, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

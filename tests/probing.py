"""A model to watch, its training, and what a probe could leave on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.spellings import SPELLINGS, Attention

sdpa, softmax = SPELLINGS[0], SPELLINGS[5]


def hooks(model: nn.Module) -> int:
    """Count every hook on every module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def modes() -> int:
    depth: int = torch._C._len_torch_function_stack()
    return depth


class Net(nn.Module):
    """Two residual attentions, fused and by hand, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(sdpa), Attention(softmax)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x

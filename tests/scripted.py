"""A training whose saturation follows a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from tests import models
from tests.models import Kind, Lit


class Scripted(Lit):
    """Multiplies the keys of step i by the i-th gain, so that the ratio of head 1 is that number.

    Head 0 is uniform, or with `both` the same as head 1. Then attention has collapsed from a ratio of 0.9 on: the keys
    lie at equal distances, and the softmax passes less than 0.45 of what a uniform one would.
    """

    def __init__(self, ratios: Sequence[float], layers: int = 1, both: bool = False) -> None:
        kinds: list[Kind] = ["hand"] * layers
        super().__init__(*kinds)
        self.ratios = ratios
        self.heads = (0, 1) if both else (1,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.net.blocks:
            with torch.no_grad():
                nn.init.zeros_(block.qkv.weight)
                nn.init.zeros_(block.qkv.bias)
                for head in self.heads:  # its logits are x_0 times gain times x_1
                    block.qkv.weight[6 * head, 0] = 1.0
                    block.qkv.weight[12 + 6 * head, 1] = 2 * 6 * self.ratios[self.global_step]
        rows = torch.ones_like(batch[0])
        rows[..., 1] = torch.arange(5.0)
        rows[..., 1] = (rows[..., 1] - 2) / rows[..., 1].std(correction=0, dim=-1, keepdim=True) / 2
        return self.loss([rows])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(model: Lit, monitor: AttentionMonitor, count: int, **settings: Any) -> tuple[Any, list[str]]:
    """Train and return the trainer and the monitor's warnings, those about the missing logger left out."""
    trainer, said = models.fit(model, monitor, count, **settings)
    return trainer, [text for text in said if "no logger" not in text]

"""A training with two optimizers that are stepped by hand."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import Lit


class TwoOptimizers(Lit):
    """Optimizes by hand, twice per batch."""

    def __init__(self) -> None:
        super().__init__("hand")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.blocks.parameters(), 0.1), torch.optim.SGD(self.net.head.parameters(), 0.1)]

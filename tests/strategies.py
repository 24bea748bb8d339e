"""A model whose batches differ between ranks, trained by Lightning on one of several gloo processes."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionSaturationError, AttentionWarning
from tests.models import DIM, Lit, quiet

WORLD = 2
SIZES = (3, 2)
"""Samples per batch on each rank."""
STEPS, QUERIES = 3, 5
BLOCKS = ["net.blocks.0", "net.blocks.1"]


class Uneven(Lit):
    """Two attentions on batches that differ between the ranks; a rank may leave the second one out."""

    def __init__(self, *, skipping: int | None = None, hot: int | None = None, lr: float = 0.1) -> None:
        torch.manual_seed(13)
        super().__init__("hand", "sdpa")
        self.skipping, self.hot, self.lr = skipping, hot, lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_rank(self, rank: int, x: Tensor) -> Tensor:
        first, second = self.net.blocks
        x = x * 40 if rank == self.hot else x
        x = x + first(x)
        x = x if rank == self.skipping else x + second(x)
        loss: Tensor = self.net.head(x).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.on_rank(self.global_rank, batch[0])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.on_rank(self.global_rank, batch[0])


def data(rank: int, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(31 + rank)
    return [torch.randn(SIZES[rank], QUERIES, DIM, generator=generator) for _ in range(steps)]


def loader_of(rank: int, steps: int = STEPS) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat(data(rank, steps))), batch_size=SIZES[rank])


def values_of(history: Any) -> list[Any]:
    return [
        (step, {layer: {name: v.tolist() for name, v in stats.measured().items()} for layer, stats in record.items()})
        for step, record in history
    ]


def outcome(
    rank: int, strategy: Strategy, model: Lit, watching: AttentionMonitor | None, **settings: Any
) -> dict[str, Any]:
    """Train on this rank of a group that exists, and return what it knows afterwards."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(WORLD))
    stages = settings.pop("validation", None)
    count = settings.pop("steps", STEPS)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [*([watching] if watching else []), *settings.pop("callbacks", [])]
        trainer = quiet(
            strategy=strategy, devices=WORLD, callbacks=callbacks, use_distributed_sampler=False, **settings
        )
        try:
            trainer.fit(model, loader_of(rank, count), stages)
        except AttentionSaturationError as raised:
            error = str(raised)
    said = [str(w.message) for w in caught if issubclass(w.category, AttentionWarning) and "logger" not in str(w)]
    monitor = watching or AttentionMonitor()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "history": values_of(monitor.history),
        "evaluations": {
            stage: {layer: stats.measured()["logit_max"].tolist() for layer, stats in record.items()}
            for stage, record in monitor.evaluations.items()
        },
        "events": [str(event) for event in monitor.events],
        "metrics": metrics,
        "steps": trainer.global_step,
        "losses": [float(loss) for loss in model.losses],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "error": error,
        "said": said,
    }

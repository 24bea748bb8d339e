"""One training in which the ways to watch it take turns, a step each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from tests.benchmarks.model import Decoder, RandomTokens
from tests.benchmarks.sizes import SEED, ModelSize
from tests.benchmarks.turns import Meter, progress, whose

WARMUP_ROUNDS = 1  # in which AdamW makes its state and each monitor explores the model


class TakingTurns(pl.Callback):
    """Lets each callback live on its own steps, and measures them from its first hook to its last.

    Args:
        ways: The callbacks by name, `None` for an unwatched step.
        meter: Measures a step.
    """

    def __init__(self, ways: Mapping[str, pl.Callback | None], meter: Meter) -> None:
        self.ways = ways
        self.measured: dict[str, list[float]] = {name: [] for name in ways}
        self._meter = meter
        self._now = ""

    def _all(self, hook: str, *arguments: Any) -> None:
        for callback in self.ways.values():
            if callback is not None:
                getattr(callback, hook)(*arguments)

    def _one(self, hook: str, *arguments: Any) -> None:
        callback = self.ways[self._now]
        if callback is not None:
            getattr(callback, hook)(*arguments)

    def setup(self, *arguments: Any, **keywords: Any) -> None:
        self._all("setup", *arguments, *keywords.values())

    def on_fit_start(self, *arguments: Any) -> None:
        self._all("on_fit_start", *arguments)

    def on_train_start(self, *arguments: Any) -> None:
        self._all("on_train_start", *arguments)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self._now = whose(index, list(self.ways))
        if index % len(self.ways) == 0:
            progress(f"{type(pl_module).__name__}, round {index // len(self.ways) + 1}")
        self._meter.start()
        self._one("on_train_batch_start", trainer, pl_module, batch, index)

    def on_before_backward(self, *arguments: Any) -> None:
        self._one("on_before_backward", *arguments)

    def on_after_backward(self, *arguments: Any) -> None:
        self._one("on_after_backward", *arguments)

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        self._one("on_before_optimizer_step", *arguments)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self._one("on_train_batch_end", *arguments)
        self.measured[self._now].append(self._meter.stop())

    def on_train_end(self, *arguments: Any) -> None:
        self._all("on_train_end", *arguments)

    def teardown(self, *arguments: Any, **keywords: Any) -> None:
        self._all("teardown", *arguments, *keywords.values())


def train(
    kind: Callable[[ModelSize], Decoder],
    size: ModelSize,
    ways: Mapping[str, pl.Callback | None],
    rounds: int,
    meter: Meter,
) -> dict[str, list[float]]:
    """Train, and return what was measured of each way's steps, one value per round.

    Args:
        kind: The model, which takes its size.
        size: Of model and batches.
        ways: The callbacks that take turns.
        rounds: How many are measured, after some to warm up.
        meter: Measures a step.
    """
    torch.manual_seed(SEED)
    turns = TakingTurns(ways, meter)
    steps = (rounds + WARMUP_ROUNDS) * len(ways)
    with tempfile.TemporaryDirectory() as logdir:
        pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            callbacks=[turns],
            logger=TensorBoardLogger(logdir),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        ).fit(kind(size), RandomTokens(size, steps))
    return {name: values[WARMUP_ROUNDS:] for name, values in turns.measured.items()}

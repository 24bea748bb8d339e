"""Train a tiny model for a long time under the monitor, and note now and then what could grow."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from attn_monitor import AttentionMonitor
from tests.models import BATCH, DIM, QUERIES, Lit, quiet, read_events
from tests.reliability.standing import HOOKS

SAMPLES = 40
"""How often is measured."""
HEATED = 500
"""Every so many steps a layer saturates, and recovers half that number of steps later."""


@dataclass(frozen=True)
class Sample:
    """What was measured after some observed steps.

    Attributes:
        step: The step.
        seconds: The median of a step since the last sample.
        rss: Resident memory of the process in MiB.
        tensors: Tensors that are alive.
        objects: Objects that Python's garbage collector follows.
        hooks: Hooks on the model, between two steps.
        files: Open files.
        threads: Threads.
        tags: Scalars in `trainer.callback_metrics`.
        history: Records in `history`.
        events: Events so far.
    """

    step: int
    seconds: float
    rss: float
    tensors: int
    objects: int
    hooks: int
    files: int
    threads: int
    tags: int
    history: int
    events: int


class Batches(IterableDataset[Tensor]):
    """So many random batches, made as they are needed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(5)
        for _ in range(self.count):
            yield torch.randn(BATCH, QUERIES, DIM, generator=generator)


class Tiny(Lit):
    """Two attentions that hardly learn; one is heated and cooled by hand."""

    def __init__(self) -> None:
        super().__init__("hand", "sdpa")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % (HEATED // 2) == HEATED // 4:
            hot = batch_idx % HEATED < HEATED // 2
            self.net.blocks[0].qkv.weight.data[: 2 * DIM].mul_(5.0 if hot else 0.2)
        loss = self.net(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Measure(Callback):
    """Measures every so many steps, after the monitor."""

    def __init__(self, every: int, monitor: AttentionMonitor) -> None:
        self.every, self.monitor = every, monitor
        self.samples: list[Sample] = []
        self.times: list[float] = []
        self.last = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self.times.append(now - self.last)
        if (batch_idx + 1) % self.every == 0:
            self.samples.append(self.measure(trainer, pl_module, batch_idx + 1))
            self.times.clear()
        self.last = time.perf_counter()

    def measure(self, trainer: Any, model: Any, step: int) -> Sample:
        """Return the numbers of now."""
        gc.collect()
        followed = gc.get_objects()
        return Sample(
            step=step,
            seconds=sorted(self.times)[len(self.times) // 2],
            rss=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20,
            tensors=sum(issubclass(type(thing), Tensor) for thing in followed),
            objects=len(followed),
            hooks=sum(len(getattr(module, kind)) for module in model.modules() for kind in HOOKS),
            files=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            tags=len(trainer.callback_metrics),
            history=len(self.monitor.history),
            events=len(self.monitor.events),
        )


@dataclass(frozen=True)
class Soak:
    """What came of a long training.

    Attributes:
        steps: How many steps were observed.
        minutes: How long it took.
        samples: What was measured.
        tags: How many tags of each kind are in the event file.
        size: Its size in MiB.
    """

    steps: int
    minutes: float
    samples: list[Sample]
    tags: dict[str, int]
    size: float

    def as_data(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Soak:
        """Return what `as_data` made."""
        return cls(**{**data, "samples": [Sample(**sample) for sample in data["samples"]]})


def soak(steps: int, folder: Path, samples: int = SAMPLES) -> Soak:
    """Train so many steps, each observed and written to TensorBoard."""
    torch.manual_seed(3)
    monitor = AttentionMonitor(every_n_steps=1)
    measure = Measure(max(steps // samples, 1), monitor)
    logger = TensorBoardLogger(folder)
    started = time.perf_counter()
    trainer = quiet(callbacks=[monitor, measure], logger=logger, log_every_n_steps=1)
    trainer.fit(Tiny(), DataLoader(Batches(steps), batch_size=None))
    minutes = (time.perf_counter() - started) / 60
    assert measure.samples[-1].step == steps == trainer.global_step
    size = sum(file.stat().st_size for file in Path(logger.log_dir).iterdir()) / 2**20
    found = read_events(logger.log_dir).Tags() if steps <= 1000 else {}
    return Soak(
        steps,
        minutes,
        measure.samples,
        {kind: len(tags) for kind, tags in found.items() if isinstance(tags, list)},
        size,
    )


def python_growth(steps: int, folder: Path) -> list[tuple[str, int]]:
    """Return where Python's allocations grew most between the middle and the end of a training, in bytes."""
    taken: list[tracemalloc.Snapshot] = []

    class Snap(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 in (steps // 2, steps):
                gc.collect()
                taken.append(tracemalloc.take_snapshot())

    tracemalloc.start()
    try:
        monitor = AttentionMonitor(every_n_steps=1, history_size=16)
        trainer = quiet(callbacks=[monitor, Snap()], logger=TensorBoardLogger(folder))
        trainer.fit(Tiny(), DataLoader(Batches(steps), batch_size=None))
    finally:
        tracemalloc.stop()
    grown = taken[1].compare_to(taken[0], "filename")
    return [(stat.traceback[0].filename, stat.size_diff) for stat in islice(grown, 10)]

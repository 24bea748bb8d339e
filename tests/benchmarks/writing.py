"""Table 4: what writing a record costs, without measuring it."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from pytorch_lightning.loggers import TensorBoardLogger

from attn_monitor import publishing
from attn_monitor.catalog import FACTORS, HEADLINE
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from tests.benchmarks.page import halves, paragraph, table
from tests.benchmarks.sizes import SEED, Sizes
from tests.benchmarks.turns import Clock, Spread, progress

MODELS = ((12, 12), (80, 64))
QUICK_MODELS = ((2, 3), (3, 2))
WARMUP = 2
MEASURED = (*HEADLINE, *FACTORS, "critical_ratio", "scale_ratio")


def record(layers: int, heads: int) -> dict[str, AttentionStatistics]:
    """Return a record as the callback makes it by default, of random numbers, with a few heads above the limit."""

    def per_head() -> torch.Tensor:
        return torch.rand(heads).square() * 5

    return {
        f"model.decoder.layers.{layer}.self_attn": AttentionStatistics(
            **{name: per_head() for name in MEASURED},  # type: ignore[arg-type] # all of them are tensors
            rows=torch.full((heads,), 14),
            masked_rows=torch.zeros(heads, dtype=torch.long),
            nonfinite=torch.zeros(heads, dtype=torch.long),
            head_dim=64,
            keys=7,
            calls=1,
        )
        for layer in range(layers)
    }


@contextmanager
def publisher(layers: int, heads: int, *, pictures: bool) -> Iterator[tuple[Callable[[], None], TensorBoardLogger]]:
    """Prepare to publish one record after the other; return how, and the logger."""
    with tempfile.TemporaryDirectory() as folder:
        logger = TensorBoardLogger(folder)
        loop: Any = SimpleNamespace(is_global_zero=True, loggers=[logger], metrics={})
        problems: list[str] = []
        made = publishing.Publisher(frozenset(HEADLINE), SaturationRule(), "", problems.append)
        statistics, steps = record(layers, heads), itertools.count()

        def publish() -> None:
            made.publish(loop, next(steps), statistics, saturated=0)

        with patch.object(publishing, "picture_due", lambda observation: pictures):
            publish()  # names and descriptions are written once
            yield publish, logger
        logger.finalize("success")
        assert not problems, problems


class Work:
    """Measures the seconds that all threads of this process computed: what else the machine does is not counted."""

    def __init__(self) -> None:
        self._started = 0.0

    def start(self) -> None:
        """Begin."""
        self._started = time.process_time()

    def stop(self) -> float:
        """Return the seconds since the start."""
        return time.process_time() - self._started


def measured(models: tuple[tuple[int, int], ...], rounds: int) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    rows = []
    for (layers, heads), pictures in itertools.product(models, (True, False)):
        progress(f"writing {layers} x {heads}")
        with publisher(layers, heads, pictures=pictures) as (publish, logger):
            waiting, working = Clock(), Work()
            waits, works = [], []
            for _ in range(WARMUP + rounds):
                working.start()
                waiting.start()
                publish()
                waits.append(waiting.stop() * 1e3)
                logger.experiment.flush()
                works.append(working.stop() * 1e3)
        spreads = [Spread.of(values[WARMUP:]) for values in (waits, works)]
        name = f"{layers} layers x {heads} heads, {'with' if pictures else 'without'} pictures"
        rows.append((name, *(cell for spread in spreads for cell in (f"{spread.median:.1f}", halves(spread, 1)))))
    return rows


def section(sizes: Sizes, rounds: int, *, quick: bool) -> str:
    """Measure, and return the section of the page."""
    torch.manual_seed(SEED)
    found = measured(QUICK_MODELS if quick else MODELS, 2 if quick else 5 * rounds)
    header = ("record", "training waits, ms", "middle half", "work of all threads, ms", "middle half")
    return "\n".join(
        [
            "## Writing\n",
            paragraph(
                """What publishing one record of the headline statistics to TensorBoard costs: scalars, histograms,
                tensors of all heads, and on some steps the pictures and the summary. The training waits until the
                record is handed to the writer's thread. The work is the processor time until everything is on disk,
                checksums included, which that thread computes; other processes of the machine do not count in it."""
            ),
            table(header, found),
            "Reproduce with `.venv/bin/python -m tests.benchmarks --only writing`.\n",
        ]
    )

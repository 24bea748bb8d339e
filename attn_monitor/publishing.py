"""Where a record goes: `trainer.callback_metrics` and every logger. What fails is reported and never stops the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from attn_monitor.lightning_compat import callback_metrics
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationEvent, SaturationRule
from attn_monitor.tensorboard import HeadWriter, scalars

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Publisher:
    """Publishes the records of one stage.

    Args:
        chosen: The statistics that get scalars and images.
        rule: Gives the saturation ratios.
        prefix: Stands before every tag.
        report: Takes what went wrong, in words.
    """

    def __init__(
        self, chosen: frozenset[str], rule: SaturationRule, prefix: str, report: Callable[[str], None]
    ) -> None:
        self._chosen = chosen
        self._rule = rule
        self._prefix = prefix
        self._report = report
        self._heads = HeadWriter(chosen, rule, prefix)

    def publish(
        self,
        trainer: Trainer,
        step: int,
        statistics: Mapping[str, AttentionStatistics],
        saturated: int,
        events: Sequence[SaturationEvent] = (),
    ) -> None:
        """Publish a record.

        Args:
            trainer: Has the loggers; only the global rank 0 writes to them.
            step: The x value.
            statistics: The record.
            saturated: How many heads are saturated.
            events: The new events.
        """
        tags: dict[str, float] = {}
        with self._surviving("making the scalars"):
            tags = scalars(statistics, self._chosen, self._rule, saturated, self._prefix)
            callback_metrics(trainer).update(
                {tag: torch.tensor(tags[tag], dtype=torch.float32, device="cpu") for tag in tags}
            )
        if not trainer.is_global_zero:
            return
        experiments: list[object] = []
        for logger in trainer.loggers:
            with self._surviving(f"writing to {type(logger).__name__}"):
                logger.log_metrics(tags, step=step)
                experiments.append(getattr(logger, "experiment", None))
        with self._surviving("writing to TensorBoard"):
            for problem in self._heads.write(experiments, step, statistics, events):
                self._report(f"TensorBoard gets no more {problem}; scalars go on")
        for logger in trainer.loggers if events else ():
            with self._surviving(f"flushing {type(logger).__name__}"):
                logger.save()  # the last points before a crash are the ones that matter

    @contextmanager
    def _surviving(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._report(f"{doing} failed: {type(error).__name__}: {error}")

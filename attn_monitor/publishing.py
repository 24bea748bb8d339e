"""Where a record goes: `trainer.callback_metrics` and every logger. What fails is reported and never stops the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from attn_monitor.dashboards.other_loggers import append_events, log_pictures, log_scalars, takes_pictures
from attn_monitor.dashboards.pictures import Picture, draw
from attn_monitor.dashboards.scalars import scalars
from attn_monitor.dashboards.tables import Rows, Snapshot, event_records
from attn_monitor.dashboards.tensorboard import Dashboard
from attn_monitor.lightning_compat import callback_metrics
from attn_monitor.notices import surviving
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tags import PICTURES
from attn_monitor.tracking import Changes

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_ALL_OF_THE_FIRST = 16


def picture_due(observation: int) -> bool:
    """Tell whether an observation gets pictures: the first 16, then ever fewer, so that each is at most an eighth late.

    A run of 2,000 observations has 71, not 2,000.

    Args:
        observation: Its number, from 1.
    """
    return observation <= _ALL_OF_THE_FIRST or observation % (1 << (observation.bit_length() - 4)) == 0


class Publisher:
    """Publishes the records of one stage.

    Args:
        chosen: The statistics that get scalars and pictures.
        rule: Gives the saturation ratios.
        prefix: Stands before every tag.
        report: Takes what went wrong, in words.
        layout: Whether to write a layout for TensorBoard's custom scalars.
        heads: The layers of a run that is continued, in the order of their rows, and how many heads each has.
    """

    def __init__(
        self,
        chosen: frozenset[str],
        rule: SaturationRule,
        prefix: str,
        report: Callable[[str], None],
        *,
        layout: bool = False,
        heads: Mapping[str, int] | None = None,
    ) -> None:
        self._chosen = chosen
        self._rule = rule
        self._prefix = prefix
        self._report = report
        self._rows = Rows(heads)
        self._dashboard = Dashboard(chosen, rule, prefix, layout=layout)
        self._observations = 0
        self._broken: set[str] = set()

    def publish(
        self,
        trainer: Trainer,
        step: int,
        statistics: Mapping[str, AttentionStatistics],
        saturated: int,
        changes: Changes | None = None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Publish a record.

        Args:
            trainer: Has the loggers; only the global rank 0 writes to them.
            step: The x value.
            statistics: The record.
            saturated: How many heads are saturated.
            changes: What the record changed.
            more: Other model-wide numbers, by tag.
        """
        changes = Changes() if changes is None else changes
        changed = bool(changes.opened or changes.escalated or changes.ended)
        tags: dict[str, float] = {}
        with surviving(self._report, "making the scalars"):
            tags = scalars(statistics, self._chosen, self._rule, saturated, self._prefix)
            tags |= {f"{self._prefix}{tag}": value for tag, value in (more or {}).items()}
            values = torch.tensor(list(tags.values()), dtype=torch.float32, device="cpu")
            callback_metrics(trainer).update(zip(tags, values.unbind(), strict=True))
        if not trainer.is_global_zero:
            return
        if changed:
            with surviving(self._report, "writing the file of events"):
                append_events(trainer.loggers, event_records(step, changes))
        self._observations += 1
        pictures: dict[str, Picture] = {}
        with surviving(self._report, "making the tables of heads"):
            snapshot = self._rows.take(step, statistics, self._rule)
            due = changed or picture_due(self._observations)
            if due:
                pictures = self._drawn(trainer, snapshot)
            if any(_is_tensorboard(logger) for logger in trainer.loggers):
                self._tell(
                    self._dashboard.prepare(
                        snapshot,
                        changes,
                        saturated_heads=saturated,
                        pictures=pictures if due else None,
                        curves=len(tags),
                    )
                )
        experiments: list[object] = []
        for logger in trainer.loggers:
            with surviving(self._report, f"writing to {type(logger).__name__}"):
                if not self._written_at_once(logger, tags, step):
                    log_scalars(logger, tags, step)
                experiments.append(getattr(logger, "experiment", None))
        with surviving(self._report, "writing to TensorBoard"):
            self._tell(self._dashboard.send(experiments, tags))
        self._log_pictures(trainer, pictures, step)
        for logger in trainer.loggers if changed else ():
            with surviving(self._report, f"flushing {type(logger).__name__}"):
                logger.save()  # the last points before a crash are the ones that matter

    def _written_at_once(self, logger: Any, tags: Mapping[str, float], step: int) -> bool:
        try:
            return self._dashboard.write_scalars(logger, tags, step)
        except Exception:
            return False  # the logger's own way is slower, and tells what is wrong if it fails too

    def _tell(self, problems: Sequence[str]) -> None:
        for problem in problems:
            self._report(f"TensorBoard gets no more {problem}; scalars go on")

    def _drawn(self, trainer: Trainer, snapshot: Snapshot) -> dict[str, Picture]:
        """Draw the pictures, if anyone takes them; what cannot be drawn is given up."""
        wanted = any(takes_pictures(logger) or _is_tensorboard(logger) for logger in trainer.loggers)
        if not wanted or "drawing" in self._broken:
            return {}
        try:
            names = [name for name in self._dashboard.names if name in snapshot.tables]
            return {name: draw(name, snapshot, self._rule.default_limit) for name in names}
        except Exception as error:
            self._broken.add("drawing")
            self._tell([f"images ({type(error).__name__}: {error})"])
            return {}

    def _log_pictures(self, trainer: Trainer, pictures: Mapping[str, Picture], step: int) -> None:
        tagged = {f"{self._prefix}{PICTURES}/{name}": picture for name, picture in pictures.items()}
        for index, logger in enumerate(trainer.loggers):
            key = f"{index} {type(logger).__name__}"
            if not tagged or not takes_pictures(logger) or key in self._broken:
                continue
            try:
                log_pictures(logger, tagged, step)
            except Exception as error:
                self._broken.add(key)
                self._report(
                    f"{type(logger).__name__} gets no more images ({type(error).__name__}: {error}); scalars go on"
                )


def _is_tensorboard(logger: object) -> bool:
    """Tell TensorBoard's logger, and any other whose experiment has the methods of a `SummaryWriter`."""
    try:
        return hasattr(getattr(logger, "experiment", None), "add_image")
    except Exception:
        return False  # what is wrong with it shows when it is written to

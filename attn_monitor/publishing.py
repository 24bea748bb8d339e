"""Where a record goes: the metrics of the loop and every logger. What fails is reported and never stops the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from attn_monitor.dashboards.given import Given
from attn_monitor.dashboards.other_loggers import append_records, log_pictures, log_scalars, takes_pictures
from attn_monitor.dashboards.pictures import Picture, draw
from attn_monitor.dashboards.scalars import scalars
from attn_monitor.dashboards.tables import Rows, Snapshot, event_records
from attn_monitor.dashboards.tensorboard import Dashboard
from attn_monitor.loop import Loop
from attn_monitor.notices import surviving
from attn_monitor.phrases import error_line
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.stored_events import note_records
from attn_monitor.tags import EVENTS_FILE, NOTES_FILE, PICTURES
from attn_monitor.tracking import Changes

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
        self._given = Given(prefix)
        self._rows = Rows(heads)
        self._dashboard = Dashboard(chosen, rule, prefix, layout=layout)
        self._observations = 0
        self._broken: set[str] = set()

    def publish(
        self,
        loop: Loop,
        step: int,
        statistics: Mapping[str, AttentionStatistics],
        saturated: int,
        changes: Changes | None = None,
        more: Mapping[str, float] | None = None,
        lost: Collection[str] | None = (),
        notes: Sequence[str] = (),
    ) -> None:
        """Publish a record.

        What a layer of it had in earlier records and has no more is published as nan, and so is everything of a layer
        that is lost. What is known of layers that did not run stays as it is.

        Args:
            loop: Has the loggers; only the global rank 0 writes to them.
            step: The x value.
            statistics: The record.
            saturated: How many heads are saturated.
            changes: What the record changed.
            more: Other model-wide numbers, by tag.
            lost: The layers that ran and could not be measured; `None` if the whole record was lost.
            notes: What is said of it beside its events, such as a wrong scale and forecasts.
        """
        changes = Changes() if changes is None else changes
        changed = bool(changes.opened or changes.escalated or changes.ended)
        tags: dict[str, float] = {}
        with surviving(self._report, "making the scalars"):
            tags = scalars(statistics, self._chosen, self._rule, saturated, self._prefix)
            tags |= {f"{self._prefix}{tag}": value for tag, value in (more or {}).items()}
            tags = self._given.completed(tags, statistics, lost)
        tags = tags or self._given.completed({}, (), None)  # what we fail to make must not read as it did before
        with surviving(self._report, "writing to callback_metrics"):
            values = torch.tensor(list(tags.values()), dtype=torch.float32, device="cpu")
            loop.metrics.update(zip(tags, values.unbind(), strict=True))
        if not loop.is_global_zero:
            return
        if changed:
            with surviving(self._report, "writing the file of events"):
                append_records(loop.loggers, event_records(step, changes), f"{self._prefix}{EVENTS_FILE}")
        if notes:
            with surviving(self._report, "writing the file of notes"):
                append_records(loop.loggers, note_records(step, notes), f"{self._prefix}{NOTES_FILE}")
        self._observations += 1
        pictures: dict[str, Picture] = {}
        problems: list[str] = []
        with surviving(self._report, "making the tables of heads"):
            snapshot = self._rows.take(step, statistics, self._rule)
            due = changed or picture_due(self._observations)
            if due:
                pictures = self._drawn(loop, snapshot)
            if any(_is_tensorboard(logger) for logger in loop.loggers):
                problems = self._dashboard.prepare(
                    snapshot,
                    changes,
                    saturated_heads=saturated,
                    pictures=pictures if due else None,
                    curves=len(tags),
                    lost=lost,
                    notes=notes,
                )
        experiments: list[object] = []
        slow: dict[str, str] = {}
        named = _named(loop.loggers)
        for name, logger in named.items():
            experiments.append(None)
            with surviving(self._report, f"writing to {name}"):
                slow |= self._write_scalars(name, logger, tags, step)
                experiments[-1] = getattr(logger, "experiment", None)
        with surviving(self._report, "writing to TensorBoard"):
            problems += self._dashboard.send(experiments, tags)
        self._tell(problems)
        for name, error in slow.items():
            if not any(error in problem for problem in problems):  # one cause needs one text
                self._report(f"writing to {name} in one piece failed: {error}; it gets value by value, which is slower")
        self._log_pictures(loop, pictures, step)
        for name, logger in named.items() if changed or notes else ():
            with surviving(self._report, f"flushing {name}"):
                logger.save()  # the last points before a crash are the ones that matter

    def _write_scalars(self, name: str, logger: Any, tags: Mapping[str, float], step: int) -> dict[str, str]:
        """Write scalars at once where that can be done, else the logger's own way, which is slower.

        Returns:
            What failed of the first where the second worked, by the name of the logger. That is not tried again.
        """
        failed: dict[str, str] = {}
        at_once = f"{name} at once"
        if at_once not in self._broken:
            try:
                if self._dashboard.write_scalars(logger, tags, step):
                    return {}
            except Exception as error:
                failed[name] = error_line(error)
        log_scalars(logger, tags, step)  # raises if something is wrong with the logger itself
        if failed:
            self._broken.add(at_once)
        return failed

    def _tell(self, problems: Sequence[str]) -> None:
        for problem in problems:
            self._report(f"TensorBoard gets no more {problem}; scalars go on")

    def _drawn(self, loop: Loop, snapshot: Snapshot) -> dict[str, Picture]:
        """Draw the pictures, if anyone takes them; what cannot be drawn is given up."""
        if "drawing" in self._broken:
            return {}
        try:
            if not any(_is_tensorboard(logger) or takes_pictures(logger) for logger in loop.loggers):
                return {}
            names = [name for name in self._dashboard.names if name in snapshot.tables]
            return {name: draw(name, snapshot, self._rule.default_limit) for name in names}
        except Exception as error:
            self._broken.add("drawing")
            self._tell([f"images ({error_line(error)})"])
            return {}

    def _log_pictures(self, loop: Loop, pictures: Mapping[str, Picture], step: int) -> None:
        tagged = {f"{self._prefix}{PICTURES}/{name}": picture for name, picture in pictures.items()}
        for name, logger in _named(loop.loggers).items():
            if not tagged or name in self._broken:
                continue
            try:
                if takes_pictures(logger):
                    log_pictures(logger, tagged, step)
            except Exception as error:
                self._broken.add(name)
                self._report(f"{name} gets no more images ({error_line(error)}); scalars go on")


def _named(loggers: Sequence[Any]) -> dict[str, Any]:
    """Return loggers by the name of their class, those of one class numbered from the second on."""
    named: dict[str, Any] = {}
    for logger in loggers:
        name = type(logger).__name__
        number = 1 + sum(type(other).__name__ == name for other in named.values())
        named[name if number == 1 else f"{name} {number}"] = logger
    return named


def _is_tensorboard(logger: object) -> bool:
    """Tell TensorBoard's logger, and any other whose experiment has the methods of a `SummaryWriter`."""
    try:
        return hasattr(getattr(logger, "experiment", None), "add_image")
    except Exception:
        return False  # what is wrong with it shows when it is written to

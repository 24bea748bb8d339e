"""What TensorBoard gets: curves, pictures, histograms, texts, and the tensors that the Attention tab reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from attn_monitor.catalog import STATISTICS
from attn_monitor.dashboards.fast_records import hasten_checksums
from attn_monitor.dashboards.first_factors import FirstFactors
from attn_monitor.dashboards.given import Given
from attn_monitor.dashboards.layout import bands, categories_written, is_ours
from attn_monitor.dashboards.pictures import Picture
from attn_monitor.dashboards.summaries import Summaries, bucketed
from attn_monitor.dashboards.tables import Snapshot, event_records, overview
from attn_monitor.dashboards.texts import event_page, legend_page, note_page, summary_page
from attn_monitor.phrases import error_line
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO
from attn_monitor.stored_events import note_records
from attn_monitor.tags import (
    EVENTS_TAG,
    HEAD_DIM_TAG,
    HISTOGRAMS,
    LAYERS_TAG,
    LEGEND_TAG,
    NOTE_RECORDS_TAG,
    NOTES_TAG,
    OVERVIEW,
    PICTURES,
    PLUGIN,
    RECORDS_TAG,
    SUMMARY_TAG,
    describe_histogram,
    describe_picture,
    describe_scalar,
    describe_table,
)
from attn_monitor.tracking import Changes

_PAGES = {
    EVENTS_TAG: "Heads that became saturated, became critical or recovered.",
    NOTES_TAG: "What was said of the model as a whole, such as a wrong scale, and forecasts.",
    SUMMARY_TAG: "The worst heads, and what grew.",
}
_ALL = "but scalars"
"""What a writer of torch gets no more if it fails."""
_STOCK_LOGGERS = {"lightning_fabric.loggers.tensorboard", "lightning.fabric.loggers.tensorboard"}


class _Prepared(NamedTuple):
    """A record on its way to the writers."""

    snapshot: Snapshot
    pages: Mapping[str, str]
    """By tag."""
    pictures: Mapping[str, Picture]
    summaries: Summaries


class Dashboard:
    """Writes to TensorBoard's `SummaryWriter`s.

    A kind of write that fails is given up, for every writer or for the one that failed, and its message returned, so
    that scalars go on alone.

    Args:
        chosen: The statistics that get a picture and a histogram; the tensors hold everything that was measured.
        rule: Gives the limit.
        prefix: Stands before every tag.
        layout: Whether to write a layout for the custom scalars, where a run has none.
    """

    def __init__(self, chosen: Iterable[str], rule: SaturationRule, prefix: str = "", *, layout: bool = False) -> None:
        self._chosen = sorted(chosen, key=list(STATISTICS).index)
        self._rule = rule
        self._prefix = prefix
        self._layout = layout
        self._growth = FirstFactors()
        self._overview = Given()
        self._described: set[str] = set()
        self._given_up: set[str] = set()
        self._broken: set[tuple[int, str]] = set()
        self._laid_out: set[int] = set()
        self._prepared: _Prepared | None = None

    @property
    def names(self) -> list[str]:
        """The per-head numbers that get a picture."""
        return [*self._chosen, RATIO]

    def write_scalars(self, logger: Any, tags: Mapping[str, float], step: int) -> bool:
        """Write scalars in one piece and with their descriptions, and tell whether that could be done.

        It cannot for loggers that are not Lightning's own or do something with the values themselves: those must be
        asked to log them. `add_scalar` takes a tenth of a millisecond a tag, too long for hundreds.
        """
        stock = getattr(logger.log_metrics, "__module__", "") in _STOCK_LOGGERS and not getattr(logger, "_prefix", "")
        if not stock or not is_torch_writer(logger.experiment):
            return False
        summaries = Summaries(self._described)
        for tag, value in tags.items():
            summaries.scalar(tag, value, partial(describe_scalar, tag.removeprefix(self._prefix)))
        _send(logger.experiment, summaries, step)
        return True

    def prepare(
        self,
        snapshot: Snapshot,
        changes: Changes,
        *,
        saturated_heads: int = 0,
        pictures: Mapping[str, Picture] | None = None,
        curves: int = 0,
        lost: Collection[str] | None = (),
        notes: Sequence[str] = (),
    ) -> list[str]:
        """Make everything of a record but its scalars, for `send`.

        The two are apart since a writer's thread, once it has something to write, competes with what comes next.

        Args:
            snapshot: The record.
            changes: What it changed.
            saturated_heads: How many heads have an open event.
            pictures: The pictures of `names`, on the steps that have some; the summary is written with them.
            curves: The number of scalar tags, which the legend tells.
            lost: As in `Given.completed`.
            notes: What is said of it beside its events.

        Returns:
            What failed, in words.
        """
        self._growth.take(snapshot)
        step = snapshot.step
        summary = "" if pictures is None else summary_page(snapshot, self._growth, saturated_heads)
        pages = {EVENTS_TAG: event_page(step, changes), NOTES_TAG: note_page(step, notes)}
        summaries = Summaries(self._described, self._prefix)
        self._prepared = _Prepared(snapshot, pages, pictures or {}, summaries)
        kinds: dict[str, Callable[[], None]] = {
            "overview": lambda: self._add_overview(summaries, snapshot, saturated_heads, lost),
            "texts": lambda: self._add_texts(summaries, snapshot, {**pages, SUMMARY_TAG: summary}, curves),
            "images": lambda: self._add_pictures(summaries, pictures or {}),
            "histograms": lambda: self._add_histograms(summaries, snapshot),
            "tensors": lambda: self._add_tensors(summaries, snapshot, changes, notes),
        }
        problems: list[str] = []
        for kind, add in kinds.items():
            if kind in self._given_up:
                continue
            before = len(summaries.values)
            try:
                add()
            except Exception as error:
                del summaries.values[before:]
                self._given_up.add(kind)
                problems.append(_problem(kind, error))
        return problems

    def send(self, experiments: Sequence[object], tags: Iterable[str] = ()) -> list[str]:
        """Write what was prepared to every TensorBoard writer among the loggers' experiments.

        Args:
            experiments: What the loggers write to.
            tags: The scalar tags of the record.

        Returns:
            What failed, in words.
        """
        prepared, self._prepared = self._prepared, None
        problems: list[str] = []
        if prepared is None:
            return problems
        for index, writer in enumerate(experiments):
            jobs: Mapping[str, Callable[[Any], None]] = {}
            try:
                jobs = self._jobs(index, writer, prepared, tags)
            except Exception as error:
                problems += self._given_up_for(index, _ALL, error)
            for kind, job in jobs.items():
                if (index, kind) in self._broken:
                    continue
                try:
                    job(writer)
                except Exception as error:
                    problems += self._given_up_for(index, kind, error)
        return problems

    def _given_up_for(self, index: int, kind: str, error: Exception) -> list[str]:
        """Give up a kind for a writer; return what to tell of it, once."""
        known = (index, kind) in self._broken
        self._broken.add((index, kind))
        return [] if known else [_problem(kind, error)]

    def _jobs(
        self, index: int, writer: object, prepared: _Prepared, tags: Iterable[str]
    ) -> dict[str, Callable[[Any], None]]:
        """Return what there is to write to an experiment, by what is given up if it fails."""
        if is_torch_writer(writer):
            jobs: dict[str, Callable[[Any], None]] = {
                _ALL: partial(_send, summaries=prepared.summaries, step=prepared.snapshot.step)
            }
            if self._layout and index not in self._laid_out:
                jobs["layouts"] = partial(self._write_layout, index=index, tags=tags)
            return jobs
        if not hasattr(writer, "add_image") or not hasattr(writer, "add_text"):
            return {}
        return {
            "texts": partial(self._write_pages, prepared=prepared),
            "images": partial(self._write_pictures, prepared=prepared),
            "histograms": partial(self._write_histograms, prepared=prepared),
        }

    def _add_overview(
        self, summaries: Summaries, snapshot: Snapshot, saturated_heads: int, lost: Collection[str] | None
    ) -> None:
        found = overview(snapshot, self._chosen, saturated_heads)
        tags = {f"{OVERVIEW}/{name}": value for name, value in found.items()}
        for tag, value in self._overview.completed(tags, snapshot.observed, lost).items():
            summaries.scalar(tag, value, partial(describe_scalar, tag))

    def _add_texts(self, summaries: Summaries, snapshot: Snapshot, pages: Mapping[str, str], curves: int) -> None:
        for tag, page in pages.items():
            if page:
                summaries.text(tag, page, _PAGES[tag])
        if snapshot.joined:
            summaries.text(LEGEND_TAG, legend_page(snapshot, self.names, curves), "How to read the pictures.")

    def _add_pictures(self, summaries: Summaries, pictures: Mapping[str, Picture]) -> None:
        for name, picture in pictures.items():
            legend = partial(describe_picture, name, self._rule.default_limit)
            summaries.image(f"{PICTURES}/{name}", picture.png(), picture.indices.shape, legend)

    def _add_histograms(self, summaries: Summaries, snapshot: Snapshot) -> None:
        for name in self.names:
            if name in snapshot.tables:
                summaries.histogram(f"{HISTOGRAMS}/{name}", snapshot.tables[name], partial(describe_histogram, name))

    def _add_tensors(self, summaries: Summaries, snapshot: Snapshot, changes: Changes, notes: Sequence[str]) -> None:
        if snapshot.joined:
            summaries.strings(LAYERS_TAG, snapshot.layers, "layers", "Names of the rows of the per-head tensors.")
            summaries.table(HEAD_DIM_TAG, snapshot.head_dims, "head_dim", "d_k of every layer, nan if unknown.")
        for name, table in snapshot.tables.items():
            content: dict[str, object] = {"statistic": name}
            if name == RATIO:
                content["threshold"] = self._rule.default_limit
            summaries.table(f"{PLUGIN}/{name}", table, "heads", partial(describe_table, name), **content)
        if records := event_records(snapshot.step, changes):
            summaries.strings(RECORDS_TAG, records, "events", "Events that opened, became critical or ended, as JSON.")
        if notes:
            told = note_records(snapshot.step, notes)
            summaries.strings(NOTE_RECORDS_TAG, told, "notes", "What was said beside the events, as JSON.")

    def _write_layout(self, writer: Any, index: int, tags: Iterable[str]) -> None:
        layout = bands(tags, self._prefix)
        if not layout:
            return  # nothing was measured yet
        self._laid_out.add(index)
        writer.flush()
        written = categories_written(writer.get_logdir())
        if written is None:
            writer.add_custom_scalars(layout)
        elif not is_ours(written, layout):
            raise FileExistsError(f"the run has a layout with {written}, which a second one would replace")

    def _write_pages(self, writer: Any, prepared: _Prepared) -> None:
        for tag, page in prepared.pages.items():
            if page:
                writer.add_text(f"{self._prefix}{tag}", page, prepared.snapshot.step)

    def _write_pictures(self, writer: Any, prepared: _Prepared) -> None:
        for name, picture in prepared.pictures.items():
            tag = f"{self._prefix}{PICTURES}/{name}"
            writer.add_image(tag, picture.rgb(), prepared.snapshot.step, dataformats="HWC")

    def _write_histograms(self, writer: Any, prepared: _Prepared) -> None:
        for name in self.names:
            values = prepared.snapshot.tables.get(name)
            buckets = None if values is None else bucketed(values)
            if buckets is not None and hasattr(writer, "add_histogram_raw"):
                limits, counts = buckets.pop("bucket_limit"), buckets.pop("bucket")
                writer.add_histogram_raw(
                    f"{self._prefix}{HISTOGRAMS}/{name}",
                    **buckets,
                    bucket_limits=limits,
                    bucket_counts=counts,
                    global_step=prepared.snapshot.step,
                )


def is_torch_writer(writer: object) -> bool:
    """Tell torch's writer from tensorboardX's, whose messages are of another class; import neither."""
    module = sys.modules.get("torch.utils.tensorboard")
    return module is not None and isinstance(writer, module.SummaryWriter)


def _send(writer: Any, summaries: Summaries, step: int) -> None:
    if summaries.values:
        files = writer._get_file_writer()
        hasten_checksums(files)
        files.add_summary(summaries.proto(), step)


def _problem(kind: str, error: Exception) -> str:
    return f"{kind} ({error_line(error)})"

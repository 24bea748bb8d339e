"""One probe in the service of a training loop: an error of ours ends the observation, never the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from attn_monitor.phrases import error_line
from attn_monitor.probe import AttentionProbe
from attn_monitor.ranks import RankReduction
from attn_monitor.records import AttentionStatistics


class Observer:
    """Holds the probe of one stage, attached for observed batches only.

    Args:
        probe: Lives as long as the observer, so that it remembers what it discovered.
        method: The method of the module that runs a batch; empty where the module itself is called.
        report: Takes what went wrong, in words.
        ranks: Pools what all processes saw, `None` on a single one.

    Attributes:
        probe: The probe.
        pooling: Whether batches were observed that are not collected yet.
        losses: Over how many losses of this process the observed step takes the mean, so far; 0 counts as one.
        records: How many records were collected.
        skipped: What the last record had to leave out, and why.
        notes: What to know about the last record.
    """

    def __init__(
        self, probe: AttentionProbe, method: str, report: Callable[[str], None], ranks: RankReduction | None = None
    ) -> None:
        self.probe = probe
        self.ranks = ranks
        self.pooling = False
        self.losses = 0
        self.records = 0
        self.skipped: Mapping[str, str] = {}
        self.notes: Mapping[str, str] = {}
        self._method = method
        self._report = report
        self._failure = ""

    def begin(self) -> None:
        """Observe from here on."""
        if not self.pooling:  # a step that failed anywhere must not count in this one
            self.losses = 0
        self.pooling = True
        with self._surviving("attaching to the model"):
            self.probe.attach(methods=(self._method,) if self._method else ())

    def end(self) -> None:
        """Remove everything from the model, keep what was seen. Harmless at any time."""
        with self._surviving("detaching from the model"):
            self.probe.detach()

    def collect(self) -> Mapping[str, AttentionStatistics] | None:
        """Return the pooled statistics and start afresh; `None` after an error, of any process.

        With several processes all of them have to ask for the same records.
        """
        statistics: Mapping[str, AttentionStatistics] = {}
        failure, losses = self._failure, max(self.losses, 1)
        with self._surviving("computing the statistics"), torch.inference_mode(False):
            if self.ranks is None:
                statistics = self.probe.compute(losses=losses)
            else:
                statistics = self.probe.compute_with(self.ranks, losses, failure)
            self.skipped, self.notes = dict(self.probe.skipped), dict(self.probe.notes)
        lost = bool(self._failure)
        self.discard()
        self.records += not lost
        return None if lost else statistics

    def fail(self, told: str) -> None:
        """Give up the record that is being made, if one is; to one that several processes make this one still comes."""
        if not self.pooling:
            return
        if self.ranks is None:
            self.discard()
            return
        self.end()
        self._failure = self._failure or told

    def discard(self) -> None:
        """Detach and forget what was seen. Harmless at any time."""
        self.pooling = False
        self.end()
        for _ in range(2):  # what is left of one step would falsify the record of the next
            self._failure = ""
            with self._surviving("resetting"):
                self.probe.reset()
            if not self._failure:
                break
        self._failure = ""

    @contextmanager
    def _surviving(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = self._failure or f"{doing} failed: {error_line(error)}"
            self._report(f"{doing} failed, this record is lost: {error_line(error)}")

"""One probe in the service of a training loop: an error of ours ends the observation, never the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from attn_monitor.probe import AttentionProbe
from attn_monitor.records import AttentionStatistics


class Observer:
    """Holds the probe of one stage, attached for observed batches only.

    Args:
        probe: Lives as long as the observer, so that it remembers what it discovered.
        method: The method of the module that runs a batch.
        report: Takes what went wrong, in words.

    Attributes:
        probe: The probe.
        pooling: Whether batches were observed that are not collected yet.
        records: How many records were collected.
        skipped: What the last record had to leave out, and why.
        notes: What to know about the last record.
    """

    def __init__(self, probe: AttentionProbe, method: str, report: Callable[[str], None]) -> None:
        self.probe = probe
        self.pooling = False
        self.records = 0
        self.skipped: Mapping[str, str] = {}
        self.notes: Mapping[str, str] = {}
        self._method = method
        self._report = report
        self._lost = False

    def begin(self) -> None:
        """Observe from here on."""
        self.pooling = True
        with self._surviving("attaching to the model"):
            self.probe.attach(methods=(self._method,))

    def end(self) -> None:
        """Remove everything from the model, keep what was seen. Harmless at any time."""
        with self._surviving("detaching from the model"):
            self.probe.detach()

    def collect(self, losses: int = 1) -> Mapping[str, AttentionStatistics] | None:
        """Return the pooled statistics and start afresh; `None` after an error.

        Args:
            losses: Over how many losses the optimizer step takes the mean.
        """
        statistics: Mapping[str, AttentionStatistics] = {}
        with self._surviving("computing the statistics"), torch.inference_mode(False):
            statistics = self.probe.compute(losses=losses)
            self.skipped, self.notes = dict(self.probe.skipped), dict(self.probe.notes)
        lost = self._lost
        self.discard()
        self.records += not lost
        return None if lost else statistics

    def discard(self) -> None:
        """Detach and forget what was seen. Harmless at any time."""
        self.pooling = False
        self.end()
        with self._surviving("resetting"):
            self.probe.reset()
        self._lost = False

    @contextmanager
    def _surviving(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._lost = True
            self._report(f"{doing} failed, this record is lost: {type(error).__name__}: {error}")

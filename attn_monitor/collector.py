"""Turns sightings into the sums of layers: what to measure now or later, what to count once, what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture.naming import CallSite
from attn_monitor.capture.ownership import in_backward
from attn_monitor.capture.sighting import Sighting, UnmeasurableError
from attn_monitor.catalog import GRADIENTS
from attn_monitor.looks import GradScale, Looks, PendingEntries
from attn_monitor.phrases import error_line
from attn_monitor.placement import Placement
from attn_monitor.records import AttentionCall
from attn_monitor.sums import AttentionSums
from attn_monitor.taps import ChangedInPlaceError, GradientTaps, can_wait, saving
from attn_monitor.tensor_parallel import HeadPlaces, HeadShard
from attn_monitor.unseen import unseen

NO_BACKWARD = (
    "gradients not measured: no backward pass reached it while the probe was attached; it belongs inside the with block"
)
_MOST_FIRST_PASSES = 1000
"""Calls without a graph that are remembered: more than any checkpointed step has, and a bound where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class _Unplaced:
    """The record of a recomputed call whose place among the calls of the first pass is not known yet."""

    record: str
    fingerprint: Tensor


class Collector:
    """Collects the calls of one model. None of its methods raises for what happens in our own code.

    Args:
        statistics: What is computed.
        max_queries: Rows per call that are looked at.
        gradients: Whether gradients are measured.
        per_call: Whether each call of a module in one forward has a record of its own.
        grad_scale: What gradients are divided by.

    Attributes:
        gathered: Whether somebody puts the heads together that tensor parallelism spreads over processes.
    """

    def __init__(
        self,
        statistics: frozenset[str],
        *,
        max_queries: int | None,
        gradients: bool,
        per_call: bool,
        grad_scale: GradScale,
    ) -> None:
        self._gradients = gradients and bool(statistics & GRADIENTS)
        self._per_call = per_call
        self.placement = Placement()
        self.on_call: Callable[[str | None, AttentionCall], None] | None = None
        self._counts: dict[Hashable, int] = {}
        self.sums: dict[str, AttentionSums] = {}
        self._order: dict[str, None] = {}
        self._skipped: dict[str, str] = {}
        self._unmeasured: set[str] = set()
        self._lost: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._ungraded: dict[str, str] = {}
        self._tapped: dict[str, None] = {}  # in their order
        self._heads = HeadPlaces()
        self.gathered = False
        self._ended = False
        self._broken = ""
        self.paths: dict[str, str] = {}
        self._first_pass: dict[str, list[tuple[str, Tensor]]] = {}
        self._unplaced: list[tuple[_Unplaced, AttentionSums]] = []
        self._merging = threading.Lock()
        self._looks = Looks(
            statistics,
            max_queries=max_queries,
            grad_scale=grad_scale,
            deliver=self._place,
            failed=self._not_measured,
        )
        self._taps = GradientTaps(self._looks, self._gradient_failed, self.broken)

    @property
    def failure(self) -> str:
        """Why nothing of what was seen can be trusted, empty if it can."""
        return f"watching the model failed: {self._broken}" if self._broken else ""

    @property
    def skipped(self) -> dict[str, str]:
        """Attention that was seen and not measured, with the reason."""
        measured = {record.partition("@")[0].partition("#")[0] for record in self.sums}
        shown = self.placement.shown_in  # the user has seen to what is in there
        lost = {name: why for name, why in self._lost.items() if name not in measured}
        hidden = shown & (self._unmeasured | lost.keys())
        found = {name: why for name, why in {**lost, **self._skipped}.items() if name not in hidden}
        if self._broken:
            found[self.placement.root] = self.failure
        return {name: found[name] for name in (*self._order, *found) if name in found}

    @property
    def notes(self) -> dict[str, str]:
        """What to know about the numbers of a record."""
        late = {record: NO_BACKWARD for record in self._tapped if self._ended and not self._has_gradients(record)}
        some = {} if self.gathered else {record: shard.note for record, shard in self.head_shards.items()}
        others = {**late, **self._notes, **self._ungraded}
        return {**others, **{record: "; ".join(filter(None, (some[record], others.get(record)))) for record in some}}

    @property
    def head_shards(self) -> dict[str, HeadShard]:
        """Which of a record's heads are here, for records of which others are in other processes."""
        return {record: shard for record in self.sums if (shard := self._heads.parts.get(record)) is not None}

    def begin(self) -> None:
        """Prepare for the hooks of one attachment."""
        self._ended = False
        self._counts.clear()

    def start(self) -> None:
        """Note that an outermost forward starts."""
        self._counts.clear()

    def end(self) -> None:
        """Let go of every tensor of the model."""
        try:
            self.settle()
        except Exception as error:
            self.broken(error)
        finally:  # also where the user interrupts it
            self._taps.remove()
            self._looks.free()
            self._ended = True

    def reset(self) -> None:
        """Forget what was collected; what was discovered stays."""
        self._taps.remove()
        self._looks.clear()
        self._broken = ""
        self.sums.clear()
        self._order.clear()
        self._skipped.clear()
        self._unmeasured.clear()
        self._lost.clear()
        self._notes.clear()
        self._ungraded.clear()
        self._tapped.clear()
        self._heads.parts.clear()
        self._first_pass.clear()
        self._unplaced.clear()

    # -- what capture calls -----------------------------------------------------------------------------------------

    def before(self, sighting: Sighting) -> None:
        """Take a call that is about to run."""
        if in_backward() and self._gradients and sighting.differentiable and saving() == "recomputation":
            found = self.placement.place()
            if found is not None:
                record, site = found
                self._try(record, lambda: self._taps.refill((record, site), sighting))

    def after(self, sighting: Sighting, out: Tensor) -> None:
        """Take a call that has run."""
        found = self.placement.place()
        if self.on_call is not None:
            self.on_call(None if found is None else found[0], sighting.call)
        if found is not None:
            self._take(*found, sighting, out)

    def unmeasured(self, reason: str) -> None:
        """Take note of attention in the running module that can't be measured."""
        name, owner = self.placement.owner()
        if self.placement.settled(owner) and (owner is None or self.placement.is_selected(owner)):
            self._skipped.setdefault(name, reason)
            self._unmeasured.add(name)

    def lost(self, error: Exception) -> None:
        """Take note that scores in the running module can't be followed any further."""
        name, owner = self.placement.owner()
        if self.placement.settled(owner):
            self._lost.setdefault(name, f"its scores could not be followed: {error_line(error)}")

    def failed(self, error: Exception) -> None:
        """Take note of an error of ours in the running module."""
        name, owner = self.placement.owner()
        if self.placement.settled(owner):
            self._fail(name, error)

    def broken(self, error: Exception) -> None:
        """Take note that watching itself failed: nothing of what was seen can be trusted."""
        self._broken = self._broken or error_line(error)
        self.sums.clear()

    def observed(self, name: str, sighting: Sighting, out: Tensor | None) -> None:
        """Take a call that the user shows."""
        self.placement.shown_in.add(self.placement.owner()[0])
        if in_backward() and self._gradients and sighting.differentiable and saving() == "recomputation":
            self._try(name, lambda: self._taps.refill((name, ()), sighting))
        self._take(name, (), sighting, out)

    def not_observed(self, name: str, reason: str) -> None:
        """Take note of a call the user shows that can't be measured."""
        self._skipped.setdefault(name, reason)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _take(self, record: str, site: CallSite, sighting: Sighting, out: Tensor | None) -> None:
        self._try(record, self._taps.measure_dropped)
        self._try(record, lambda: self._measure(record, site, sighting, out))

    def _measure(self, record: str, site: CallSite, sighting: Sighting, out: Tensor | None) -> None:
        where = saving() if self._gradients else "graph"
        recomputed = in_backward()
        target: Hashable = record
        if self._per_call and not recomputed:
            number = self._counts.get(record, 0)
            self._counts[record] = number + 1
            target = f"{record}@{number}"
            if not torch.is_grad_enabled():  # perhaps the first pass of a reentrant checkpoint
                first = self._first_pass.setdefault(record, [])
                first.append((target, _fingerprint(sighting)))
                del first[:-_MOST_FIRST_PASSES]
        elif self._per_call:
            target = _Unplaced(record, _fingerprint(sighting))
        tapped = self._gradients and sighting.differentiable and where != "recomputation"
        forward = isinstance(target, str) and not recomputed
        entries: PendingEntries | None = None
        waits = forward and tapped and where == "graph" and can_wait(sighting, out)
        if isinstance(target, str) and forward:
            if reason := self._heads.misplaced(target, sighting, self.placement.running()):
                self.drop(record, reason)
                return
            self._order.setdefault(target)
            self.paths[target] = sighting.path
            if sighting.note:
                self._notes[target] = sighting.note
            if not waits:
                if tapped and where == "graph" and sighting.logits is not None:
                    entries = self._looks.look_at_softmax(target, sighting.call)
                else:
                    self._looks.look(target, sighting.call)
        if tapped:
            if isinstance(target, str):
                self._tapped[target] = None
            later = where == "checkpoint"
            self._taps.tap(
                target, (record, site), sighting, out, recomputed_later=later, forward=waits, entries=entries
            )

    def _has_gradients(self, record: str) -> bool:
        return record not in self.sums or bool(self.sums[record].measured & GRADIENTS)

    # -- sums -------------------------------------------------------------------------------------------------------

    def _merge(self, record: str, sums: AttentionSums) -> None:
        if self._broken or record.partition("@")[0] in self._skipped or record in self._skipped:
            return
        with self._merging:
            before = self.sums.get(record)
            self.sums[record] = sums if before is None else before.merge(sums)

    def _place(self, record: Hashable, sums: AttentionSums) -> None:
        if isinstance(record, _Unplaced):
            self._unplaced.append((record, sums))
        else:
            self._merge(str(record), sums)

    def settle(self) -> None:
        """Measure what still waits and place what the backward pass could not. This may wait for the device."""
        with unseen():
            lost_records = self._taps.finish()
            self._looks.empty()
        for lost in lost_records:
            self._notes[str(lost)] = (
                "gradients not measured: the checkpointed region was not recomputed where it is seen"
            )
        placed: dict[_Unplaced, str] = {}  # a softmax delivers the gradients of its two sides one by one
        for unplaced, sums in self._unplaced:
            if unplaced not in placed:
                placed[unplaced] = self._first_pass_record(unplaced)
            self._merge(placed[unplaced], sums)
        self._unplaced.clear()
        in_order = [name for name in self._order if name in self.sums]  # a backward pass delivers last layers first
        self.sums = {name: self.sums[name] for name in (*in_order, *self.sums)}
        for name in self._ungraded.keys() & self.sums.keys():
            sums = self.sums[name]
            self.sums[name] = replace(sums, measured=sums.measured - GRADIENTS)

    def _first_pass_record(self, unplaced: _Unplaced) -> str:
        calls = self._first_pass.get(unplaced.record, [])
        if not calls:
            return unplaced.record
        same = (i for i, (_, fingerprint) in enumerate(calls) if bool(fingerprint == unplaced.fingerprint))
        return calls.pop(next(same, -1))[0]  # failing that the last call, which is recomputed first

    # -- errors -----------------------------------------------------------------------------------------------------

    def _try(self, record: str, action: Callable[[], Any]) -> None:
        try:
            with unseen():
                action()
        except Exception as error:
            self._fail(record, error)

    def _gradient_failed(self, record: Hashable, error: Exception) -> None:
        if isinstance(error, (ChangedInPlaceError, UnmeasurableError)) and isinstance(record, str):
            self._looks.empty()
            if record in self.sums:  # those of other calls would be half the truth
                self._ungraded[record] = f"gradients not measured: {error}"
                return
        self._not_measured(record, error)

    def _not_measured(self, record: Hashable, error: Exception) -> None:
        self._fail(record.record if isinstance(record, _Unplaced) else str(record), error)

    def _fail(self, record: str, error: Exception) -> None:
        """Drop a layer that raised: half of its numbers would be worse than none."""
        self.drop(record, error_line(error))

    def drop(self, record: str, reason: str) -> None:
        """Give a layer up, with all its calls."""
        self._skipped[record] = reason
        for name in [name for name in self.sums if name == record or name.startswith(f"{record}@")]:
            del self.sums[name]


def _fingerprint(sighting: Sighting) -> Tensor:
    """Return a number that a recomputation reproduces to the bit and that tells calls apart."""
    call = sighting.call
    tensor = call.query if call.query is not None else call.logits
    assert tensor is not None
    return tensor.detach().to(torch.float32).nan_to_num().sum()

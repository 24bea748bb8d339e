"""Tensor hooks that catch the gradients of an attention call, also where its activations are recomputed.

On the softmax path autograd itself delivers the gradients of logits and probabilities. On the fused path the gradient
of the output and the call's query, key and value give both.

Under non-reentrant activation checkpointing the first forward pass builds the graph, but its tensors are thrown away
and made again during the backward pass. Keeping query, key and value in between would defeat the checkpointing. So
the hook placed in the first pass is filled by the recomputation, last call first, as the backward pass needs them.

One look at the logits of a fused kernel serves the statistics of both passes, so those of the forward pass wait for the
backward pass where autograd keeps query and key anyway. If none comes, they are measured with the next call, or at the
end: never where the graph is dropped, which may be anywhere.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from attn_monitor.capture.sighting import Sighting
from attn_monitor.looks import Looks, PendingEntries
from attn_monitor.records import AttentionCall
from attn_monitor.unseen import unseen

Saving: TypeAlias = Literal["graph", "checkpoint", "recomputation"]
Gradient: TypeAlias = Literal["output", "logits", "probabilities"]
Payload: TypeAlias = "AttentionCall | PendingEntries | Callable[[], AttentionCall]"
"""What a slot needs of its call besides the gradient."""


def saving() -> Saving:
    """Tell where autograd puts what it saves: the graph, or a checkpoint that is (being) recomputed."""
    hooks: Sequence[object] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    name = getattr(hooks[0], "__qualname__", "") if hooks else ""
    if name.startswith("_recomputation_hook"):
        return "recomputation"
    return "checkpoint" if name.startswith("_checkpoint_hook") else "graph"


class ChangedInPlaceError(RuntimeError):
    """A tensor of a call is no longer what it was."""


@dataclass(eq=False)
class _Slot:
    """A hooked call: its record, what it still needs, and gradients that came before that was there.

    Attributes:
        record: Where its statistics belong.
        site: Where it was made.
        canonical: Brings gradients into canonical axes.
        payload: What its gradients need; `None` until a recomputation brings it back.
        versions: Of the tensors in the payload, so that a change in place is noticed.
        waiting: Queues the forward pass if the graph goes without a backward pass; `None` if it has been measured.
        handles: Of the hooks.
        early: Gradients that came before the payload.
    """

    record: Hashable
    site: Hashable
    canonical: Callable[[Tensor], Tensor]
    payload: Payload | None = None
    versions: tuple[int, ...] = ()
    waiting: weakref.finalize[..., _Slot] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    early: list[tuple[Gradient, Tensor]] = field(default_factory=list)


class GradientTaps:
    """The hooked calls of a probe.

    Args:
        looks: Measures what the hooks bring.
        failed: Takes the record and the error when that goes wrong.
        broken: Takes an error that belongs to no record.
    """

    def __init__(
        self, looks: Looks, failed: Callable[[Hashable, Exception], None], broken: Callable[[Exception], None]
    ) -> None:
        self._looks = looks
        self._failed = failed
        self.broken = broken
        # Only the hooks themselves, and so the graph, keep a slot alive.
        self._slots: weakref.WeakSet[_Slot] = weakref.WeakSet()
        self._recomputed: dict[Hashable, list[Payload]] = {}
        self._waiting: dict[Hashable, list[_Slot]] = {}
        self._dropped: deque[tuple[Hashable, AttentionCall, tuple[int, ...]]] = deque()

    def tap(
        self,
        record: Hashable,
        site: Hashable,
        sighting: Sighting,
        out: Tensor | None,
        *,
        recomputed_later: bool,
        forward: bool = False,
        entries: PendingEntries | None = None,
    ) -> None:
        """Hook the tensors of a call whose gradients are wanted.

        Args:
            record: Where its statistics belong.
            site: Where it was made.
            sighting: The call.
            out: The output of the kernel, or the probabilities.
            recomputed_later: Whether it is part of a checkpoint.
            forward: Whether the statistics of the forward pass are still to be measured: see `can_wait`.
            entries: Those of a softmax whose gradients count, if they are looked for already.
        """
        slot = _Slot(record, site, sighting.canonical)
        if not recomputed_later:
            self._fill(slot, entries or self._payload(sighting))
        if forward:
            # A graph may be dropped in any thread, at any allocation: nothing is done there but a note taken.
            slot.waiting = weakref.finalize(slot, self._dropped.append, (record, sighting.call, slot.versions))
            slot.waiting.atexit = False
        if sighting.logits is None:
            tensors: list[tuple[Gradient, Tensor | None]] = [("output", out)]
        else:
            tensors = [("probabilities", out), ("logits", sighting.logits)]
        for kind, tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                slot.handles.append(tensor.register_hook(_Hook(self, slot, kind)))
        self._slots.add(slot)

    def refill(self, site: Hashable, sighting: Sighting) -> None:
        """Take what a recomputation brings back."""
        self._recomputed.setdefault(site, []).append(self._payload(sighting))

    def finish(self) -> list[Hashable]:
        """Measure what still waits, and return the records of gradients that nothing was recomputed for."""
        for slot in list(self._slots):
            if slot.waiting is not None:
                slot.waiting()  # once: from now on it is dead
                slot.waiting = None
        self.measure_dropped()
        for site in list(self._waiting):
            self._resolve(site)
        lost = [slot.record for slots in self._waiting.values() for slot in slots]
        self._waiting.clear()
        self._recomputed.clear()
        return lost

    def remove(self) -> None:
        """Remove every hook and let go of every tensor; what still waits is never measured."""
        for slot in list(self._slots):
            for handle in slot.handles:
                handle.remove()
            if slot.waiting is not None:
                slot.waiting.detach()
            slot.waiting = slot.payload = None
            slot.early.clear()
        self._slots.clear()
        self._waiting.clear()
        self._recomputed.clear()
        self._dropped.clear()

    def measure_dropped(self) -> None:
        """Measure the forward passes whose graphs are gone."""
        while self._dropped:
            try:
                record, call, versions = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                _check_unchanged(call, versions)
                self._looks.look(record, call)
            except Exception as error:
                self._failed(record, error)

    def _payload(self, sighting: Sighting) -> Payload:
        if sighting.logits is None:
            return sighting.make or sighting.call
        return self._looks.entries(sighting.call)

    def received(self, slot: _Slot, kind: Gradient, gradient: Tensor) -> None:
        """Take a gradient, in the backward pass."""
        try:
            with unseen():
                self.measure_dropped()
                self._receive(slot, kind, gradient)
        except Exception as error:
            self._failed(slot.record, error)

    def _receive(self, slot: _Slot, kind: Gradient, gradient: Tensor) -> None:
        self._resolve(slot.site)
        if slot.payload is None and (stack := self._recomputed.get(slot.site)):
            self._fill(slot, stack.pop())
        if slot.payload is not None:
            self._measure(slot, kind, gradient)
            return
        # The hook of a region's last operation runs before that region is recomputed.
        slot.early.append((kind, gradient))
        waiting = self._waiting.setdefault(slot.site, [])
        if slot not in waiting:
            waiting.append(slot)

    def _resolve(self, site: Hashable) -> None:
        stack = self._recomputed.get(site)
        waiting = self._waiting.get(site)
        while waiting and stack:
            slot = waiting.pop(0)
            self._fill(slot, stack.pop())
            for kind, gradient in slot.early:
                self._measure(slot, kind, gradient)
            slot.early.clear()
        if not waiting:
            self._waiting.pop(site, None)

    def _fill(self, slot: _Slot, payload: Payload) -> None:
        slot.payload, slot.versions = payload, _versions(payload)

    def _measure(self, slot: _Slot, kind: Gradient, gradient: Tensor) -> None:
        gradient, payload = slot.canonical(gradient.detach()), slot.payload
        assert payload is not None, "measured once it is there"
        _check_unchanged(payload, slot.versions)
        if isinstance(payload, PendingEntries):
            if (entries := payload.entries()) is not None and kind != "output":
                self._looks.look_at_side(slot.record, entries, kind, gradient)
        elif slot.waiting is not None and isinstance(payload, AttentionCall):
            slot.waiting.detach()
            slot.waiting = None
            self._looks.look(slot.record, payload, gradient)
        else:
            call = payload if isinstance(payload, AttentionCall) else payload()
            self._looks.look_at_gradients(slot.record, call, gradient)


def can_wait(sighting: Sighting, out: Tensor | None) -> bool:
    """Tell whether autograd keeps what the statistics of a call need, so that they can wait for the gradients."""
    return sighting.kept and sighting.logits is None and out is not None and out.requires_grad


def _tensors(call: AttentionCall) -> list[Tensor]:
    """Return the tensors of a call that the numbers depend on."""
    given = (call.query, call.key, call.value, call.sinks, *call.masks)
    return [tensor for tensor in given if tensor is not None]


def _versions(payload: Payload) -> tuple[int, ...]:
    """Return how often each tensor of a call has been changed."""
    if not isinstance(payload, AttentionCall):
        return ()
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in _tensors(payload))


def _check_unchanged(payload: Payload, versions: tuple[int, ...]) -> None:
    if _versions(payload) != versions:
        raise ChangedInPlaceError("query, key, value or mask was changed in place after the call, too early to measure")


class _Hook:
    """A tensor hook; it returns nothing, so the gradient stays what it is."""

    __slots__ = ("kind", "slot", "taps")

    def __init__(self, taps: GradientTaps, slot: _Slot, kind: Gradient) -> None:
        self.taps, self.slot, self.kind = taps, slot, kind

    def __call__(self, gradient: Tensor) -> None:
        try:
            self.taps.received(self.slot, self.kind, gradient)
        except Exception as error:  # of ours, and not the backward pass's
            self.taps.broken(error)

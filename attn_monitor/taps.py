"""Tensor hooks that catch the gradients of an attention call, also where its activations are recomputed.

On the softmax path autograd itself delivers the gradients of logits and probabilities. On the fused path the gradient
of the output and the call's query, key and value give both.

Under non-reentrant activation checkpointing the first forward pass builds the graph, but its tensors are thrown away
and made again during the backward pass. Keeping query, key and value in between would defeat the checkpointing. So
the hook placed in the first pass is filled by the recomputation, last call first, as the backward pass needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from attn_monitor.capture.sighting import Sighting
from attn_monitor.gradients import attention_gradient_sums, qualifying_entries, softmax_gradient_sums
from attn_monitor.records import AttentionCall
from attn_monitor.sums import AttentionSums

Saving: TypeAlias = Literal["graph", "checkpoint", "recomputation"]
Gradient: TypeAlias = Literal["output", "logits", "probabilities"]


def saving() -> Saving:
    """Tell where autograd puts what it saves: the graph, or a checkpoint that is (being) recomputed."""
    hooks: Sequence[object] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    name = getattr(hooks[0], "__qualname__", "") if hooks else ""
    if name.startswith("_recomputation_hook"):
        return "recomputation"
    return "checkpoint" if name.startswith("_checkpoint_hook") else "graph"


@dataclass(eq=False)
class _Slot:
    """A hooked call: its record, what it still needs, and gradients that came before that was there."""

    record: Hashable
    site: Hashable
    canonical: Callable[[Tensor], Tensor]
    payload: AttentionCall | Tensor | Callable[[], AttentionCall] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    early: list[tuple[Gradient, Tensor]] = field(default_factory=list)


class GradientTaps:
    """The hooked calls of a probe.

    Args:
        deliver: Takes the record and the sums of its gradients.
        failed: Takes the record and the error when that goes wrong.
    """

    def __init__(
        self, deliver: Callable[[Hashable, AttentionSums], None], failed: Callable[[Hashable, Exception], None]
    ) -> None:
        self._deliver = deliver
        self._failed = failed
        # Only the hooks themselves, and so the graph, keep a slot alive.
        self._slots: weakref.WeakSet[_Slot] = weakref.WeakSet()
        self._recomputed: dict[Hashable, list[AttentionCall | Tensor | Callable[[], AttentionCall]]] = {}
        self._waiting: dict[Hashable, list[_Slot]] = {}

    def tap(
        self, record: Hashable, site: Hashable, sighting: Sighting, out: Tensor | None, *, recomputed_later: bool
    ) -> None:
        """Hook the tensors of a call whose gradients are wanted."""
        slot = _Slot(record, site, sighting.canonical)
        if not recomputed_later:
            slot.payload = self._payload(sighting)
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
        """Measure the gradients that still wait, and return the records of those that nothing was recomputed for."""
        for site in list(self._waiting):
            self._resolve(site)
        lost = [slot.record for slots in self._waiting.values() for slot in slots]
        self._waiting.clear()
        self._recomputed.clear()
        return lost

    def remove(self) -> None:
        """Remove every hook and let go of every tensor."""
        for slot in list(self._slots):
            for handle in slot.handles:
                handle.remove()
            slot.payload = None
            slot.early.clear()
        self._slots.clear()
        self._waiting.clear()
        self._recomputed.clear()

    def _payload(self, sighting: Sighting) -> AttentionCall | Tensor | Callable[[], AttentionCall]:
        return sighting.make or sighting.call if sighting.logits is None else qualifying_entries(sighting.call)

    def received(self, slot: _Slot, kind: Gradient, gradient: Tensor) -> None:
        """Take a gradient, in the backward pass."""
        try:
            self._resolve(slot.site)
            if slot.payload is None and (stack := self._recomputed.get(slot.site)):
                slot.payload = stack.pop()
            if slot.payload is not None:
                self._measure(slot, kind, gradient)
                return
            # The hook of a region's last operation runs before that region is recomputed.
            slot.early.append((kind, gradient))
            waiting = self._waiting.setdefault(slot.site, [])
            if slot not in waiting:
                waiting.append(slot)
        except Exception as error:
            self._failed(slot.record, error)

    def _resolve(self, site: Hashable) -> None:
        stack = self._recomputed.get(site)
        waiting = self._waiting.get(site)
        while waiting and stack:
            slot = waiting.pop(0)
            slot.payload = stack.pop()
            for kind, gradient in slot.early:
                self._measure(slot, kind, gradient)
            slot.early.clear()
        if not waiting:
            self._waiting.pop(site, None)

    def _measure(self, slot: _Slot, kind: Gradient, gradient: Tensor) -> None:
        gradient = slot.canonical(gradient.detach())
        if isinstance(slot.payload, AttentionCall):
            sums = attention_gradient_sums(slot.payload, gradient)
        elif slot.payload is not None and not isinstance(slot.payload, Tensor):
            sums = attention_gradient_sums(slot.payload(), gradient)
        elif slot.payload is not None:
            logits, probs = (gradient, None) if kind == "logits" else (None, gradient)
            sums = softmax_gradient_sums(slot.payload, grad_logits=logits, grad_probs=probs)
        else:
            return
        self._deliver(slot.record, sums)


class _Hook:
    """A tensor hook; it returns nothing, so the gradient stays what it is."""

    __slots__ = ("kind", "slot", "taps")

    def __init__(self, taps: GradientTaps, slot: _Slot, kind: Gradient) -> None:
        self.taps, self.slot, self.kind = taps, slot, kind

    def __call__(self, gradient: Tensor) -> None:
        self.taps.received(self.slot, self.kind, gradient)

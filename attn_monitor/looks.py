"""Measures attention calls: large ones when they are seen, small ones together, and all rows pooled in the end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attn_monitor.allowed import QualifyingEntries
from attn_monitor.gradients import attention_gradient_rows
from attn_monitor.pooling import LayerRows, pooled
from attn_monitor.records import AttentionCall
from attn_monitor.softmax_gradients import qualifying_entries, softmax_gradient_sums
from attn_monitor.stacking import Look, heads_of, stacked
from attn_monitor.statistics import attention_rows, softmax_rows
from attn_monitor.sums import AttentionSums
from attn_monitor.tiles import undisturbed
from attn_monitor.waiting import WaitingQueue
from attn_monitor.workspace import Workspaces

SMALL = 2**18
"""Calls of no more numbers wait for others: beyond, what a look computes outweighs its many operations."""
MOST_NUMBERS = 2**21
"""How many numbers may wait to be looked at, and again of the gradients: 8 MiB."""
MOST_ROW_VALUES = 2**19
"""How many values of rows may wait to be pooled: 2 MiB."""
GradScale: TypeAlias = "float | Callable[[], float | Tensor]"
Side: TypeAlias = Literal["logits", "probabilities"]


class Key(NamedTuple):
    """What a measurement belongs to: its record, what its gradients are divided by, and who waits for its entries."""

    record: Hashable
    scale: float | Tensor = 1.0
    pending: PendingEntries | None = None


class PendingEntries:
    """The entries that the gradients of a softmax need, known once its forward pass has been looked at.

    Args:
        known: The entries if they are known.
        look: Has them looked at; they stay unknown where that fails.
    """

    __slots__ = ("_look", "known")

    def __init__(self, known: QualifyingEntries | None, look: Callable[[], None]) -> None:
        self.known = known
        self._look = look

    def entries(self) -> QualifyingEntries | None:
        """Return the entries, `None` if the forward pass could not be measured, which has been told."""
        if self.known is None:
            self._look()
        return self.known


class _Seen(NamedTuple):
    """What a look has seen."""

    rows: LayerRows
    entries: QualifyingEntries | None


@dataclass(frozen=True, slots=True, eq=False)
class _SideGradient:
    """The gradient at one side of a softmax."""

    side: Side
    entries: QualifyingEntries
    gradient: Tensor

    @property
    def alike(self) -> Hashable:
        """What gradients have in common that can be taken together."""
        batch, _, queries, keys = self.entries.shape
        return self.side, batch, queries, keys, self.gradient.dtype, self.gradient.device


class Looks:
    """Looks at attention calls, and delivers their sums sooner or later.

    Args:
        statistics: What is measured.
        max_queries: Rows per call that are looked at.
        grad_scale: What gradients are divided by; a callable is read as they come.
        deliver: Takes a record and its sums.
        failed: Takes a record and the error, of a call that waited.
    """

    def __init__(
        self,
        statistics: frozenset[str],
        *,
        max_queries: int | None,
        grad_scale: GradScale,
        deliver: Callable[[Hashable, AttentionSums], None],
        failed: Callable[[Hashable, Exception], None],
    ) -> None:
        self._statistics = statistics
        self._max_queries = max_queries
        # Rows are sampled without touching the random numbers of the run.
        self._generator = torch.Generator().manual_seed(20240521)
        self._grad_scale = grad_scale
        self._deliver = deliver
        self._spaces = Workspaces()

        def lost(key: Key, error: Exception) -> None:
            failed(key.record, error)

        self._calls = WaitingQueue[Key, Look, _Seen](self._seen, self._pool, lost, MOST_NUMBERS)
        self._sides = WaitingQueue[Key, _SideGradient, AttentionSums](self._summed, self._divide, lost, MOST_NUMBERS)
        self._rows = WaitingQueue[Key, LayerRows, AttentionSums](pooled, self._divide, lost, MOST_ROW_VALUES)

    def look(self, record: Hashable, call: AttentionCall, grad_output: Tensor | None = None) -> None:
        """Measure the forward pass of a call, and the gradients of a fused kernel if they are there."""
        self._take(Key(record, 1.0 if grad_output is None else self._scale()), Look(call, grad_output))

    def look_at_gradients(self, record: Hashable, call: AttentionCall, grad_output: Tensor) -> None:
        """Measure the gradients of a fused kernel alone."""
        self._take(Key(record, self._scale()), Look(call, grad_output, forward=False))

    def look_at_softmax(self, record: Hashable, call: AttentionCall) -> PendingEntries:
        """Measure the forward pass of a softmax whose gradients autograd will deliver."""
        pending = PendingEntries(None, self._calls.empty)
        self._take(Key(record, pending=pending), Look(call, entries=True))
        return pending

    def entries(self, call: AttentionCall) -> PendingEntries:
        """Return what the gradients of a softmax need whose forward pass has been measured."""
        known = qualifying_entries(call, self._max_queries, self._generator, spaces=self._spaces)
        return PendingEntries(known, self._calls.empty)

    def look_at_side(self, record: Hashable, entries: QualifyingEntries, side: Side, gradient: Tensor) -> None:
        """Measure the gradient at one side of a softmax, [B, H, Q, K]."""
        key = Key(record, self._scale())
        if gradient.device.type == "cpu" and gradient.numel() <= SMALL and entries.index is None:
            self._sides.put(key, _SideGradient(side, entries, gradient.clone()), gradient.numel())
        else:
            [sums] = self._summed([_SideGradient(side, entries, gradient)])
            self._divide(key, sums)

    def empty(self) -> None:
        """Measure and deliver all that waits."""
        for queue in (self._calls, self._sides, self._rows):
            queue.empty()

    def clear(self) -> None:
        """Forget what waits."""
        for queue in (self._calls, self._sides, self._rows):
            queue.clear()

    def free(self) -> None:
        """Give the memory back in which tiles are computed."""
        self._spaces.clear()

    def _take(self, key: Key, look: Look) -> None:
        if (size := look.size) <= SMALL and self._can_wait(look.call):
            self._calls.put(key, look.copied(), size)
        else:
            [seen] = self._seen([look])
            self._pool(key, seen)

    def _can_wait(self, call: AttentionCall) -> bool:
        """Tell whether a small call can be looked at with others. On devices with streams none waits for another's."""
        tensor = call.query if call.logits is None else call.logits
        sampled = self._max_queries is not None and call.shape.queries > self._max_queries
        return tensor is not None and tensor.device.type == "cpu" and not sampled

    def _seen(self, looks: Sequence[Look]) -> list[_Seen]:
        """Return what each look sees, those that are alike together."""
        found: dict[int, _Seen] = {}
        for numbers in _groups([look.alike for look in looks]):
            members = [looks[number] for number in numbers]
            with undisturbed(None):
                whole = stacked(members)
            seen = self._see(whole)
            for number, heads in zip(numbers, heads_of([look.call.shape.heads for look in members]), strict=True):
                entries = None if seen.entries is None else seen.entries.of_heads(heads)
                found[number] = _Seen(seen.rows.of_heads(heads), entries)
        return [found[number] for number in range(len(looks))]

    def _see(self, look: Look) -> _Seen:
        sample = self._max_queries, self._generator
        if look.entries:
            return _Seen(*softmax_rows(look.call, self._statistics, *sample, spaces=self._spaces))
        if look.forward:
            grad = look.grad_output
            rows = attention_rows(look.call, self._statistics, *sample, grad_output=grad, spaces=self._spaces)
            return _Seen(rows, None)
        assert look.grad_output is not None, "else there is nothing to look at"
        return _Seen(attention_gradient_rows(look.call, look.grad_output, *sample, spaces=self._spaces), None)

    def _pool(self, key: Key, seen: _Seen) -> None:
        if key.pending is not None:
            key.pending.known = seen.entries
        self._rows.put(key, seen.rows, seen.rows.rows.values)

    def _summed(self, gradients: Sequence[_SideGradient]) -> list[AttentionSums]:
        """Return the sums of each gradient, those that are alike together."""
        found: dict[int, AttentionSums] = {}
        for numbers in _groups([gradient.alike for gradient in gradients]):
            members = [gradients[number] for number in numbers]
            with undisturbed(None):
                entries = QualifyingEntries.beside([member.entries for member in members])
                gradient = members[0].gradient if len(members) == 1 else torch.cat([g.gradient for g in members], dim=1)
            logits, probs = (gradient, None) if members[0].side == "logits" else (None, gradient)
            sums = softmax_gradient_sums(entries, grad_logits=logits, grad_probs=probs, spaces=self._spaces)
            for number, heads in zip(numbers, heads_of([g.entries.shape.heads for g in members]), strict=True):
                found[number] = sums.of_heads(heads, sums)
        return [found[number] for number in range(len(gradients))]

    def _divide(self, key: Key, sums: AttentionSums) -> None:
        self._deliver(key.record, sums.divided_gradients(key.scale))

    def _scale(self) -> float | Tensor:
        """Return what gradients are divided by: its value now is that of this backward pass."""
        return self._grad_scale() if callable(self._grad_scale) else self._grad_scale


def _groups(alike: Sequence[Hashable]) -> list[list[int]]:
    """Return the numbers of what is alike; what is `None` stands alone."""
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(alike):
        groups.setdefault(("alone", number) if kind is None else kind, []).append(number)
    return list(groups.values())

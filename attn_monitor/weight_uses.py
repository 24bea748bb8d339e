"""Who else has a part in a weight: other tensors on its memory, other calls of its module, other attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor.call_evidence import Evidence, Lengths
from attn_monitor.head_norms import mismatch, tolerance
from attn_monitor.head_weights import USED, HeadWeights

_MOST_CALLS = 4096
_MOVED = "its {side} are {role} of other attention as well ({names})"
_RUNS = "the layer that makes its {side} also ran without making those of this head"
_UNALIKE = "its attention ran several times in the step, with {sides} from different weights"


def memory_users(model: nn.Module) -> Callable[[Tensor], bool]:
    """Return a function that tells whether several tensors of a model have the memory of one."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for tensor in _tensors(model):
        if (span := _span(tensor)) is not None:
            spans[span[0]].append(span[1:])

    def is_shared(tensor: Tensor) -> bool:
        span = _span(tensor)
        if span is None:
            return True
        storage, start, stop = span
        return sum(start < other_stop and other_start < stop for other_start, other_stop in spans[storage]) > 1

    return is_shared


@dataclass(slots=True, eq=False)
class Step:
    """What ran in one forward pass in which weights are looked for.

    Attributes:
        runs: How often each module ran.
        attention: The lengths of queries, keys and values of every attention call, with its record; `None` is that of
            one that is not watched.
        unsure: Why that is not all of it.
    """

    runs: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))
    attention: list[tuple[str | None, list[Lengths]]] = field(default_factory=list)
    unsure: str = ""

    def note(self, record: str | None, lengths: list[Lengths]) -> None:
        """Take note of a call."""
        if len(self.attention) == _MOST_CALLS:
            self.unsure = (
                f"more than {_MOST_CALLS} attention calls ran in the step in which its weights were looked for"
            )
        else:
            self.attention.append((record, lengths))


def exclusive(
    calls: Sequence[list[HeadWeights | str]], found: Sequence[Evidence], record: str, step: Step
) -> list[HeadWeights | str]:
    """Return the weights of each head of a record that make nothing but its queries or keys, in any call of the step.

    Args:
        calls: What each call of the record says.
        found: The evidence of each of these.
        record: The record.
        step: Everything that ran.
    """
    if len({len(call) for call in calls}) > 1:
        return ["its attention ran several times in the step, with other numbers of heads"] * len(calls[0])
    others = _Others(found, record, step)
    return [_exclusive(head, [call[head] for call in calls], others, step) for head in range(len(calls[0]))]


def _exclusive(head: int, entries: Sequence[HeadWeights | str], others: _Others, step: Step) -> HeadWeights | str:
    first = entries[0]
    for entry in entries:
        if isinstance(entry, str) or isinstance(first, str):
            return entry if isinstance(entry, str) else first
        if entry.query != first.query:
            return _UNALIKE.format(sides="queries")
        if entry.key != first.key and None not in (entry.key, first.key):
            return _UNALIKE.format(sides="keys")
    known = [entry for entry in entries if isinstance(entry, HeadWeights)]
    if reason := others.reason(head, 0) or _idle_run(known, step, 0):
        return reason
    # What several calls share gets the gradients of all. Keys that are met elsewhere are left alone below.
    shared = len(frozenset().union(*(entry.sources for entry in known))) < sum(len(entry.sources) for entry in known)
    if any(entry.used for entry in known) and not shared and not others.reason(head, 1):
        return USED
    least = next((entry for entry in known if entry.key is None), known[0])
    if least.key is not None and (reason := others.reason(head, 1) or _idle_run(known, step, 1)):
        return replace(least, key=None, why=reason)
    return least


def _idle_run(entries: Sequence[HeadWeights], step: Step, side: int) -> str:
    """Return what is wrong if a module ran without making what this head has of it."""
    part = entries[0].query if side == 0 else entries[0].key
    assert part is not None, "only of known keys"
    made = {number for entry in entries for module, number in entry.calls if module is part.module}
    return "" if len(made) == step.runs[part.module] else _RUNS.format(side=("queries", "keys")[side])


class _Others:
    """Compares the queries and keys of a record with those of all others."""

    def __init__(self, found: Sequence[Evidence], record: str, step: Step) -> None:
        self._limit = tolerance(found[0].dtype)
        self._calls = [one.lengths for one in found]
        self._others = [
            (name, role, lengths)
            for name, call in step.attention
            if name != record
            for role, lengths in zip(("the queries", "the keys", "the values"), call, strict=False)
        ]
        self._heads = found[0].query.shape[0], found[0].key.shape[0]
        self._side = cache(self._compared)

    def reason(self, head: int, side: int) -> str:
        """Return where else the queries (side 0) or keys (1) of a head are met."""
        own = head if side == 0 else head // (self._heads[0] // self._heads[1])
        met = [self._others[number][:2] for number in self._side(side)[own]]
        if not met:
            return ""
        names = sorted({name or "attention that is not watched" for name, _ in met})
        return _MOVED.format(side=("queries", "keys")[side], role=met[0][1], names=", ".join(names))

    def _compared(self, side: int) -> list[list[int]]:
        """Return for each head which of the others are like it."""
        like: list[list[int]] = [[] for _ in range(self._heads[side])]
        by_tokens: dict[int, list[int]] = defaultdict(list)
        for number, (_, _, lengths) in enumerate(self._others):
            by_tokens[lengths.tokens].append(number)
        for call in self._calls:
            own = call[side]
            numbers = by_tokens[own.tokens]
            if not numbers:
                continue
            columns = [number for number in numbers for _ in range(self._others[number][2].norms.shape[1])]
            errors, _ = mismatch(own.norms, torch.cat([self._others[number][2].norms for number in numbers], 1))
            for head, row in enumerate((errors < self._limit).tolist()):
                like[head] += [number for number, close in zip(columns, row, strict=True) if close]
        return like


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield what the modules of a model have, each as often as it is had."""
    for module in model.modules():
        plain: Iterable[Any] = (
            value for name, value in vars(module).items() if name not in {"_parameters", "_buffers"}
        )
        for value in (*module._parameters.values(), *module._buffers.values(), *plain):
            if isinstance(value, Tensor):
                yield value


def _span(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the storage of a tensor, and the first byte in it and the one after the last; `None` without one."""
    if type(tensor.detach()) is not Tensor or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start, start + int(extent) * tensor.element_size()

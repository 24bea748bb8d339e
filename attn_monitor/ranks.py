"""One record out of what several processes saw: exact, alike on every rank, with one collective in the common case.

Every rank sends one tensor: a header of a few numbers and the packed state of all layers, in the order of a layout that
the ranks agreed on before. A rank that has something the others don't know of (a layer, a reason why one is missing, an
error) says so in its header; then, and only then, all of them exchange their lists. No rank can be alone in a
collective: what a rank sends depends on what it saw, whether it sends does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from attn_monitor.metric import AttentionMetric, LayerHeads
from attn_monitor.phrases import error_line
from attn_monitor.records import AttentionStatistics
from attn_monitor.sums import AttentionSums
from attn_monitor.unseen import unseen

_NEWS, _FAILED, _LOSSES = range(3)


class RankError(RuntimeError):
    """A record is lost on every rank, since one could not make its part of it.

    Example:
        >>> from attn_monitor import RankError
        >>> try:  # around `probe.compute(ranks=ranks)`: training can go on without this record
        ...     raise RankError("this record is lost on every rank, one failed (rank 1: out of memory)")
        ... except RankError as error:
        ...     print(error)
        this record is lost on every rank, one failed (rank 1: out of memory)
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw in one observed step.

    Attributes:
        sums: The sums of each layer.
        shards: The layers whose heads are spread over ranks: into how many parts, and which one is here.
        skipped: Layers that were not measured, with the reason.
        notes: What to know about the numbers of a layer.
        losses: Over how many losses of this rank the optimizer step takes the mean.
        failure: Why there is nothing, empty if there is.
    """

    sums: Mapping[str, AttentionSums] = field(default_factory=dict)
    shards: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    losses: int = 1
    failure: str = ""

    def heads(self) -> dict[str, LayerHeads]:
        """Return how the heads of each layer are spread."""
        return {name: LayerHeads(sums.heads, *self.shards.get(name, (1, 0))) for name, sums in self.sums.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all ranks saw together, the same on each of them.

    Attributes:
        statistics: The statistics of each layer, in the agreed order.
        skipped: What is missing on any rank, with the reason, which another rank may say in other words.
        notes: What to know about the numbers of a layer.
    """

    statistics: Mapping[str, AttentionStatistics]
    skipped: Mapping[str, str]
    notes: Mapping[str, str]


class RankReduction:
    """Makes of what every rank saw one record that all of them have.

    Every rank has to call `reduce` for the same steps. It is one `all_gather`, whatever the number of layers and heads,
    and two exchanges of lists more in the steps in which a rank reports something new, such as the first.

    Args:
        group: The process group, `None` for all processes.
        device: Where the backend of the group takes tensors from; `None` for the CPU, or the current device under NCCL.
        duplicate: Whether another rank sees the same data (tensor parallelism); then only those layers count here whose
            heads are spread over these ranks.

    Raises:
        RuntimeError: If there is no process group.

    Example:
        In a loop of one's own under DDP, on every rank; here there is one only.

        >>> import torch
        >>> from torch import distributed
        >>> from attn_monitor import AttentionProbe, RankReduction
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> ranks = RankReduction()  # once
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> with AttentionProbe(model) as probe:
        ...     _ = model(torch.randn(3, 5, 16))
        >>> probe.compute(ranks=ranks)["self_attn"].rows.tolist()  # 3 x 5 for each head, of every rank together
        [15.0, 15.0]
        >>> distributed.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        duplicate: bool = False,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "RankReduction expects an initialised process group, and there is none. Call "
                "torch.distributed.init_process_group first; a single process needs no reduction."
            )
        self._group = group
        self._device = torch.device(device) if device is not None else _device_of(group)
        self._duplicate = duplicate
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self._layout: dict[str, LayerHeads] = {}
        self._differing: dict[str, str] = {}
        self._told: set[str] = set()
        self._shown: dict[str, tuple[int, int]] = {}
        self._headers: list[list[float]] = []
        self._broken = ""
        self._failure = ""

    def reduce(self, seen: Seen, statistics: Iterable[str] | None = None) -> Record:
        """Return what all ranks saw together.

        Args:
            seen: What this rank saw.
            statistics: The names that are wanted, `None` for all.

        Raises:
            RankError: On every rank, if one of them failed, or the ranks can't reach each other any more.
        """
        try:
            return self._reduce(seen, statistics)
        except RankError:
            raise
        except Exception as error:
            # The ranks may be out of step now, and one that waits for another would hold up the training.
            self._broken = self._broken or error_line(error)
            raise RankError(f"there are no more records, the processes lost each other: {self._broken}") from error

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Tell of each flag whether it is up on any rank, by one `all_reduce`; every rank has to ask.

        Args:
            *flags: The flags as they are here, in the same order on every rank.
        """
        if self._broken:
            return tuple(flags)
        raised = torch.tensor(flags, dtype=torch.float32, device=self._device)
        try:
            with unseen():
                dist.all_reduce(raised, dist.ReduceOp.MAX, group=self._group)
        except Exception as error:
            self._broken = error_line(error)
            return tuple(flags)
        return tuple(bool(flag) for flag in raised.tolist())

    def all(self, flag: bool) -> bool:
        """Tell whether a flag is up on every rank, by one `all_reduce`; every rank has to ask.

        Args:
            flag: The flag as it is here.
        """
        return not self.any(not flag)[0]

    def _reduce(self, seen: Seen, statistics: Iterable[str] | None) -> Record:
        if self._broken:
            raise RankError(f"there are no more records, the processes lost each other: {self._broken}")
        self._failure = seen.failure
        metric = self._gathered(seen, statistics)
        elsewhere: dict[str, str] = {}
        notes: dict[str, str] = dict(seen.notes)
        if any(header[_NEWS] or header[_FAILED] for header in self._headers):
            told = self._told_by_all(seen)
            if self._agree(told):
                metric = self._gathered(seen, statistics)
                if any(header[_FAILED] for header in self._headers):
                    self._told_by_all(seen)  # which raises
            for rank, other in enumerate(told):
                elsewhere |= {name: f"on rank {rank}: {reason}" for name, reason in other["skipped"].items()}
                notes = {**other["notes"], **notes}
        missing = dict.fromkeys(metric.given_up, "not measured on another rank")
        losses = sum(int(header[_LOSSES]) for header in self._headers)
        pooled = metric.compute(losses=max(losses, 1))
        return Record(
            statistics=pooled,
            skipped={**missing, **self._differing, **metric.failures, **elsewhere, **seen.skipped},
            notes=notes,
        )

    def _told_by_all(self, seen: Seen) -> list[dict[str, Any]]:
        """Exchange lists, and raise if a rank has failed."""
        told = self._exchange(seen)
        failures = [f"rank {rank}: {other['failure']}" for rank, other in enumerate(told) if other["failure"]]
        if failures:
            raise RankError(f"this record is lost on every rank, one failed ({'; '.join(failures)})")
        return told

    def _gathered(self, seen: Seen, statistics: Iterable[str] | None) -> AttentionMetric:
        """Return the metric with the states of all ranks pooled, as far as their layers are agreed on."""
        try:
            metric, known = self._filled(seen, statistics)
        except Exception as error:  # the others must not wait for what this rank can't send
            self._failure = error_line(error)
            seen = Seen(failure=self._failure)
            metric, known = self._filled(seen, statistics)

        def gather(state: Tensor, group: object) -> list[Tensor]:
            return self._gather(state, seen, known)

        metric.dist_sync_fn, metric.distributed_available_fn = gather, lambda: True
        metric.sync(dist_sync_fn=gather, distributed_available=metric.distributed_available_fn)
        return metric

    def _filled(self, seen: Seen, statistics: Iterable[str] | None) -> tuple[AttentionMetric, set[str]]:
        """Return a metric with what this rank saw, over the agreed layers, and which of them it knows."""
        here = {} if seen.failure else seen.heads()
        known = {name for name, heads in here.items() if self._fits(name, heads)}
        layout = {name: here[name] if name in known else heads for name, heads in self._layout.items()}
        metric = AttentionMetric(statistics, layout=layout)
        counting = [name for name in self._layout if name in known and (here[name].shards > 1 or not self._duplicate)]
        metric.update({name: seen.sums[name] for name in counting})
        lost = seen.skipped.keys()
        metric.give_up(name for name in self._layout if name in lost or name.partition("@")[0] in lost)
        return metric, known

    def _fits(self, name: str, heads: LayerHeads) -> bool:
        agreed = self._layout.get(name)
        return agreed is not None and agreed[:2] == heads[:2]

    def _gather(self, state: Tensor, seen: Seen, known: set[str]) -> list[Tensor]:
        """Send the state behind a header and return the states of all ranks."""
        news = (seen.skipped.keys() | seen.notes.keys()) - self._told
        if not seen.failure:
            # Of a layer whose heads differ between the ranks there is news only when they change here.
            here = seen.heads()
            news |= {name for name, heads in here.items() if name not in known and self._shown.get(name) != heads[:2]}
        header = [float(bool(news)), float(bool(seen.failure)), 0.0 if self._duplicate else float(seen.losses)]
        sent = torch.cat([torch.tensor(header, dtype=state.dtype, device="cpu"), state.flatten()]).to(self._device)
        received = [torch.empty_like(sent) for _ in range(self._ranks)]
        with unseen():
            dist.all_gather(received, sent, group=self._group)
        everything = torch.stack(received).cpu()
        self._headers = everything[:, : len(header)].tolist()
        return [part.view_as(state) for part in everything[:, len(header) :]]

    def _exchange(self, seen: Seen) -> list[dict[str, Any]]:
        """Tell all ranks in words what is here, and return what each of them says."""
        mine = {
            "heads": {} if self._failure else {name: list(heads) for name, heads in seen.heads().items()},
            "skipped": dict(seen.skipped),
            "notes": dict(seen.notes),
            "failure": self._failure,
        }
        told: list[Any] = [None] * self._ranks
        with unseen():
            dist.all_gather_object(told, mine, group=self._group)
        return told

    def _agree(self, told: list[dict[str, Any]]) -> bool:
        """Take over what the ranks told of their layers; tell whether the layout is another one now."""
        first: dict[str, tuple[int, list[int]]] = {}
        differing: dict[str, str] = {}
        names = list(self._layout)
        for rank, other in enumerate(told):
            self._told |= other["skipped"].keys() | other["notes"].keys()
            _merge_order(names, list(other["heads"]))
            for name, heads in other["heads"].items():
                before, known = first.setdefault(name, (rank, heads))
                if known[:2] != heads[:2]:
                    differing[name] = f"rank {before} has {known[0]} heads of it, and rank {rank} has {heads[0]}"
        self._shown = {name: (heads[0], heads[1]) for name, heads in told[self._rank]["heads"].items()}
        known_before = {name: reason for name, reason in self._differing.items() if name not in first}
        self._differing = {**known_before, **differing}
        layout = {name: LayerHeads(*first[name][1][:2]) if name in first else self._layout[name] for name in names}
        layout = {name: heads for name, heads in layout.items() if name not in self._differing}
        changed = list(layout.items()) != list(self._layout.items())
        self._layout = layout
        return changed


def _merge_order(names: list[str], others: list[str]) -> None:
    """Insert what a rank has and `names` lacks where it stands on that rank: both are in the order of the forward pass.

    Example:
        >>> names = ["a", "d"]
        >>> _merge_order(names, ["b", "c", "d", "e"])
        >>> names
        ['a', 'b', 'c', 'd', 'e']
    """
    place = next((names.index(name) for name in others if name in names), len(names))  # in front of what follows it
    for name in others:
        if name in names:
            place = names.index(name) + 1
        else:
            names.insert(place, name)
            place += 1


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where the backend takes tensors from: NCCL knows the GPU only."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

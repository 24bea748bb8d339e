"""The sums of all layers as one torchmetrics metric: what is pooled over micro-batches and ranks.

Axes: H heads of a layer; N heads of all layers, one layer after the other; R rows of the state; W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from attn_monitor.catalog import ALL, resolve_statistics
from attn_monitor.phrases import error_line
from attn_monitor.records import AttentionStatistics
from attn_monitor.sums import ADDITIVE, MOMENTS, AttentionSums, LayerFacts, finalized, pool_moments

_ADDITIVE = slice(0, len(ADDITIVE))
_MOMENTS = slice(_ADDITIVE.stop, _ADDITIVE.stop + 3 * len(MOMENTS))
_EXTREMA = slice(_MOMENTS.stop, _MOMENTS.stop + 2)
_CALLS, _KEYS, _HEAD_DIM, _MEASURED, _APPROXIMATE, _GIVEN_UP = range(_EXTREMA.stop, _EXTREMA.stop + 6)
_ROWS = _GIVEN_UP + 1
_NAMES = tuple(sorted(ALL))
"""The statistics by the bits that stand for them."""
_EVERY_BIT = (1 << len(_NAMES)) - 1


class LayerHeads(NamedTuple):
    """How the heads of a layer are spread over ranks.

    Attributes:
        local: How many heads one rank has.
        shards: Into how many equal parts tensor parallelism divides the heads; 1 where every rank has all of them.
        part: Which of the parts this rank has.
    """

    local: int
    shards: int = 1
    part: int = 0

    @property
    def total(self) -> int:
        """The number of heads of the layer, H."""
        return self.local * self.shards


class AttentionMetric(Metric):
    """Pools the sums of every layer, exactly, and turns them into statistics.

    The state is one float64 tensor on the CPU, [R, N], whatever `.to()`, `.half()` or `set_dtype` is called with, so
    that a synchronisation is one `all_gather`; counts are added, means and squared deviations merge by the formula of
    Chan, Golub and LeVeque (1983), extrema stay extrema. Layers are appended as they appear, unless a layout is given.
    `update` brings the sums of all layers over in one transfer per device. States of several processes are pooled if
    `sync_on_compute=True` is passed; their layouts must be the same then (`attn_monitor.ranks` sees to that).

    Args:
        statistics: The names that `compute` returns, `None` for all that were measured.
        layout: The layers there are, on every rank in the same order; layers that `update` never brings stay out of
            what `compute` returns.
        **kwargs: Options of `torchmetrics.Metric`.

    Attributes:
        failures: The layers that the last `compute` raised for, with the error: they are missing in what it returned.

    Example:
        >>> import torch
        >>> from attn_monitor.metric import AttentionMetric
        >>> from attn_monitor.records import AttentionCall
        >>> from attn_monitor.statistics import attention_sums
        >>> metric = AttentionMetric(["logit_max"])
        >>> for largest in (3.0, 5.0):
        ...     call = AttentionCall(logits=torch.tensor([[[[0.0, largest]]]]))
        ...     metric.update({"layers.0.attn": attention_sums(call, frozenset({"logit_max"}))})
        >>> metric.compute()["layers.0.attn"].logit_max.tolist()
        [5.0]
    """

    is_differentiable = False
    full_state_update = False
    packed: Tensor

    def __init__(
        self, statistics: Iterable[str] | None = None, *, layout: Mapping[str, LayerHeads] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**{"sync_on_compute": False, **kwargs})
        self.statistics = resolve_statistics(statistics)
        self._layout: dict[str, LayerHeads] = {}
        self._columns: dict[str, slice] = {}
        self._facts: dict[str, LayerFacts] = {}
        self._given_up: frozenset[str] = frozenset()
        self.failures: dict[str, str] = {}
        self._own: tuple[dict[str, LayerFacts], frozenset[str]] = ({}, frozenset())
        self.add_state("packed", _neutral(0), dist_reduce_fx=pool_packed)
        self._append(layout or {})

    @property
    def additive(self) -> Tensor:
        """What is simply added, [len(ADDITIVE), N]."""
        return self.packed[_ADDITIVE]

    @property
    def moments(self) -> Tensor:
        """Count, mean and sum of squared deviations, [len(MOMENTS), 3, N]."""
        moments: Tensor = self.packed[_MOMENTS].unflatten(0, (len(MOMENTS), 3))
        return moments

    @property
    def extrema(self) -> Tensor:
        """The largest logit and the negated smallest, [2, N]."""
        return self.packed[_EXTREMA]

    @property
    def given_up(self) -> frozenset[str]:
        """The layers that could not be measured, after a synchronisation on any rank."""
        return self._given_up

    def update(self, sums: Mapping[str, AttentionSums]) -> None:
        """Add the sums of some layers, by name.

        Raises:
            ValueError: If a layer has another number of heads than before; nothing is added then.
        """
        for name, layer in sums.items():
            known = self._layout.get(name)
            if known is not None and known.local != layer.heads:
                raise ValueError(
                    f"{name!r} had {known.local} heads, and now has {layer.heads}. "
                    "Give the two call sites names of their own."
                )
        self._append({name: LayerHeads(layer.heads) for name, layer in sums.items() if name not in self._layout})
        for group in _by_device(sums):
            self._add(group)
        for name, layer in sums.items():
            self._facts[name] = self._facts.get(name, LayerFacts()).merged_facts(layer)

    def give_up(self, names: Iterable[str]) -> None:
        """Note that some layers could not be measured here: their sums are not the whole truth on any rank."""
        self._given_up |= self._layout.keys() & set(names)

    def compute(self, losses: int = 1) -> dict[str, AttentionStatistics]:
        """Return the statistics of every layer seen since the last reset.

        Args:
            losses: Over how many losses the optimizer step's loss is the mean: micro-batches times ranks.
        """
        names = [name for name in self._columns if name in self._facts and name not in self._given_up]
        self.failures = {}
        try:
            layers = [self._layer(name) for name in names]
            return dict(zip(names, finalized(layers, self.statistics, losses), strict=True))
        except Exception:  # of one layer, which must not cost the others
            return self._one_by_one(names, losses)

    def _one_by_one(self, names: Iterable[str], losses: int) -> dict[str, AttentionStatistics]:
        found = {name: self._alone(name, losses) for name in names}
        return {name: stats for name, stats in found.items() if stats is not None}

    def _alone(self, name: str, losses: int) -> AttentionStatistics | None:
        try:
            return self._layer(name).finalize(self.statistics, losses)
        except Exception as error:
            self.failures[name] = error_line(error)
            return None

    def forward(self, sums: Mapping[str, AttentionSums]) -> dict[str, AttentionStatistics]:
        """Add the sums and return the statistics of these alone."""
        self.update(sums)
        return {name: layer.finalize(self.statistics) for name, layer in sums.items()}

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Pool the state over ranks; what the host knows of the layers travels in rows of the state."""
        self._own = dict(self._facts), self._given_up
        self._write_facts()
        super().sync(*args, **kwargs)
        if self._is_synced:
            self._read_facts()

    def unsync(self, should_unsync: bool = True) -> None:
        """Go back to what this rank has seen."""
        super().unsync(should_unsync)
        if should_unsync:
            self._facts, self._given_up = self._own

    def reset(self) -> None:
        """Forget everything, the layers too."""
        super().reset()
        self._layout = {}
        self._columns = {}
        self._facts = {}
        self._given_up = frozenset()
        self.failures = {}

    def _append(self, layout: Mapping[str, LayerHeads]) -> None:
        start = self.packed.shape[-1]
        for name, heads in layout.items():
            self._columns[name] = slice(start, start + heads.total)
            start += heads.total
        self._layout.update(layout)
        more = _neutral(sum(heads.total for heads in layout.values()))
        self.packed = torch.cat([self.packed, more], dim=-1)

    def _add(self, sums: Mapping[str, AttentionSums]) -> None:
        packed = torch.cat([_pack(layer) for layer in sums.values()], dim=-1).to("cpu").to(torch.float64)
        columns = torch.cat([torch.arange(c.start, c.stop, device="cpu") for c in map(self._own_columns, sums)])
        known = self.packed[: _EXTREMA.stop, columns]
        self.packed[: _EXTREMA.stop, columns] = _pooled_values(torch.stack([known, packed]))

    def _own_columns(self, name: str) -> slice:
        start, heads = self._columns[name].start, self._layout[name]
        return slice(start + heads.part * heads.local, start + (heads.part + 1) * heads.local)

    def _layer(self, name: str) -> AttentionSums:
        columns = self._columns[name]
        return AttentionSums(
            additive=self.additive[:, columns],
            moments=self.moments[..., columns],
            extrema=self.extrema[:, columns],
            **self._facts[name].as_arguments(),
        )

    def _write_facts(self) -> None:
        for name in self._given_up:
            self.packed[_GIVEN_UP, self._own_columns(name)] = 1.0
        if not self._facts:
            return
        rows = torch.tensor([_as_numbers(facts) for facts in self._facts.values()], dtype=torch.float64, device="cpu")
        counts = torch.tensor([self._layout[name].local for name in self._facts], device="cpu")
        columns = torch.cat([torch.arange(c.start, c.stop, device="cpu") for c in map(self._own_columns, self._facts)])
        self.packed[_CALLS:_GIVEN_UP, columns] = rows.repeat_interleave(counts, dim=0).T

    def _read_facts(self) -> None:
        rows = self.packed[_CALLS:].T.tolist()
        self._facts = {}
        for name, columns in self._columns.items():
            parts = rows[columns.start : columns.stop : self._layout[name].local]
            if any(part[-1] for part in parts):
                self._given_up |= {name}
            seen = [_from_numbers(part) for part in parts if part[0] or part[_MEASURED - _CALLS]]
            if seen:
                self._facts[name] = _of_all_parts(seen)

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # The wrapper of torchmetrics squeezes a single head away, cannot copy frozen records, caches whatever the
        # arguments are, and warns when nothing was seen. Only its synchronisation is wanted.
        @functools.wraps(compute)
        def synchronised(*args: Any, **kwargs: Any) -> Any:
            with self.sync_context(
                dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync, should_unsync=self._should_unsync
            ):
                return compute(*args, **kwargs)

        return synchronised

    def _apply(self, fn: Callable[..., Any], exclude_state: Any = "") -> nn.Module:
        return self  # the state stays what it is: half would overflow, and mps has no float64


def pool_packed(stacked: Tensor) -> Tensor:
    """Pool the states of ranks, [W, R, N] to [R, N].

    What is known of a layer is what every rank knows that ran it; a rank that did not run it changes nothing.
    """
    ran = stacked[:, _CALLS] > 0
    dims = stacked[:, _HEAD_DIM]
    largest, smallest = torch.where(ran, dims, -1.0).amax(0), torch.where(ran, dims, torch.inf).amin(0)
    masks = stacked[:, [_MEASURED, _APPROXIMATE]].to(torch.int64)
    common = torch.where(ran, masks[:, 0], _EVERY_BIT)
    measured, anywhere, approximate = common[0], masks[0, 0], masks[0, 1]
    for rank in range(1, len(stacked)):
        measured, anywhere = measured & common[rank], anywhere | masks[rank, 0]
        approximate = approximate | masks[rank, 1]
    measured = torch.where(ran.any(0), measured, anywhere)  # gradients alone, of a call that is counted elsewhere
    facts = [
        stacked[:, _CALLS].sum(0),
        stacked[:, _KEYS].amax(0),
        torch.where(largest == smallest, largest, 0.0),
        measured.to(torch.float64),
        (approximate & measured).to(torch.float64),
        stacked[:, _GIVEN_UP].amax(0),
    ]
    return torch.cat([_pooled_values(stacked[:, : _EXTREMA.stop]), torch.stack(facts)])


def _pooled_values(stacked: Tensor) -> Tensor:
    """Pool what was measured, without the rows of facts."""
    moments = stacked[:, _MOMENTS].unflatten(1, (len(MOMENTS), 3))
    return torch.cat([stacked[:, _ADDITIVE].sum(0), pool_moments(moments).flatten(0, 1), stacked[:, _EXTREMA].amax(0)])


def _neutral(heads: int) -> Tensor:
    """Return the state of heads of which nothing is known, [R, heads]."""
    packed = torch.zeros((_ROWS, heads), dtype=torch.float64, device="cpu")
    packed[_EXTREMA] = -torch.inf
    return packed


def _pack(sums: AttentionSums) -> Tensor:
    return torch.cat([sums.additive, sums.moments.flatten(0, 1), sums.extrema])


def _as_numbers(facts: LayerFacts) -> list[int]:
    masks = (
        sum(1 << bit for bit, name in enumerate(_NAMES) if name in of) for of in (facts.measured, facts.approximate)
    )
    return [facts.calls, facts.keys, facts.head_dim or 0, *masks]


def _from_numbers(row: list[float]) -> LayerFacts:
    calls, keys, head_dim, *masks, _ = (int(number) for number in row)
    measured, approximate = (frozenset(name for bit, name in enumerate(_NAMES) if mask >> bit & 1) for mask in masks)
    return LayerFacts(measured=measured, approximate=approximate, head_dim=head_dim or None, keys=keys, calls=calls)


def _of_all_parts(parts: Collection[LayerFacts]) -> LayerFacts:
    """Return what is known of a layer whose heads several ranks share."""
    first, *others = parts
    return LayerFacts(
        measured=first.measured.intersection(*(part.measured for part in others)),
        approximate=first.approximate.union(*(part.approximate for part in others)),
        head_dim=first.head_dim if all(part.head_dim == first.head_dim for part in others) else None,
        keys=max(part.keys for part in parts),
        calls=max(part.calls for part in parts),
    )


def _by_device(sums: Mapping[str, AttentionSums]) -> list[dict[str, AttentionSums]]:
    groups: dict[torch.device, dict[str, AttentionSums]] = {}
    for name, layer in sums.items():
        groups.setdefault(layer.additive.device, {})[name] = layer
    return list(groups.values())

"""The sums of all layers as one torchmetrics metric: what is pooled over micro-batches and ranks.

Axes: H heads of a layer; N heads of all layers, one layer after the other; W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from attn_monitor.catalog import resolve_statistics
from attn_monitor.records import AttentionStatistics
from attn_monitor.sums import ADDITIVE, MOMENTS, AttentionSums, LayerFacts, finalized, pool_moments

_MOMENT_ROWS = 3 * len(MOMENTS)


class AttentionMetric(Metric):
    """Pools the sums of every layer, exactly, and turns them into statistics.

    The states are float64 tensors on the CPU, one per kind, whatever `.to()`, `.half()` or `set_dtype` is called with;
    layers are appended as they appear. `update` brings the sums of all layers over in one transfer per device.
    States of several processes are pooled only if `sync_on_compute=True` is passed, over the same layers everywhere.

    Args:
        statistics: The names that `compute` returns, `None` for all that were measured.
        **kwargs: Options of `torchmetrics.Metric`.

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
    additive: Tensor
    moments: Tensor
    extrema: Tensor

    def __init__(self, statistics: Iterable[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**{"sync_on_compute": False, **kwargs})
        self.statistics = resolve_statistics(statistics)
        self._columns: dict[str, slice] = {}
        self._facts: dict[str, LayerFacts] = {}
        empty = _neutral(0)
        self.add_state("additive", empty.additive, dist_reduce_fx="sum")
        self.add_state("moments", empty.moments, dist_reduce_fx=pool_moments)
        self.add_state("extrema", empty.extrema, dist_reduce_fx="max")

    def update(self, sums: Mapping[str, AttentionSums]) -> None:
        """Add the sums of some layers, by name.

        Raises:
            ValueError: If a layer has another number of heads than before; nothing is added then.
        """
        for name, layer in sums.items():
            known = self._columns.get(name)
            if known is not None and known.stop - known.start != layer.heads:
                raise ValueError(
                    f"{name!r} had {known.stop - known.start} heads, and now has {layer.heads}. "
                    "Give the two call sites names of their own."
                )
        self._append({name: layer.heads for name, layer in sums.items() if name not in self._columns})
        for group in _by_device(sums):
            self._add(group)
        for name, layer in sums.items():
            self._facts[name] = self._facts.get(name, LayerFacts()).merged_facts(layer)

    def compute(self, losses: int = 1) -> dict[str, AttentionStatistics]:
        """Return the statistics of every layer seen since the last reset.

        Args:
            losses: Over how many losses the optimizer step's loss is the mean: micro-batches times ranks.
        """
        layers = [self._layer(name) for name in self._columns]
        return dict(zip(self._columns, finalized(layers, self.statistics, losses), strict=True))

    def forward(self, sums: Mapping[str, AttentionSums]) -> dict[str, AttentionStatistics]:
        """Add the sums and return the statistics of these alone."""
        self.update(sums)
        return {name: layer.finalize(self.statistics) for name, layer in sums.items()}

    def reset(self) -> None:
        """Forget everything, the layers too."""
        super().reset()
        self._columns = {}
        self._facts = {}

    def _append(self, heads: Mapping[str, int]) -> None:
        start = self.additive.shape[-1]
        for name, count in heads.items():
            self._columns[name] = slice(start, start + count)
            start += count
        more = _neutral(sum(heads.values()))
        self.additive = torch.cat([self.additive, more.additive], dim=-1)
        self.moments = torch.cat([self.moments, more.moments], dim=-1)
        self.extrema = torch.cat([self.extrema, more.extrema], dim=-1)

    def _add(self, sums: Mapping[str, AttentionSums]) -> None:
        packed = torch.cat([_pack(layer) for layer in sums.values()], dim=-1).to("cpu").to(torch.float64)
        additive, moments, extrema = torch.split(packed, [len(ADDITIVE), _MOMENT_ROWS, 2])
        columns = torch.cat([torch.arange(c.start, c.stop, device="cpu") for c in map(self._columns.get, sums) if c])
        moments = moments.reshape(len(MOMENTS), 3, -1)
        self.additive[:, columns] += additive
        self.moments[..., columns] = pool_moments(torch.stack([self.moments[..., columns], moments]))
        self.extrema[:, columns] = torch.maximum(self.extrema[:, columns], extrema)

    def _layer(self, name: str) -> AttentionSums:
        columns, facts = self._columns[name], self._facts[name]
        return AttentionSums(
            additive=self.additive[:, columns],
            moments=self.moments[..., columns],
            extrema=self.extrema[:, columns],
            **facts.as_arguments(),
        )

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
        return self  # the states stay what they are: half would overflow, and mps has no float64


def _neutral(heads: int) -> AttentionSums:
    return AttentionSums.build({"rows": torch.zeros(heads, dtype=torch.float64, device="cpu")})


def _pack(sums: AttentionSums) -> Tensor:
    return torch.cat([sums.additive, sums.moments.flatten(0, 1), sums.extrema])


def _by_device(sums: Mapping[str, AttentionSums]) -> list[dict[str, AttentionSums]]:
    groups: dict[torch.device, dict[str, AttentionSums]] = {}
    for name, layer in sums.items():
        groups.setdefault(layer.additive.device, {})[name] = layer
    return list(groups.values())

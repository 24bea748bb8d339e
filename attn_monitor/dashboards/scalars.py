"""A record as scalars: the mean over the heads and the worst head of each layer, and a few numbers of the model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from attn_monitor.catalog import STATISTICS
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO
from attn_monitor.tags import PLUGIN, layer_tag

_Key = TypeVar("_Key", bound=Hashable)


def scalars(
    statistics: Mapping[str, AttentionStatistics],
    chosen: Iterable[str],
    rule: SaturationRule,
    saturated_heads: int,
    prefix: str = "",
) -> dict[str, float]:
    """Return the scalar tags of a record.

    `attn_<statistic>/<layer>` is the mean over the heads with a finite value; `attn_<statistic>_max/<layer>` or
    `_min` is the worst head where larger or smaller is worse. No finite head, no tag, unless nan or inf logits are why:
    a head without a number for that reason is the worst there is, so that `_max` and `_min` are nan, and the mean is if
    no head has a number. The model-wide `attn_monitor/saturated_heads` and `attn_monitor/observed_layers` are always
    there; where rows are sampled, `attn_monitor/sampling_error_max` is the largest standard error of any chosen
    statistic of any head, relative to its value.

    Args:
        statistics: The record.
        chosen: The statistics that get tags.
        rule: Gives `attn_monitor/saturation_ratio_max`.
        saturated_heads: How many heads have an open event.
        prefix: Stands before every tag, `"val_"` for example.
    """
    tags: dict[str, float] = {}
    chosen = sorted(chosen, key=list(STATISTICS).index)
    broken = {layer: mask for layer, stats in statistics.items() if bool((mask := stats.nonfinite > 0).any())}
    for name in chosen:
        worse = STATISTICS[name].worse
        values = {layer: value for layer, stats in statistics.items() if (value := getattr(stats, name)) is not None}
        for layer in broken.keys() - values.keys():
            values[layer] = torch.full((statistics[layer].heads,), math.nan, device="cpu")
        for layer, (mean, smallest, largest) in _of_heads(values, broken).items():
            tags[f"attn_{name}/{layer_tag(layer)}"] = mean
            if worse == "up":
                tags[f"attn_{name}_max/{layer_tag(layer)}"] = largest
            elif worse == "down":
                tags[f"attn_{name}_min/{layer_tag(layer)}"] = smallest
    tags[f"{PLUGIN}/saturated_heads"] = float(saturated_heads)
    tags[f"{PLUGIN}/observed_layers"] = float(len(statistics))
    if ratios := _of_heads({layer: rule.ratio(stats) for layer, stats in statistics.items()}, broken):
        worst = [largest for _, _, largest in ratios.values()]
        tags[f"{PLUGIN}/{RATIO}_max"] = math.nan if any(map(math.isnan, worst)) else max(worst)
    if errors := _of_heads(_relative_errors(statistics, chosen)):
        tags[f"{PLUGIN}/sampling_error_max"] = max(largest for _, _, largest in errors.values())
    return {f"{prefix}{tag}": value for tag, value in tags.items()}


def _relative_errors(
    statistics: Mapping[str, AttentionStatistics], chosen: Iterable[str]
) -> dict[tuple[str, str], Tensor]:
    """Return the standard errors of the chosen statistics, relative to the values, by layer and statistic."""
    return {
        (layer, name): stats.standard_error[name] / getattr(stats, name).abs()
        for layer, stats in statistics.items()
        for name in chosen
        if name in stats.standard_error
    }


def _of_heads(
    values: Mapping[_Key, Tensor], broken: Mapping[_Key, Tensor] | None = None
) -> dict[_Key, tuple[float, float, float]]:
    """Return the mean, the smallest and the largest of the finite entries of each tensor that has some.

    All tensors at once: a large model has tens of thousands of heads and statistics.

    Args:
        values: The tensors.
        broken: The heads with nan or inf logits, of the tensors that have some. If such a head is nan, so are the
            smallest and the largest.
    """
    if not values:
        return {}
    entries = torch.cat(list(values.values())).double().numpy()
    starts = np.cumsum([0, *(tensor.numel() for tensor in values.values())])[:-1]
    finite = np.isfinite(entries)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, entries, 0.0), starts)
    smallest = np.minimum.reduceat(np.where(finite, entries, math.inf), starts)
    largest = np.maximum.reduceat(np.where(finite, entries, -math.inf), starts)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    if broken:
        none = {count: np.zeros(count, bool) for count in {tensor.numel() for tensor in values.values()}}
        masks = [broken[key].numpy() if key in broken else none[tensor.numel()] for key, tensor in values.items()]
        lost = np.logical_or.reduceat(np.isnan(entries) & np.concatenate(masks), starts)
        counts, smallest, largest = counts + lost, np.where(lost, math.nan, smallest), np.where(lost, math.nan, largest)
    found = zip(values, counts.tolist(), means.tolist(), smallest.tolist(), largest.tolist(), strict=True)
    return {key: (mean, low, high) for key, count, mean, low, high in found if count}

"""The metric pools like one big call, keeps its dtype, and knows its layers."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor.catalog import ALL
from attn_monitor.metric import AttentionMetric
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from tests.reference import assert_matches, softmax_reference

HEADS = {"first": 1, "second": 3}


def make_logits(batch: int, layer: str = "second", offset: float = 0.0) -> Tensor:
    return torch.randn(batch, HEADS[layer], 5, 7) + offset


def sums_of(logits: Tensor) -> AttentionSums:
    return attention_sums(AttentionCall(logits=logits, plain=True, head_dim=4), ALL)


def assert_pooled(stats: AttentionStatistics, *parts: Tensor) -> None:
    logits = torch.cat(parts)
    assert_matches(stats, softmax_reference(logits, torch.ones_like(logits, dtype=torch.bool)))


def test_updates_pool_like_one_call_and_layers_appear_when_they_like() -> None:
    metric = AttentionMetric()
    first, second = [make_logits(2, "first"), make_logits(3, "first")], [make_logits(1), make_logits(4, offset=9.0)]
    metric.update({"second": sums_of(second[0])})
    metric.update({"first": sums_of(first[0]), "second": sums_of(second[1])})
    metric.update({"first": sums_of(first[1])})
    stats = metric.compute()
    assert list(stats) == ["second", "first"]
    assert_pooled(stats["first"], *first)
    assert_pooled(stats["second"], *second)
    assert (stats["first"].calls, stats["first"].keys, stats["first"].head_dim) == (2, 7, 4)
    assert metric.additive.shape[1] == 4


def test_a_single_head_keeps_its_axis() -> None:
    metric = AttentionMetric(["logit_std"])
    metric.update({"first": sums_of(make_logits(2, "first"))})
    stats = metric.compute()["first"]
    assert stats.logit_std is not None
    assert stats.logit_std.shape == (1,)
    assert stats.entropy is None


def test_an_empty_metric_is_empty_without_a_warning() -> None:
    metric = AttentionMetric()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.compute() == {}
        metric.update({})
        assert metric.compute() == {}


def test_reset_forgets_the_layers() -> None:
    metric = AttentionMetric()
    metric.update({"first": sums_of(make_logits(2, "first"))})
    metric.reset()
    assert metric.compute() == {}
    logits = make_logits(2)
    metric.update({"first": sums_of(logits)})  # with another number of heads, which is fine now
    assert_pooled(metric.compute()["first"], logits)


def test_compute_depends_on_its_argument_and_repeats() -> None:
    metric = AttentionMetric()
    one = torch.ones(3)
    metric.update({"second": AttentionSums.from_gradients(4 * one, 16 * one, rows=one)})
    for losses, expected in ((1, 2.0), (2, 1.0), (1, 2.0)):
        norm = metric.compute(losses=losses)["second"].grad_logits_norm
        assert norm is not None
        assert norm.tolist() == [expected] * 3


def metric_of(modules: nn.ModuleList) -> AttentionMetric:
    [metric] = modules
    assert isinstance(metric, AttentionMetric)
    return metric


CASTS: dict[str, Callable[[nn.ModuleList], Any]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "to dtype": lambda module: module.to(torch.float16),
    "to meta": lambda module: module.to("meta"),
    "set_dtype": lambda module: metric_of(module).set_dtype(torch.float16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_the_states_stay_float64_on_the_cpu(cast: str) -> None:
    metric = AttentionMetric()
    logits = make_logits(2, offset=1e4)
    metric.update({"second": sums_of(logits)})
    CASTS[cast](nn.ModuleList([metric]))
    for state in (metric.additive, metric.moments, metric.extrema):
        assert (state.dtype, state.device.type) == (torch.float64, "cpu")
    assert_pooled(metric.compute()["second"], logits)
    metric.reset()
    assert metric.additive.dtype == torch.float64


def test_another_number_of_heads_is_an_error_that_adds_nothing() -> None:
    metric = AttentionMetric()
    logits = make_logits(2)
    metric.update({"second": sums_of(logits)})
    with pytest.raises(ValueError, match="'second' had 3 heads, and now has 1"):
        metric.update({"new": sums_of(logits), "second": sums_of(make_logits(1, "first"))})
    stats = metric.compute()
    assert list(stats) == ["second"]
    assert_pooled(stats["second"], logits)


def test_forward_returns_the_statistics_of_its_own_sums_and_keeps_pooling() -> None:
    metric = AttentionMetric()
    parts = [make_logits(2), make_logits(3)]
    metric.update({"second": sums_of(parts[0])})
    assert_pooled(metric({"second": sums_of(parts[1])})["second"], parts[1])
    assert_pooled(metric.compute()["second"], *parts)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_copies_are_independent(copied: Callable[[AttentionMetric], AttentionMetric]) -> None:
    metric, logits = AttentionMetric(), make_logits(2)
    metric.update({"second": sums_of(logits)})
    other = copied(metric)
    metric.reset()
    assert_pooled(other.compute()["second"], logits)


def test_states_of_several_ranks_reduce_exactly() -> None:
    parts = [make_logits(2), make_logits(1, offset=7.0), make_logits(3)]
    ranks = [AttentionMetric() for _ in parts]
    for rank, logits in zip(ranks, parts, strict=True):
        rank.update({"second": sums_of(logits)})
    gathered = {id(getattr(ranks[0], name)): [getattr(rank, name) for rank in ranks] for name in ranks[0]._defaults}
    metric = ranks[0]
    metric.dist_sync_fn = lambda state, group=None: gathered[id(state)]
    metric.distributed_available_fn = lambda: True
    metric._to_sync = True
    assert_pooled(metric.compute()["second"], *parts)
    metric._to_sync = False
    assert_pooled(metric.compute()["second"], parts[0])  # the rank's own states are back


def test_a_layer_without_rows_is_nan_beside_others() -> None:
    metric = AttentionMetric()
    logits = make_logits(2)
    logits[:, 1] = -math.inf
    metric.update({"second": sums_of(logits)})
    value = metric.compute()["second"].logit_max
    assert value is not None
    assert value.isnan().tolist() == [False, True, False]

"""One record out of what several processes saw, compared with one process that saw everything."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attn_monitor import AttentionProbe
from attn_monitor.catalog import ALL, STATISTICS
from attn_monitor.ranks import RankError, RankReduction, Seen
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.statistics import attention_sums
from tests.models import DIM, HandWritten, Net
from tests.processes import run_ranks

BATCHES = (3, 2, 5, 1)
"""Samples on each rank."""
QUERIES = 7
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast")


class Two(nn.Module):
    """Two attentions, of which a batch may skip the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = Net(["hand", "sdpa"])
        self.touches_what_it_skips = False

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        first, second = self.net.blocks
        x = x + 3 * first(x)
        if whole:
            x = x + second(x)
        elif self.touches_what_it_skips:
            x = x + 0 * sum(parameter.sum() for parameter in second.parameters())
        return self.net.head(x)


def batch_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(BATCHES[rank], QUERIES, DIM, generator=generator) + rank


def loss_of(model: nn.Module, rank: int, skipping: int | None) -> Tensor:
    return model(batch_of(rank), whole=rank != skipping).square().mean()


def values_of(stats: AttentionStatistics) -> dict[str, Any]:
    """Return everything a record says, as plain values."""
    plain = {name: value.tolist() for name, value in stats.measured().items()}
    return {**plain, "head_dim": stats.head_dim, "keys": stats.keys, "calls": stats.calls}


def observed(rank: int, skipping: int | None, wrapper: str = "none") -> dict[str, Any]:
    model, ranks = Two(), RankReduction()
    wrapped: Any = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=skipping is not None)
    elif wrapper == "fsdp2":
        # All ranks of FSDP2 gather every weight and reduce every gradient, or hang: only the attention can be skipped.
        model.touches_what_it_skips = True
        wrapped = fully_shard(model)
    with AttentionProbe(wrapped) as probe:
        loss_of(wrapped, rank, skipping).backward()
    return {layer: values_of(stats) for layer, stats in probe.compute(ranks=ranks).items()}


def together(world: int, skipping: int | None) -> dict[str, Any]:
    """Return what one process finds whose loss is the mean of the losses of all ranks."""
    model = Two()
    with AttentionProbe(model) as probe:
        for rank in range(world):
            loss_of(model, rank, skipping).backward()
    return {layer: values_of(stats) for layer, stats in probe.compute(losses=world).items()}


def concatenated(world: int) -> dict[str, Any]:
    """Return what one process finds in the concatenated batch; the gradients are those of another loss."""
    model = Two()
    with AttentionProbe(model, statistics=sorted(ALL - GRADIENT)) as probe, torch.no_grad():
        model(torch.cat([batch_of(rank) for rank in range(world)]))
    return {layer: values_of(stats) for layer, stats in probe.compute().items()}


GRADIENT = {name for name in ALL if STATISTICS[name].family == "gradients"}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("skipping", [None, 1])
def test_ranks_give_what_one_process_gives(world: int, skipping: int | None) -> None:
    expected = together(world, skipping)
    if skipping is None:
        for layer, values in concatenated(world).items():
            assert set(values) >= ALL - GRADIENT - {"critical_ratio"}
            for name in ALL & values.keys():
                assert expected[layer][name] == pytest.approx(values[name], rel=1e-6), name
    assert set(expected["net.blocks.0"]) >= GRADIENT
    for found in run_ranks(observed, world, skipping):
        assert list(found) == ["net.blocks.0", "net.blocks.1"]
        for layer, values in expected.items():
            assert set(found[layer]) == set(values)
            for name, value in values.items():
                assert found[layer][name] == pytest.approx(value, rel=1e-6, abs=1e-12), (layer, name)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("skipping", [None, 1])
def test_wrapped_models_give_what_one_process_gives(wrapper: str, world: int, skipping: int | None) -> None:
    expected = together(world, skipping)
    for found in run_ranks(observed, world, skipping, wrapper):
        assert list(found) == list(expected)
        for layer, values in expected.items():
            assert set(found[layer]) == set(values)
            for name, value in values.items():
                assert found[layer][name] == pytest.approx(value, rel=1e-6, abs=1e-12), (layer, name)


def records_alike(rank: int) -> list[Any]:
    """Return the records of several steps, to the last bit, and how many collectives each took."""
    model, ranks, found = Two(), RankReduction(), []
    for step in range(4):
        with AttentionProbe(model) as probe:
            loss_of(model, rank, skipping=1 if step < 2 else None).backward()
        with counted() as calls:
            record = probe.compute(ranks=ranks)
        found.append(({layer: values_of(stats) for layer, stats in record.items()}, dict(calls)))
    return found


class counted:  # used like a function
    """Counts the collectives that run inside."""

    def __enter__(self) -> Counter[str]:
        self.calls: Counter[str] = Counter()
        self.patches = [patch.object(dist, name, self._spy(name)) for name in COLLECTIVES]
        for one in self.patches:
            one.start()
        return self.calls

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()

    def _spy(self, name: str) -> Any:
        real = getattr(dist, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return real(*args, **kwargs)

        return spy


def test_all_ranks_have_the_same_record_after_one_collective() -> None:
    first, second = run_ranks(records_alike, 2)
    assert first == second
    collectives = [calls for _, calls in first]
    agreeing = {"all_gather": 2, "all_gather_object": 1}
    assert collectives == [agreeing, {"all_gather": 1}, {"all_gather": 1}, {"all_gather": 1}]


def collectives_of(rank: int, layers: int, heads: int) -> list[int]:
    """Return how many collectives two records take."""
    ranks, found = RankReduction(), []
    sums = {f"layers.{layer}": sums_of(logits(heads, rank + layer)) for layer in range(layers)}
    for _ in range(2):
        with counted() as calls:
            ranks.reduce(Seen(sums=sums))
        found.append(sum(calls.values()))
    return found


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 17), (23, 5)])
def test_the_number_of_collectives_is_the_same_for_any_number_of_layers_and_heads(layers: int, heads: int) -> None:
    assert run_ranks(collectives_of, 2, layers, heads) == [[3, 1]] * 2


def sums_of(logits: Tensor) -> Any:
    return attention_sums(AttentionCall(logits=logits, head_dim=4), frozenset({"logit_max", "logit_mean"}))


def logits(heads: int, value: float) -> Tensor:
    return torch.full((1, heads, 2, 3), value) + torch.arange(heads).view(-1, 1, 1)


def growing(rank: int) -> list[Any]:
    """A layer that rank 0 never runs, and the others only from the second step on."""
    ranks, found = RankReduction(), []
    for step in range(3):
        sums = {"a": sums_of(logits(2, rank + step))}
        if step and rank:
            sums = {"b": sums_of(logits(3, 10.0 * step)), **sums}
        record = ranks.reduce(Seen(sums=sums))
        found.append(
            {name: stats.logit_max.tolist() for name, stats in record.statistics.items() if stats.logit_max is not None}
        )
    return found


def test_layers_may_appear_on_one_rank_at_any_time() -> None:
    a = [[2.0, 3.0], [3.0, 4.0], [4.0, 5.0]]
    expected = [{"a": a[0]}, {"a": a[1], "b": [10.0, 11.0, 12.0]}, {"a": a[2], "b": [20.0, 21.0, 22.0]}]
    assert run_ranks(growing, 3) == [expected] * 3


def troubled(rank: int) -> list[Any]:
    """A layer fails on rank 1, then all of it, then nothing."""
    ranks = RankReduction()
    sums = {"a": sums_of(logits(2, rank)), "b": sums_of(logits(2, 5.0 + rank))}
    seen = [
        Seen(sums=sums),
        Seen(sums={"b": sums["b"]}, skipped={"a": "out of memory"}) if rank == 1 else Seen(sums=sums),
        Seen(sums={"b": sums["b"]}, skipped={"a": "out of memory"}) if rank == 1 else Seen(sums=sums),
        Seen(failure="OSError: no") if rank == 1 else Seen(sums=sums),
        Seen(sums=sums, notes={"b": f"note of {rank}"}),
    ]
    found: list[Any] = []
    for one in seen:
        with suppress(RankError):
            found.append("lost")
            record = ranks.reduce(one)
            found[-1] = list(record.statistics), dict(record.skipped), dict(record.notes)
    return found


def test_what_fails_on_one_rank_is_missing_on_all_and_told_with_the_reason() -> None:
    first, second = run_ranks(troubled, 2)
    missing = "not measured on another rank"
    assert first == [
        (["a", "b"], {}, {}),
        (["b"], {"a": "on rank 1: out of memory"}, {}),
        (["b"], {"a": missing}, {}),
        "lost",
        (["a", "b"], {}, {"b": "note of 0"}),
    ]
    own = {"a": "out of memory"}
    assert second[1:4] == [(["b"], own, {}), (["b"], own, {}), "lost"]


def of_other_sizes(rank: int) -> list[Any]:
    ranks = RankReduction()
    found = []
    for _ in range(2):
        sums = {"a": sums_of(logits(2 + rank, 1.0)), "b": sums_of(logits(2, 5.0 + rank))}
        with counted() as calls:
            record = ranks.reduce(Seen(sums=sums))
        found.append((list(record.statistics), dict(record.skipped), calls["all_gather"]))
    return found


def test_a_layer_with_other_heads_on_another_rank_is_skipped_with_the_reason() -> None:
    reason = {"a": "rank 0 has 2 heads of it, and rank 1 has 3"}
    assert run_ranks(of_other_sizes, 2) == [[(["b"], reason, 2), (["b"], reason, 1)]] * 2


def sharded(rank: int) -> Any:
    """Two by two ranks: data parallel rank // 2, tensor parallel rank % 2."""
    data, part = divmod(rank, 2)
    ranks = RankReduction(duplicate=part > 0)
    sums = {"split": sums_of(logits(3, 100.0 * part + data)), "whole": sums_of(logits(2, 7.0 + data))}
    record = ranks.reduce(Seen(sums=sums, shards={"split": (2, part)}, losses=5))
    return {
        name: (stats.heads, stats.calls, stats.rows.tolist(), stats.measured()["logit_max"].tolist())
        for name, stats in record.statistics.items()
    }


def test_heads_that_tensor_parallel_ranks_share_get_their_places() -> None:
    expected = {
        "split": (6, 2, [4] * 6, [1.0, 2.0, 3.0, 101.0, 102.0, 103.0]),
        "whole": (2, 2, [4] * 2, [8.0, 9.0]),  # seen twice, counted once
    }
    assert run_ranks(sharded, 4) == [expected] * 4


def gradients_of(rank: int) -> Any:
    """Two losses on each of two data parallel ranks, the heads over two tensor parallel ones."""
    part = rank % 2
    one = torch.ones(1)
    sums = attention_sums(AttentionCall(logits=logits(1, 0.0)), frozenset({"logit_max"}))
    sums = sums.merge(type(sums).from_gradients(64 * one * (1 + 3 * part), one, rows=one))
    ranks = RankReduction(duplicate=part > 0)
    record = ranks.reduce(Seen(sums={"a": sums}, shards={"a": (2, part)}, losses=2))
    return record.statistics["a"].measured()["grad_logits_norm"].tolist()


def test_the_loss_is_the_mean_over_micro_batches_and_data_parallel_ranks() -> None:
    expected = [math.sqrt(2 * 64) / 4, math.sqrt(2 * 256) / 4]
    for found in run_ranks(gradients_of, 4):
        assert found == pytest.approx(expected, rel=1e-12)


def partly_graded(rank: int) -> Any:
    """Rank 1 ran the layer without gradients: half of them are no measurement."""
    model, ranks = Two(), RankReduction()
    with AttentionProbe(model, gradients=rank == 0) as probe:
        loss_of(model, rank, None).backward()
    stats = probe.compute(ranks=ranks)["net.blocks.0"]
    return stats.grad_logits_norm, stats.logit_std is not None


def test_gradients_that_a_rank_did_not_measure_are_not_measured() -> None:
    assert run_ranks(partly_graded, 2) == [(None, True)] * 2


def asked(rank: int) -> Any:
    ranks = RankReduction()
    with counted() as calls:
        answer = ranks.any(rank == 1, False, rank == 0)
    return answer, dict(calls)


def test_flags_are_up_if_they_are_on_any_rank() -> None:
    assert run_ranks(asked, 2) == [((True, False, True), {"all_reduce": 1})] * 2


def broken(rank: int) -> Any:
    ranks = RankReduction()
    found = []
    with patch.object(dist, "all_gather", side_effect=RuntimeError("connection closed by peer")) as gather:
        for _ in range(2):
            with pytest.raises(RankError) as caught:
                ranks.reduce(Seen(sums={"a": sums_of(logits(2, 1.0))}))
            found.append(str(caught.value))
    return found, gather.call_count, ranks.any(True, False)


def test_processes_that_lost_each_other_do_not_try_again() -> None:
    text = "there are no more records, the processes lost each other: RuntimeError: connection closed by peer"
    assert run_ranks(broken, 2) == [([text] * 2, 1, (True, False))] * 2


def test_without_processes_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="expects an initialised process group, and there is none"):
        RankReduction()


def interrupted(rank: int) -> Any:
    """The statistics of rank 1 can't be computed; rank 0 must not wait."""
    model = HandWritten()
    ranks = RankReduction()
    with AttentionProbe(model) as probe:
        model(batch_of(rank)).sum().backward()
    if rank == 1:
        probe._collector.settle = raising  # type: ignore[method-assign] # what a device can do at any time
    with pytest.raises(RankError, match="rank 1: RuntimeError: device lost"):
        probe.compute(ranks=ranks)
    with AttentionProbe(model) as probe:
        model(batch_of(rank)).sum().backward()
    return list(probe.compute(ranks=ranks))


def raising() -> None:
    raise RuntimeError("device lost")


def test_a_rank_that_fails_tells_the_others() -> None:
    assert run_ranks(interrupted, 2) == [["HandWritten"]] * 2

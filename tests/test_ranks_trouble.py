"""What goes wrong on one rank, changes there, or is there alone, while records are made together."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from attn_monitor.metric import AttentionMetric
from attn_monitor.ranks import RankError, RankReduction, Seen
from tests.processes import run_ranks
from tests.test_ranks import logits, sums_of


def out_of_memory(rank: int) -> list[Any]:
    """Rank 1 can't pack what it has to send in the second step."""
    ranks, found = RankReduction(), []
    real = AttentionMetric.update
    for step in range(3):
        tried: list[int] = []

        def update(metric: AttentionMetric, sums: Any, *, first: list[int] = tried, now: int = step) -> None:
            first.append(1)
            if rank == 1 and now == 1 and len(first) == 1:
                raise MemoryError("no room")
            real(metric, sums)

        with patch.object(AttentionMetric, "update", update):
            found.append(outcome(ranks, Seen(sums={"a": sums_of(logits(2, rank + step))})))
    return found


def outcome(ranks: RankReduction, seen: Seen) -> Any:
    """Return the layers of a record, or why there is none."""
    try:
        return list(ranks.reduce(seen).statistics)
    except RankError as error:
        return str(error)


def test_a_rank_that_can_not_pack_its_state_loses_one_record_of_all() -> None:
    lost = "this record is lost on every rank, one failed (rank 1: MemoryError: no room)"
    assert run_ranks(out_of_memory, 2) == [[["a"], lost, ["a"]]] * 2


def late(rank: int) -> list[Any]:
    """Rank 1 fails in the gather that follows the agreement on layers, and in no other."""
    ranks, found = RankReduction(), []
    real = RankReduction._filled
    calls: list[int] = []

    def filled(self: RankReduction, *args: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise MemoryError("no room")
        return real(self, *args)

    with patch.object(RankReduction, "_filled", filled):
        found += [outcome(ranks, Seen(sums={"a": sums_of(logits(2, rank + step))})) for step in range(2)]
    return found


def test_a_rank_that_fails_behind_the_agreement_is_noticed() -> None:
    lost = "this record is lost on every rank, one failed (rank 1: MemoryError: no room)"
    assert run_ranks(late, 2) == [[lost, ["a"]]] * 2


def in_parts(rank: int) -> list[Any]:
    """Rank 0 leaves the middle layer out, rank 1 the first; a later one comes last."""
    ranks = RankReduction()
    layers = [["first", "third"], ["second", "third"]][rank]
    record = ranks.reduce(Seen(sums={name: sums_of(logits(2, 0.0)) for name in layers}))
    found = [list(record.statistics)]
    layers = ["first", "second", "between", "third"] if rank == 1 else layers
    record = ranks.reduce(Seen(sums={name: sums_of(logits(2, 0.0)) for name in layers}))
    return [*found, list(record.statistics)]


def test_layers_stand_in_the_order_of_the_forward_pass_whoever_ran_them() -> None:
    expected = [["first", "second", "third"], ["first", "second", "between", "third"]]
    for found in run_ranks(in_parts, 2):
        assert sorted(found[0]) == sorted(expected[0])
        assert found[0].index("second") < found[0].index("third")
        assert found[1].index("second") < found[1].index("between") < found[1].index("third")


def of_changing_size(rank: int) -> list[Any]:
    """Rank 1 has more heads from the second step on, rank 0 from the fourth."""
    ranks, found = RankReduction(), []
    for step in range(5):
        heads = 3 if step >= (1 if rank == 1 else 3) else 2
        found.append(outcome(ranks, Seen(sums={"a": sums_of(logits(heads, 0.0))})))
    return found


def test_a_layer_is_back_when_the_ranks_agree_on_its_heads_again() -> None:
    assert run_ranks(of_changing_size, 2) == [[["a"], [], [], ["a"], ["a"]]] * 2


def blinded(rank: int) -> list[Any]:
    """Watching breaks on rank 1 in the second step: what it did not see is not what it did not run."""
    torch.manual_seed(3)
    model, ranks = SelfAttention(), RankReduction()
    probe = AttentionProbe(model)
    found: list[Any] = []
    for step in range(3):
        with probe:
            model(torch.randn(2, 5, 4, requires_grad=True)).sum().backward()
            if rank == 1 and step == 1:
                probe._collector.broken(ValueError("lost track"))
        with suppress(RankError):
            found.append("lost")
            found[-1] = list(probe.compute(ranks=ranks))
        probe.reset()
    return found


def test_a_rank_that_lost_track_loses_the_record_of_all() -> None:
    assert run_ranks(blinded, 2) == [[["SelfAttention"], "lost", ["SelfAttention"]]] * 2


class SelfAttention(nn.Module):
    """Attends only if there is more than one token."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x if x.shape[1] > 1 else x


def with_nothing_to_attend(rank: int) -> Any:
    """Rank 1 has single tokens."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), SelfAttention())
    ranks, probe = RankReduction(), AttentionProbe(model)
    found = []
    for _ in range(3):
        with probe:
            model(torch.randn(2, 5 if rank == 0 else 1, 4)).sum().backward()
        found.append((list(probe.compute(ranks=ranks)), dict(probe.skipped)))
        probe.reset()
    return found


def test_a_rank_with_nothing_to_attend_to_takes_nothing_from_the_others() -> None:
    for found in run_ranks(with_nothing_to_attend, 2):
        assert found == [(["1"], {})] * 3

"""The helper that runs ranks: answers in order, and errors that arrive instead of hanging."""

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_ranks


def _sum_of_ranks(rank: int, factor: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([float(factor * (rank + 1))])
    dist.all_reduce(value)
    return rank, value


def _one_fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("rank 1 has no such layer")
    dist.barrier()


def test_every_rank_answers_in_order() -> None:
    answers = run_ranks(_sum_of_ranks, 2, 5)
    assert [rank for rank, _ in answers] == [0, 1]
    assert [value.item() for _, value in answers] == [15.0, 15.0]


def test_an_error_of_one_rank_is_raised_while_another_waits_for_it() -> None:
    with pytest.raises(KeyError, match="no such layer") as caught:
        run_ranks(_one_fails, 2)
    cause = str(caught.value.__cause__)
    assert "on rank 1" in cause
    assert "_one_fails" in cause

"""Distributed queries, keys and values, placed in every way, and those that are refused."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_monitor import observe_attention
from attn_monitor.probe import AttentionProbe
from attn_monitor.tensor_parallel import UNEVEN, UNPLACED, HeadShard, NoCommunication, part_of_mesh
from tests.parallel_heads import assert_parts, spread_by
from tests.parallel_models import (
    Transformer,
    Watched,
    Way,
    collectives,
    llama_plan,
    local,
    sample,
    watched,
)
from tests.processes import run_ranks

# -- distributed queries, keys and values -----------------------------------------------------------------------------


def _distributed(rank: int, groups: int, path: Way) -> Watched:
    mesh = init_device_mesh("cpu", (2,))
    with ExitStack() as stack:
        stack.enter_context(implicit_replication())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the others know no DTensor on a CPU
        make = partial(spread_by, mesh, partial(Transformer, 4, groups, path), llama_plan(local=False))
        return watched(make, sample(), [mesh.get_group()], twice=True)


@pytest.mark.parametrize(("groups", "path"), [(2, "sdpa"), (4, "softmax")])
@pytest.mark.slow
def test_projections_that_return_distributed_tensors(groups: int, path: Way) -> None:
    for rank, found in enumerate(run_ranks(_distributed, 2, groups, path)):
        assert_parts(found, partial(Transformer, 4, groups, path), index=rank, count=2)


class Bare(nn.Module):
    """Attention of what it is given."""

    def __init__(self, path: Way, mask: Tensor | None = None) -> None:
        super().__init__()
        self.path, self.mask = path, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        if self.path == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        scores = q @ k.transpose(-2, -1) / 7**0.5
        if self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(-1) @ v


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value: 4 samples, 6 heads, 10 queries, 12 keys, depth 7."""
    generator = torch.Generator().manual_seed(3)
    shapes = (4, 6, 10, 7), (4, 6, 12, 7), (4, 6, 12, 7)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


PLACEMENTS: dict[str, list[Placement]] = {
    "heads": [Shard(1)] * 3,
    "samples": [Shard(0)] * 3,
    "whole": [Replicate()] * 3,
    "queries": [Shard(2), Replicate(), Replicate()],
    "tokens": [Shard(2)] * 3,
    "sums": [Partial(), Replicate(), Replicate()],
    "features": [Shard(3), Shard(3), Replicate()],
    "heads of the queries": [Shard(1), Replicate(), Replicate()],
}
MEASURED = {"heads", "samples", "whole"}


def _bare(rank: int) -> dict[tuple[str, str], Any]:
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, placements in PLACEMENTS.items():
        for path in ("sdpa", "softmax"):
            mask = _bias()
            given = [distribute_tensor(x, mesh, [Replicate()]) for x in (*operands(), mask)]
            q, k, v, bias = given
            model = Bare(path, bias)
            with sdpa_kernel(SDPBackend.MATH):
                runs = []
                for probe in (None, AttentionProbe(model)):
                    leaves = [
                        _placed(x, mesh, p).detach().requires_grad_()
                        for x, p in zip((q, k, v), placements, strict=True)
                    ]
                    before = collectives(mesh.get_group())
                    error = ""
                    with ExitStack() as stack:
                        if probe is not None:
                            stack.enter_context(probe)
                        try:
                            out = model(*leaves)
                            out.square().sum().backward()
                        except Exception as problem:
                            error = f"{type(problem).__name__}"
                    grads = [local(x.grad) for x in leaves if x.grad is not None]
                    outs = [] if error else [local(out.detach())]
                    runs.append(([*outs, *grads], collectives(mesh.get_group()) - before, error))
            assert probe is not None
            same = all(map(torch.equal, runs[0][0], runs[1][0])) and runs[0][2] == runs[1][2]
            collector = probe._collector
            found[name, path] = (
                dict(probe.compute()),
                dict(probe.skipped),
                {record: (part.index, part.count, part.ranks) for record, part in collector.head_shards.items()},
                same,
                runs[1][1] - runs[0][1],
                runs[1][2],
            )
    return found


def _bias() -> Tensor:
    bias = torch.randn(4, 6, 10, 12, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return bias.masked_fill(torch.ones(10, 12, dtype=torch.bool).triu(3), -torch.inf)


def _placed(x: DTensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):
        return DTensor.from_local(x.to_local() / mesh.size(), mesh, [placement])
    return x.redistribute(mesh, [placement])


@pytest.fixture(scope="module")
def bare() -> list[dict[Any, Any]]:
    """What two ranks found of each placement."""
    return run_ranks(_bare, 2)


@pytest.mark.parametrize("path", ["sdpa", "softmax"])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.slow
def test_placements(bare: list[dict[Any, Any]], name: str, path: Way) -> None:
    for rank, found in enumerate(bare):
        records, skipped, shards, same, collectives, _ = found[name, path]
        assert same
        assert collectives == 0
        if name not in MEASURED:
            assert records == {}
            assert len(skipped) == 1
            continue
        assert skipped == {}
        assert shards == ({"Bare": (rank, 2, (0, 1))} if name == "heads" else {})
        query, key, value = operands()
        mask = _bias()
        if name == "samples":
            query, key, value, mask = (x[2 * rank : 2 * rank + 2] for x in (query, key, value, mask))
        leaves = [x.requires_grad_() for x in (query, key, value)]
        [wanted] = _alone(Bare(path, mask), leaves).values()
        [record] = records.values()
        heads = slice(3 * rank, 3 * rank + 3) if name == "heads" else slice(None)
        assert set(record.measured()) == set(wanted.measured())
        for statistic, value in record.measured().items():
            torch.testing.assert_close(value, wanted.measured()[statistic][heads], rtol=1e-6, atol=1e-12)


def _alone(model: nn.Module, given: list[Tensor]) -> Any:
    with AttentionProbe(model) as probe:
        model(*given).square().sum().backward()
    return probe.compute()


# -- parts ------------------------------------------------------------------------------------------------------------


def _parts(rank: int) -> tuple[HeadShard | None, ...]:
    mesh = init_device_mesh("cpu", (2, 2))
    return tuple(part_of_mesh(mesh, dims) for dims in ([0], [1], [0, 1], [1, 0]))


def _refused(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    before = collectives(mesh.get_group())
    with NoCommunication():  # type: ignore[no-untyped-call] # torch has no hints for it
        assert torch.equal(local(cut * 2), torch.full((2,), 2.0))
        try:
            cut.full_tensor()
        except RuntimeError as error:
            assert collectives(mesh.get_group()) == before
            return str(error)
    return ""


@pytest.mark.slow
def test_parts_of_a_mesh() -> None:
    first = [HeadShard(0, 2, (0, 2)), HeadShard(0, 2, (1, 3)), HeadShard(1, 2, (0, 2)), HeadShard(1, 2, (1, 3))]
    second = [HeadShard(0, 2, (0, 1)), HeadShard(1, 2, (0, 1)), HeadShard(0, 2, (2, 3)), HeadShard(1, 2, (2, 3))]
    for rank, parts in enumerate(run_ranks(_parts, 4)):
        inner_last = HeadShard(rank, 4, (0, 1, 2, 3))
        inner_first = HeadShard([0, 2, 1, 3][rank], 4, (0, 2, 1, 3))
        assert parts == (first[rank], second[rank], inner_last, inner_first)


@pytest.mark.slow
def test_operations_that_would_communicate_are_refused() -> None:
    assert all("communication between processes" in text for text in run_ranks(_refused, 2))


def test_reasons_say_what_to_do() -> None:
    assert "choose a number of ranks" in UNEVEN
    assert "keep the projection" in UNPLACED


# -- what is not measured ---------------------------------------------------------------------------------------------


class _Summed(nn.Module):
    def forward(self, q: DTensor, k: DTensor, v: DTensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v)
        assert isinstance(out, DTensor)
        # Each rank goes on with the whole output, and the gradients of all of them add up.
        return out.to_local(grad_placements=[Partial()])


def _gradients_elsewhere(rank: int) -> tuple[Any, dict[str, str], int]:
    mesh = init_device_mesh("cpu", (2,))
    model = _Summed()
    leaves = [distribute_tensor(x, mesh, [Replicate()]).requires_grad_() for x in operands()]
    with AttentionProbe(model) as probe, sdpa_kernel(SDPBackend.MATH):
        out = model(*leaves)
        before = collectives(mesh.get_group())
        out.square().sum().backward()
    return dict(probe.compute()), dict(probe.notes), collectives(mesh.get_group()) - before


@pytest.mark.slow
def test_gradients_that_are_spread_in_another_way() -> None:
    for records, notes, _ in run_ranks(_gradients_elsewhere, 2):
        assert notes == {
            "_Summed": "gradients not measured: they are spread over the processes in another way than the attention is"
        }
        assert records["_Summed"].grad_logits_norm is None
        wanted = _alone(Bare("sdpa"), [x.requires_grad_() for x in operands()])["Bare"]
        torch.testing.assert_close(records["_Summed"].logit_std, wanted.logit_std, rtol=1e-6, atol=0)


def test_shown_distributed_tensors_are_refused_with_advice(tmp_path: Way) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        query = distribute_tensor(torch.randn(2, 3, 5, 7), mesh, [Replicate()])
        with AttentionProbe(nn.Identity()) as probe:
            observe_attention("kernel", query, query)
    finally:
        torch.distributed.destroy_process_group()
    assert "to_local()" in probe.skipped["kernel"]

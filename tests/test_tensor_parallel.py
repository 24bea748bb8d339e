"""Attention that is spread over processes: every rank knows which heads it has, and measures what one process would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from attn_monitor import observe_attention
from attn_monitor.catalog import GRADIENTS
from attn_monitor.probe import AttentionProbe
from attn_monitor.tensor_parallel import UNEVEN, UNPLACED, HeadShard, NoCommunication, part_of_mesh
from tests.parallel_models import (
    Attention,
    Transformer,
    Watched,
    Way,
    alone,
    collectives,
    llama_plan,
    local,
    sample,
    spread,
    watched,
)
from tests.processes import run_ranks

LAYERS = ["blocks.0.attn", "blocks.1.attn"]


def assert_parts(
    found: Watched, make: Callable[[], nn.Module], *, index: int = 0, count: int = 1, but: frozenset[str] = frozenset()
) -> None:
    """Compare a rank's records with its part of those of one process on the whole model."""
    assert found.same
    assert found.collectives == 0
    assert found.skipped == {}
    wanted = alone(make, sample())
    assert list(found.records) == list(wanted)
    if count > 1:
        assert {shard[:2] for shard in found.shards.values()} == {(index, count)}
        assert set(found.shards) == set(wanted)
    else:
        assert found.shards == {}
    for name, record in found.records.items():
        measured, whole = record.measured(), wanted[name].measured()
        assert set(measured) == set(whole)
        assert record.heads * count == wanted[name].heads
        for statistic in measured.keys() - but:
            part = whole[statistic][HeadShard(index, count, ()).place(record.heads)]
            torch.testing.assert_close(measured[statistic], part, rtol=1e-6, atol=1e-12, msg=f"{name} {statistic}")


# -- plain parts of projections that are spread -----------------------------------------------------------------------


def _recipe(rank: int, groups: int, path: Way, twice: bool, kv: bool) -> Watched:
    mesh = init_device_mesh("cpu", (2,))
    make = partial(_spread, mesh, partial(Transformer, 4, groups, path), llama_plan(kv=kv))
    return watched(make, sample(), [mesh.get_group()], twice)


def _spread(mesh: DeviceMesh, make: Callable[[], Transformer], plan: dict[str, Any]) -> Transformer:
    return spread(make(), mesh, plan)


@pytest.mark.parametrize(
    ("groups", "path", "twice"), [(4, "sdpa", False), pytest.param(2, "softmax", True, marks=pytest.mark.slow)]
)
def test_each_rank_measures_its_heads(groups: int, path: Way, twice: bool) -> None:
    for rank, found in enumerate(run_ranks(_recipe, 2, groups, path, twice, True)):
        assert_parts(found, partial(Transformer, 4, groups, path), index=rank, count=2)
        assert {shard[2] for shard in found.shards.values()} == {(0, 1)}
        assert found.notes == dict.fromkeys(LAYERS, f"heads of tensor-parallel rank {rank} of 2 only")


@pytest.mark.parametrize("path", ["sdpa", "softmax"])
@pytest.mark.slow
def test_keys_that_every_rank_has(path: Way) -> None:
    for rank, found in enumerate(run_ranks(_recipe, 2, 1, path, False, False)):
        # The gradient that leaves the plain key projections is that of a rank's own heads, which is all torch offers.
        last = found.records[LAYERS[1]]
        assert_parts(found, partial(Transformer, 4, 1, path), index=rank, count=2, but=GRADIENTS)
        whole = alone(partial(Transformer, 4, 1, path), sample())[LAYERS[1]].grad_logits_norm
        assert whole is not None
        torch.testing.assert_close(last.grad_logits_norm, whole[2 * rank : 2 * rank + 2], rtol=1e-6, atol=0)


class Between(Attention):
    """Does something with queries and keys on their way."""

    way = "rotary"

    def between(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate, or hide where they come from."""
        if self.way == "rotary":
            angles = torch.arange(q.shape[2], dtype=q.dtype)[:, None] * torch.ones(q.shape[-1], dtype=q.dtype)
            q, k = (x * angles.cos() + x.flip(-1) * angles.sin() for x in (q, k))
            return q, k, v
        q, k = (_Hidden.apply(x) for x in (q, k))  # type: ignore[no-untyped-call] # torch has no hints for it
        return q, k, v


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def with_between(way: str, heads: int = 4) -> Transformer:
    """Return a transformer whose attention does something with queries and keys."""
    model = Transformer(heads, heads)
    for block in model.blocks:
        attention: Any = block.attn
        attention.__class__ = Between
        attention.way = way
    return model


class Checkpointed(Transformer):
    """Recomputes its blocks in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Run each block under a checkpoint."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Shown(Attention):
    """A kernel of its own that it shows."""

    name: str

    def forward(self, x: Tensor) -> Tensor:
        """Attend in a way that nothing else sees."""
        q, k, v = (layer(x).unflatten(-1, (-1, 7)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        with torch._C.DisableTorchFunction():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        observe_attention(self.name, q, k, v, is_causal=True, output=out)
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result


def shown() -> Transformer:
    """Return a transformer that shows its attention."""
    model = Transformer()
    for number, block in enumerate(model.blocks):
        attention: Any = block.attn
        attention.__class__ = Shown
        attention.name = f"kernel.{number}"
    return model


SEQUENCES = {
    "attn.q": ColwiseParallel(input_layouts=Shard(1)),
    "attn.k": ColwiseParallel(input_layouts=Shard(1)),
    "attn.v": ColwiseParallel(input_layouts=Shard(1)),
}
GATHERED = {f"attn.{side}": ColwiseParallel(output_layouts=Replicate()) for side in "qkv"}
FEED_FORWARD = {"up": ColwiseParallel(), "down": RowwiseParallel()}
MODELS: dict[str, tuple[Callable[[], Transformer], dict[str, Any], int]] = {
    "rotary": (partial(with_between, "rotary"), llama_plan(), 2),
    "only the weights tell": (partial(with_between, "hidden"), llama_plan(), 2),
    "checkpoint": (partial(Checkpointed), llama_plan(), 2),
    "shown": (shown, llama_plan(), 2),
    "one head each": (partial(Transformer, 2, 2), llama_plan(), 2),
    "one head each, softmax": (partial(Transformer, 2, 2, "softmax"), llama_plan(), 2),
    "gathered": (Transformer, GATHERED, 1),
    "gathered, only the weights tell": (partial(with_between, "hidden"), GATHERED, 1),
    "feed-forward alone": (Transformer, FEED_FORWARD, 1),
    "feed-forward alone, only the weights tell": (partial(with_between, "hidden"), FEED_FORWARD, 1),
}


def _models(rank: int) -> dict[str, Watched]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: watched(partial(_spread, mesh, make, plan), sample(), [mesh.get_group()])
        for name, (make, plan, _) in MODELS.items()
    }


@pytest.fixture(scope="module")
def models() -> list[dict[str, Watched]]:
    """What two ranks found in all these models."""
    return run_ranks(_models, 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_which_heads_are_here(models: list[dict[str, Watched]], name: str) -> None:
    make, _, count = MODELS[name]
    for rank, found in enumerate(models):
        # What is gathered counts as the same on all ranks, and the gradients of torch's own plan don't.
        but = GRADIENTS if name.startswith("gathered") else frozenset()
        assert_parts(found[name], make, index=rank if count > 1 else 0, count=count, but=but)


class Narrow(nn.Module):
    """Three heads of one feature each, of which torch gives the first of two ranks two."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (layer(x).unflatten(-1, (-1, 1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


def _uneven(rank: int) -> Watched:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(2)
    state = Narrow().state_dict()

    def make() -> nn.Module:
        model = Narrow()
        model.load_state_dict(state)
        return parallelize_module(model, mesh, {side: ColwiseParallel() for side in "qkv"})

    return watched(make, sample())


@pytest.mark.slow
def test_heads_that_do_not_divide_are_not_measured() -> None:
    for found in run_ranks(_uneven, 2):
        assert found.records == {}
        assert found.skipped == {"Narrow": UNEVEN}
        assert found.same


# -- distributed queries, keys and values -----------------------------------------------------------------------------


def _distributed(rank: int, groups: int, path: Way) -> Watched:
    mesh = init_device_mesh("cpu", (2,))
    with ExitStack() as stack:
        stack.enter_context(implicit_replication())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the others know no DTensor on a CPU
        make = partial(_spread, mesh, partial(Transformer, 4, groups, path), llama_plan(local=False))
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


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def _sharded(model: Transformer, mesh: DeviceMesh, *, linears: bool = False) -> Transformer:
    block: Any
    for block in model.blocks:
        for layer in (block.attn.q, block.attn.k, block.attn.v) if linears else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp(rank: int) -> dict[str, Watched]:
    mesh = init_device_mesh("cpu", (2,))
    groups = [mesh.get_group()]
    return {
        "plain": watched(lambda: _sharded(Transformer(), mesh), sample(), groups),
        "twice": watched(lambda: _sharded(Transformer(), mesh), sample(), groups, twice=True),
        "each layer": watched(lambda: _sharded(with_between("hidden"), mesh, linears=True), sample(), groups),
    }


@pytest.mark.slow
def test_fully_sharded_data_parallel() -> None:
    for found in run_ranks(_fsdp, 2):
        assert_parts(found["plain"], Transformer)
        assert_parts(found["twice"], Transformer)
        assert_parts(found["each layer"], partial(with_between, "hidden"))


def _two_dimensions(rank: int) -> dict[str, Watched]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh["dp"].get_group(), mesh["tp"].get_group()]

    def make(model: Transformer) -> Transformer:
        return _sharded(spread(model, mesh["tp"]), mesh["dp"])

    return {
        "plain": watched(lambda: make(Transformer()), sample(), groups),
        "hidden": watched(lambda: make(with_between("hidden")), sample(), groups),
    }


@pytest.mark.slow
def test_two_dimensions_of_parallelism() -> None:
    for rank, found in enumerate(run_ranks(_two_dimensions, 4)):
        assert_parts(found["plain"], Transformer, index=rank % 2, count=2)
        assert_parts(found["hidden"], partial(with_between, "hidden"), index=rank % 2, count=2)
        assert {shard[2] for shard in found["plain"].shards.values()} == {(0, 1) if rank < 2 else (2, 3)}


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


class _Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _context_parallel(rank: int) -> tuple[int, dict[str, str]]:
    mesh = init_device_mesh("cpu", (2,))
    query, key, value = (torch.randn(2, 3, 8, 7, requires_grad=True) for _ in range(3))
    model = _Causal()
    probe = AttentionProbe(model)
    buffers = [x.detach() for x in (query, key, value)]
    # torch has it for GPUs only, and says so after the probe has seen the call.
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]), suppress(NotImplementedError), probe:
        model(query, key, value)
    return len(probe.compute()), dict(probe.skipped)


@pytest.mark.slow
def test_context_parallelism_is_left_alone() -> None:
    for measured, skipped in run_ranks(_context_parallel, 2):
        assert measured == 0
        assert "its queries are spread over processes (DTensor, Shard(2))" in skipped["_Causal"]


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

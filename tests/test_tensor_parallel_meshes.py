"""Attention under fully sharded data parallelism, over two dimensions of a mesh, and under context parallelism."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

from attn_monitor.probe import AttentionProbe
from tests.parallel_heads import assert_parts, with_between
from tests.parallel_models import (
    Transformer,
    Watched,
    sample,
    spread,
    watched,
)
from tests.processes import run_ranks

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


# -- what is not measured ---------------------------------------------------------------------------------------------


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

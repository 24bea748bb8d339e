"""Models that are spread over processes, and which heads each of them has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from attn_monitor.tensor_parallel import HeadShard
from tests.parallel_models import (
    Attention,
    Transformer,
    Watched,
    alone,
    sample,
    spread,
)


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


def spread_by(mesh: DeviceMesh, make: Callable[[], Transformer], plan: dict[str, Any]) -> Transformer:
    return spread(make(), mesh, plan)


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

"""A small transformer in the shape of Llama, and what its tests on several ranks do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attn_monitor.probe import AttentionProbe
from attn_monitor.records import AttentionStatistics

BATCH, TOKENS, WIDTH, DEPTH = 4, 5, 6, 7
Way = Literal["sdpa", "softmax"]


class Attention(nn.Module):
    """Grouped attention whose numbers of heads follow from what its projections return."""

    def __init__(self, heads: int, groups: int, path: Way) -> None:
        super().__init__()
        self.group, self.path = heads // groups, path
        self.q = nn.Linear(WIDTH, heads * DEPTH)
        self.k = nn.Linear(WIDTH, groups * DEPTH)
        self.v = nn.Linear(WIDTH, groups * DEPTH)
        self.out = nn.Linear(heads * DEPTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, DEPTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k, v = self.between(q, k, v)
        if self.path == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.group > 1)
        else:
            if self.group > 1:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            scores = q @ k.transpose(-2, -1) * DEPTH**-0.5
            blocked = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
            out = scores.masked_fill(blocked, -torch.inf).softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))

    def between(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do what some models do with queries, keys and values."""
        return q, k, v


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, heads: int, groups: int, path: Way) -> None:
        super().__init__()
        self.attn = Attention(heads, groups, path)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.down(F.silu(self.up(x)))


class Transformer(nn.Module):
    """Two blocks, in float64, the same on every rank."""

    def __init__(self, heads: int = 4, groups: int = 4, path: Way = "sdpa") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(heads, groups, path) for _ in range(2))
        generator = torch.Generator().manual_seed(11)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sample() -> Tensor:
    """Return a batch, the same on every rank."""
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def llama_plan(*, kv: bool = True, local: bool = True) -> dict[str, Any]:
    """Return the usual plan for a block: columns of the projections, rows of the output.

    Args:
        kv: Whether keys and values are spread too.
        local: Whether the projections return plain tensors.
    """
    plan: dict[str, Any] = {"attn.q": ColwiseParallel(use_local_output=local), "attn.out": RowwiseParallel()}
    if kv:
        plan |= {f"attn.{side}": ColwiseParallel(use_local_output=local) for side in "kv"}
    return {**plan, "up": ColwiseParallel(), "down": RowwiseParallel()}


def spread(model: Transformer, mesh: DeviceMesh, plan: dict[str, Any] | None = None) -> Transformer:
    """Apply a plan to each block."""
    for block in model.blocks:
        parallelize_module(block, mesh, llama_plan() if plan is None else plan)
    return model


@dataclass
class Watched:
    """What one rank found.

    Attributes:
        records: The statistics by record.
        shards: Number and count of the parts of the heads, and the ranks, by record.
        skipped: What was not measured, with the reason.
        notes: What to know about the records.
        same: Whether output and gradients were the same to the bit as without the probe.
        collectives: How many more collectives there were than without the probe.
    """

    records: dict[str, AttentionStatistics] = field(default_factory=dict)
    shards: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    same: bool = False
    collectives: int = 0


def watched(make: Callable[[], nn.Module], x: Tensor, groups: list[Any] | None = None, twice: bool = False) -> Watched:
    """Run a model without and with a probe.

    Args:
        make: Makes the model.
        x: Its input.
        groups: The process groups whose collectives count.
        twice: Whether to look at a second step, in which only owners of attention are hooked.
    """
    groups = groups or []
    plain, steps = _step(make(), x, groups)
    model = make()
    probe = AttentionProbe(model)
    if twice:
        with probe:
            _step(model, x, groups)
        probe.reset()
        model.zero_grad()
    with probe:
        found, more = _step(model, x, groups)
    collector = probe._collector
    return Watched(
        records=dict(probe.compute()),
        shards={name: (shard.index, shard.count, shard.ranks) for name, shard in collector.head_shards.items()},
        skipped=dict(probe.skipped),
        notes=dict(probe.notes),
        same=len(plain) == len(found) and all(map(torch.equal, plain, found)),
        collectives=more - steps,
    )


def _step(model: nn.Module, x: Tensor, groups: list[Any]) -> tuple[list[Tensor], int]:
    before = sum(map(collectives, groups))
    out = model(x)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [out.detach(), *(local(gradient).clone() for gradient in gradients)], sum(map(collectives, groups)) - before


def collectives(group: Any) -> int:
    """Return how many collectives a group has run."""
    count: int = group._get_sequence_number_for_group()
    return count


def alone(make: Callable[[], nn.Module], x: Tensor) -> dict[str, AttentionStatistics]:
    """Return what one process measures on the whole model."""
    model = make()
    with AttentionProbe(model) as probe:
        model(x).square().sum().backward()
    return dict(probe.compute())


def local(tensor: Any) -> Tensor:
    """Return what a process has of a tensor."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part

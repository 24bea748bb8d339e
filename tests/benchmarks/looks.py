"""An attention that stands alone, and the looks at it that are compared with the fused kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_monitor import crew
from attn_monitor.catalog import ALL, FACTORS, GRADIENTS, HEADLINE
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from attn_monitor.tiles import Tile, TiledCall, multiply_heads, undisturbed
from attn_monitor.workspace import Workspaces
from tests.benchmarks.sizes import SEED, Sizes

FORWARD_SET = frozenset(HEADLINE) - GRADIENTS | frozenset(FACTORS)
FULL_SET = frozenset(HEADLINE) | frozenset(FACTORS)

KERNEL = "SDPA"
FLOOR = "floor"
HEAD = "headline"
EVERYTHING = "all statistics"
BACKWARD = "headline with gradients"
SAMPLED = "the same, max_queries"
Way = Callable[[], "AttentionSums | Tensor"]


@dataclass(frozen=True)
class Case:
    """An attention that stands alone."""

    batch: int
    heads: int
    length: int
    dim: int
    causal: bool

    @property
    def name(self) -> str:
        """A key for JSON."""
        return "-".join(str(part) for part in (self.batch, self.heads, self.length, self.dim, self.causal))

    def rounds(self, rounds: int) -> int:
        """Return how often to measure: as often as asked for at 4 heads and T 2048, at least twice."""
        share = 4 * 2048**2 / (self.batch * self.heads * self.length**2)
        return max(2, math.ceil(rounds * min(share**0.5, 4)))

    def tensors(self) -> list[Tensor]:
        """Return query, key, value and the gradient of the output, standard normal."""
        generator = torch.Generator().manual_seed(SEED)
        shape = self.batch, self.heads, self.length, self.dim
        return [torch.randn(shape, generator=generator) for _ in range(4)]


def cases(sizes: Sizes) -> list[Case]:
    """Return the attention of the training step, then the lengths."""
    model = sizes.model
    shapes = [(model.batch, model.heads, model.context, model.width // model.heads)]
    shapes += [(1, 4, length, sizes.dim) for length in sizes.lengths]
    return [Case(*shape, causal) for shape in shapes for causal in (True, False)]


def is_long(case: Case, sizes: Sizes) -> bool:
    """Tell whether a look at it takes so long that it is measured less."""
    return case.length > sizes.short_length


def ways(case: Case, max_queries: int, spaces: Workspaces | None = None) -> dict[str, Way]:
    """Return what is compared, all on the same tensors.

    Args:
        case: The attention.
        max_queries: How many rows are sampled where they are.
        spaces: Memory that is kept from look to look; without it each look makes its own.
    """
    query, key, value, grad_output = case.tensors()
    call = AttentionCall(query=query, key=key, value=value, scale=case.dim**-0.5, is_causal=case.causal)
    look = partial(attention_sums, call, spaces=spaces)
    return {
        KERNEL: partial(F.scaled_dot_product_attention, query, key, value, is_causal=case.causal),
        FLOOR: partial(floor, call, spaces or Workspaces()),
        HEAD: partial(look, FORWARD_SET),
        EVERYTHING: partial(look, ALL - GRADIENTS),
        BACKWARD: partial(look, FULL_SET, grad_output=grad_output),
        SAMPLED: partial(look, FULL_SET, max_queries, grad_output=grad_output),
    }


def floor(call: AttentionCall, spaces: Workspaces, grad_output: Tensor | None = None) -> Tensor:
    """Do what no exact look can do without, and nothing else: the product and one softmax of every tile.

    Args:
        call: The attention.
        spaces: Memory to compute in.
        grad_output: The gradient of its output: with it the product of that and the values as well.
    """
    tiled = TiledCall.of(call)

    def look(items: slice, heads: slice, part: TiledCall, tile: Tile) -> None:
        work = spaces.at(tiled.device, tiled.dtype)
        logits = part.product(tile, work)
        torch._softmax(logits, -1, False, out=work.second(logits))
        if grad_output is not None and part.call.value is not None:
            multiply_heads(grad_output[items, heads, tile.rows], part.call.value, tile.columns, work)

    with undisturbed(call.query):
        parts = tiled.parts(values=grad_output is not None)
        jobs = (partial(look, items, heads, part, tile) for items, heads, part in parts for tile in part.tiles())
        crew.run(jobs, tiled.workers)
    assert call.query is not None, "a call that is made of query and key"
    return call.query

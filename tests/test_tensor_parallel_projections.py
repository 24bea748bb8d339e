"""Plain parts of projections that are spread: every rank knows its heads, and measures what one process would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from attn_monitor import observe_attention
from attn_monitor.catalog import GRADIENTS
from attn_monitor.tensor_parallel import UNEVEN
from tests.parallel_heads import assert_parts, spread_by, with_between
from tests.parallel_models import (
    Attention,
    Transformer,
    Watched,
    Way,
    alone,
    llama_plan,
    sample,
    watched,
)
from tests.processes import run_ranks

LAYERS = ["blocks.0.attn", "blocks.1.attn"]


def _recipe(rank: int, groups: int, path: Way, twice: bool, kv: bool) -> Watched:
    mesh = init_device_mesh("cpu", (2,))
    make = partial(spread_by, mesh, partial(Transformer, 4, groups, path), llama_plan(kv=kv))
    return watched(make, sample(), [mesh.get_group()], twice)


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
        name: watched(partial(spread_by, mesh, make, plan), sample(), [mesh.get_group()])
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

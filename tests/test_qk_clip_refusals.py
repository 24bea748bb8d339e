"""What QK-Clip must not rescale, what it cannot know, and the reason it gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm

from attn_monitor import observe_attention
from attn_monitor.clip_records import Clipped
from tests.clipping import ABOVE, LLAMA, Block, Clipping, Normalised, block, hidden, library, pretend, tokens
from tests.models import LIGHTNING_ADVICE
from tests.zoo.entry import enliven

pytestmark = LIGHTNING_ADVICE


class Raw(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(self.c_attn.weight.detach().clone())

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple((x @ self.qkv.T).unflatten(-1, (3, 3, 7)).permute(2, 0, 3, 1, 4).unbind(0))


class Cosine(Block):
    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        return F.normalize(q, dim=-1) * 7, F.normalize(k, dim=-1), v


class ShownOnly(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        observe_attention("shown", q, k, v)
        return v


def qwen() -> nn.Module:
    return library("Qwen3", "Model", **LLAMA, num_attention_heads=6, num_key_value_heads=3, head_dim=8)


def lora(trained: bool) -> nn.Module:
    model = peft.get_peft_model(block("chunk")[0], peft.LoraConfig(target_modules=["c_attn"]))
    if trained:
        enliven(model, 1.4)
    return model


def frozen() -> nn.Module:
    model = Block()
    model.c_attn.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model[1].get_submodule("c_attn").weight = model[0].get_submodule("c_attn").weight
    return model


def normed_weight() -> nn.Module:
    model = Block()
    weight_norm(model.c_attn)
    return model


class OneForAll(Block):
    """One small map over each head in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(7, 7), nn.Linear(7, 7)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = x.unflatten(-1, (3, 7))
        return self.q(heads).transpose(1, 2), self.k(heads).transpose(1, 2), heads.transpose(1, 2)


class Reflexive(Block):
    """Queries and keys by one map."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, _, v = super().project(x)
        return q, q, v


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "Qwen3": (
        qwen,
        "layers.0.self_attn",
        "normalised after the projection, so that rescaling the weights does nothing",
    ),
    "QK-norm": (Normalised, "Normalised", "normalised after the projection"),
    "cosine": (Cosine, "Cosine", "normalised after the projection"),
    "LoRA, fresh": (lambda: lora(False), "PeftModel", "with an adapter (LoRA)"),
    "LoRA, trained": (lambda: lora(True), "PeftModel", "with an adapter (LoRA)"),
    "raw parameter": (Raw, "Raw", "made by a parameter without a layer"),
    "frozen": (frozen, "Block", "frozen (requires_grad=False)"),
    "tied": (tied, "0", "shared with another layer"),
    "weight norm": (normed_weight, "Block", "no parameter but computed"),
    "one map for all heads": (OneForAll, "OneForAll", "makes the queries of several heads"),
    "queries are keys": (Reflexive, "Reflexive", "makes its queries and also its keys or values"),
    "shown": (ShownOnly, "shown", "shown by observe_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_must_not_be_rescaled_is_refused_with_a_reason(name: str) -> None:
    build, layer, reason = REFUSED[name]
    model = build()
    clipping = Clipping(model, tokens() if name == "Qwen3" else {"x" if name != "tied" else "input": hidden(21)})
    before = copy.deepcopy(model.state_dict())
    clipped = clipping.clip(layer, {1: ABOVE})
    assert not clipped.heads
    assert reason in clipped.refused[layer]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class KeysAreValues(Block):
    def __init__(self, flash: bool) -> None:
        super().__init__(flash=flash)
        self.c_attn = nn.Linear(21, 42)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k = self.c_attn(x).unflatten(-1, (2, 3, 7)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, k


@pytest.mark.parametrize("flash", [True, False])
def test_keys_that_are_values_too_are_left_alone(flash: bool) -> None:
    clipping = Clipping(KeysAreValues(flash), {"x": hidden(21)})
    weight = clipping.model.c_attn.weight.detach().clone()
    before = clipping.observe()["KeysAreValues"].logit_min
    assert before is not None
    [head] = clipping.clip("KeysAreValues", {1: ABOVE}).heads
    assert head.queries_alone == "its keys may be its values, too"
    weight[7:14] *= 0.25
    assert torch.equal(clipping.model.c_attn.weight, weight)
    after = clipping.observe()["KeysAreValues"].logit_min
    assert after is not None
    assert torch.equal(after, before * torch.tensor([1, 0.25, 1]))


def test_too_few_tokens_tell_nothing() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)[:1, :7]})
    assert "only 7 tokens ran through it" in clipping.clip("Block", {1: ABOVE}).refused["Block"]


def test_a_sample_of_rows_does_not_know_the_largest_logit() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)}, max_queries=5)
    clipped = clipping.clipper.apply(clipping.model, clipping.observe())
    reason = "its largest logit is not known, since only a sample of rows is looked at; set max_queries=None"
    assert clipped == Clipped(refused={"Block": reason})


def test_logits_that_are_not_finite_are_no_reason_to_erase_a_head() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for value in (math.inf, math.nan, -math.inf):
        assert clipping.clip("Block", {1: value}) == Clipped()


def test_a_weight_that_is_gone_or_frozen_later_is_refused_then() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    assert len(clipping.clip("Block", {1: ABOVE}).heads) == 1
    clipping.model.c_attn.requires_grad_(False)
    assert "frozen" in clipping.clip("Block", {1: ABOVE}).refused["Block"]
    clipping.model.c_attn.requires_grad_(True)
    statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
    clipping.model.c_attn.weight = nn.Parameter(torch.empty(0))  # what a sharded layer keeps outside of its forward
    clipped = clipping.clipper.apply(clipping.model, statistics)
    assert "sharded over processes" in clipped.refused["Block"]


def test_a_sharded_weight_is_refused(tmp_path: Path) -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    assert len(clipping.clip("Block", {1: ABOVE}).heads) == 1
    statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(clipping.model.c_attn.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        clipping.model.c_attn.weight = nn.Parameter(sharded)
        clipped = clipping.clipper.apply(clipping.model, statistics)
    finally:
        torch.distributed.destroy_process_group()
    assert clipped.refused["Block"] == "head 1: its weight is a DTensor: sharded over processes, or quantised"

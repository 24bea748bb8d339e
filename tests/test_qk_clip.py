"""QK-Clip against closed forms on real models: which entries change, by how much, and what is left alone."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import transformers
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor, AttentionProbe, observe_attention
from attn_monitor.clip_records import Clipped
from attn_monitor.events import AttentionWarning
from attn_monitor.qk_clip import Clipper, QKClip
from attn_monitor.records import AttentionStatistics
from tests.models import LIGHTNING_ADVICE, quiet
from tests.zoo.entry import enliven, without_dropout

pytestmark = LIGHTNING_ADVICE

BATCH, TOKENS = 3, 11
ABOVE = 400.0  # four times tau, so gamma is 1/4 and its root 1/2: nothing is rounded


class Clipping:
    """A model under a probe, with QK-Clip, whose largest logits a test may choose."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], clip: QKClip | None = None, **watch: Any) -> None:
        self.model, self.inputs = model, inputs
        self.probe = AttentionProbe(model, gradients=False, **watch)
        self.clipper = Clipper(clip or QKClip(), self.probe)

    def observe(self) -> Mapping[str, AttentionStatistics]:
        self.probe.reset()
        with self.probe:
            self.clipper.begin(self.model)
            self.model(**self.inputs)
        self.clipper.end()
        return self.probe.compute()

    def clip(self, layer: str, heads: Mapping[int, float]) -> Clipped:
        """Observe twice as if these heads had these largest logits, the others small ones."""
        for _ in range(2):
            clipped = self.clipper.apply(self.model, pretend(self.observe(), layer, heads))
        return clipped


def pretend(
    statistics: Mapping[str, AttentionStatistics], layer: str, heads: Mapping[int, float]
) -> dict[str, AttentionStatistics]:
    def largest(name: str, heads_there: int) -> Tensor:
        return torch.tensor([heads.get(head, 1.0) if name == layer else 1.0 for head in range(heads_there)])

    return {name: replace(stats, logit_max=largest(name, stats.heads)) for name, stats in statistics.items()}


def hidden(width: int) -> Tensor:
    return torch.randn(BATCH, TOKENS, width, generator=torch.Generator().manual_seed(3))


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 29, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))}


def library(name: str, head: str, implementation: str = "sdpa", **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(vocab_size=29, **sizes)
    model: nn.Module = getattr(transformers, f"{name}{head}")._from_config(config, attn_implementation=implementation)
    enliven(model, 1.4)
    without_dropout(model)
    return model.train()


class Block(nn.Module):
    """Attention of three heads of seven, as nanoGPT has it; `layout` says how the fused output is read."""

    HEADS, DEPTH = 3, 7

    def __init__(self, layout: str = "chunk", flash: bool = True, batch_second: bool = False) -> None:
        super().__init__()
        width = self.HEADS * self.DEPTH
        self.layout, self.flash, self.batch_second = layout, flash, batch_second
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = {"chunk": (3, self.HEADS, self.DEPTH), "by head": (self.HEADS, 3, self.DEPTH)}
        shape["depth first"] = (self.DEPTH, 3, self.HEADS)
        order = {"chunk": (2, 0, 3, 1, 4), "by head": (3, 0, 2, 1, 4), "depth first": (3, 0, 4, 1, 2)}[self.layout]
        return tuple(self.c_attn(x).unflatten(-1, shape[self.layout]).permute(order).unbind(0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -math.inf).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_second:
            x = x.transpose(0, 1)
            q, k, v = (part.permute(2, 1, 0, 3) for part in self.project(x))  # of [Q, B]
            return self.c_proj(self.attend(q, k, v).permute(2, 0, 1, 3).flatten(2)).transpose(0, 1)
        return self.c_proj(self.attend(*self.project(x)).transpose(1, 2).flatten(2))


class Packed(nn.MultiheadAttention):
    def __init__(self, weights: bool = False, **settings: Any) -> None:
        super().__init__(21, 3, batch_first=True, **settings)
        self.weights = weights
        nn.init.normal_(self.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # one argument instead of three
        return super().forward(x, x, x, need_weights=self.weights)[0]


class Across(nn.Module):
    """Keys and values of other sizes, and from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(21, 3, kdim=13, vdim=17)
        nn.init.normal_(self.attend.in_proj_bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attend(x, key=memory[..., :13], value=memory, need_weights=False)[0]


def rows(name: str, *chosen: range, bias: str | None = None) -> dict[str, Any]:
    """Return the rows of a weight, and the entries of its bias."""
    indices = [row for part in chosen for row in part]
    return {f"{name}weight": indices, **({f"{bias or name}bias": indices} if bias != "" else {})}


def part(start: int, head: int, depth: int) -> range:
    return range(start + head * depth, start + (head + 1) * depth)


def packed(weights: bool = False, **settings: Any) -> Case:
    rest = rows("in_proj_", part(0, 1, 7), part(21, 1, 7))
    return Packed(weights, **settings), {"x": hidden(21)}, "Packed", rest, 0.5


def split_packed() -> Case:
    changed = {"attend.q_proj_weight": [*part(0, 1, 7)], "attend.k_proj_weight": [*part(0, 1, 7)]}
    changed["attend.in_proj_bias"] = [*part(0, 1, 7), *part(21, 1, 7)]
    inputs = {"x": hidden(21).transpose(0, 1), "memory": hidden(17)[:, :8].transpose(0, 1)}
    return Across(), inputs, "attend", changed, 0.5


def block(layout: str, **settings: Any) -> Case:
    changed = {
        "chunk": [*part(0, 1, 7), *part(21, 1, 7)],
        "by head": [*range(21, 35)],
        "depth first": [feature * 9 + side * 3 + 1 for feature in range(7) for side in (0, 1)],
    }[layout]
    names = {"c_attn.weight": changed, "c_attn.bias": changed}
    return Block(layout, **settings), {"x": hidden(21)}, "Block", names, 0.5


def gpt2(implementation: str) -> Case:
    model = library("GPT2", "Model", implementation, n_embd=35, n_head=5, n_layer=1)
    columns = [*part(0, 1, 7), *part(35, 1, 7)]
    changed = {"h.0.attn.c_attn.weight": (slice(None), columns), "h.0.attn.c_attn.bias": columns}
    return model, tokens(), "h.0.attn", changed, 0.5


_LLAMA: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 13, "num_hidden_layers": 1}


def llama(implementation: str) -> Case:
    sizes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3}
    model = library("Llama", "Model", implementation, **_LLAMA, **sizes)
    return model, tokens(), "layers.0.self_attn", rows("layers.0.self_attn.q_proj.", part(0, 1, 8), bias=""), 0.25


def llama_without_groups() -> Case:
    model = library("Llama", "Model", **_LLAMA, num_attention_heads=6, num_key_value_heads=6, attention_bias=True)
    name = "layers.0.self_attn."
    changed = {**rows(f"{name}q_proj.", part(0, 1, 8)), **rows(f"{name}k_proj.", part(0, 1, 8))}
    return model, tokens(), "layers.0.self_attn", changed, 0.5


def neox() -> Case:
    model = library("GPTNeoX", "Model", **_LLAMA, num_attention_heads=6)
    changed = rows("layers.0.attention.query_key_value.", range(24, 40))
    return model, tokens(), "layers.0.attention", changed, 0.5


def bert(implementation: str) -> Case:
    model = library("Bert", "Model", implementation, **_LLAMA, num_attention_heads=6)
    name = "encoder.layer.0.attention.self."
    changed = {**rows(f"{name}query.", part(0, 1, 8)), **rows(f"{name}key.", part(0, 1, 8))}
    return model, tokens(), name[:-1], changed, 0.5


def latent() -> Case:
    """Multi-head latent attention: the rotary part of the keys is shared by all heads."""
    sizes: dict[str, Any] = {
        "q_lora_rank": 11,
        "kv_lora_rank": 13,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    }
    more: dict[str, Any] = {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    model = library("DeepseekV3", "Model", **_LLAMA, **sizes, **more, n_group=1, topk_group=1, first_k_dense_replace=1)
    return model, tokens(), "layers.0.self_attn", rows("layers.0.self_attn.q_b_proj.", part(0, 1, 11), bias=""), 0.25


Case = tuple[nn.Module, dict[str, Any], str, dict[str, Any], float]
"""A model, its inputs, the record, which entries of which parameters make head 1, and by what they are multiplied."""
CASES: dict[str, Callable[[], Case]] = {
    "MultiheadAttention": packed,
    "MultiheadAttention, eager": lambda: packed(weights=True),
    "MultiheadAttention, other sizes": split_packed,
    "GPT-2, eager": lambda: gpt2("eager"),
    "GPT-2, sdpa": lambda: gpt2("sdpa"),
    "Llama, grouped, eager": lambda: llama("eager"),
    "Llama, grouped, sdpa": lambda: llama("sdpa"),
    "Llama, biases": llama_without_groups,
    "GPT-NeoX": neox,
    "BERT, eager": lambda: bert("eager"),
    "BERT, sdpa": lambda: bert("sdpa"),
    "nanoGPT": lambda: block("chunk", flash=False),
    "nanoGPT, flash": lambda: block("chunk"),
    "interleaved": lambda: block("by head"),
    "depth first": lambda: block("depth first"),
    "batch second": lambda: block("by head", batch_second=True),
    "latent": latent,
}


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_the_clipped_head_are_gamma_times_and_nothing_else_changes(name: str) -> None:
    model, inputs, layer, changed, factor = CASES[name]()
    clipping = Clipping(model, inputs)
    before = clipping.observe()[layer]
    expected = {key: value.detach().clone() for key, value in model.state_dict().items()}
    for key, index in changed.items():
        expected[key][index] *= factor

    [head] = clipping.clip(layer, {1: ABOVE}).heads
    assert (head.layer, head.head, head.logit_max, head.gamma) == (layer, 1, ABOVE, 0.25)
    assert (factor == 0.25) == bool(head.queries_alone)

    after = clipping.observe()[layer]
    gamma = torch.ones(before.heads)
    gamma[1] = 0.25
    for statistic in ("logit_max", "logit_min", "qk_std", "scale"):
        old, new = getattr(before, statistic), getattr(after, statistic)
        assert torch.equal(new, old if statistic == "scale" else old * gamma), statistic
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_half_precision_is_told_apart_too() -> None:
    model, inputs, layer, changed, _ = llama_without_groups()
    clipping = Clipping(model.bfloat16(), inputs)
    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
    [head] = clipping.clip(layer, {1: ABOVE}).heads
    assert not head.queries_alone
    for key, value in model.state_dict().items():
        if key in changed:
            before[key][changed[key]] *= 0.5
        assert torch.equal(value, before[key]), key


def test_every_head_gets_its_own_factor_and_alpha_shares_it() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)}, QKClip(tau=50.0, alpha=0.25))
    weight = clipping.model.c_attn.weight.detach().clone()
    clipped = clipping.clip("Block", {0: 800.0, 2: 60.0})
    assert [(head.head, head.gamma) for head in clipped.heads] == [(0, 1 / 16), (2, 50 / 60)]
    factors = torch.ones(63, 1)
    factors[0:7], factors[21:28] = 0.5, 0.125
    factors[14:21], factors[35:42] = (5 / 6) ** 0.25, (5 / 6) ** 0.75
    assert torch.allclose(clipping.model.c_attn.weight, weight * factors, rtol=1e-6)


# -- refused -------------------------------------------------------------------------------------------------------


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


class Normalised(Block):
    """As the example has it, after moving the heads to the front."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(7), nn.RMSNorm(7)
        nn.init.normal_(self.q_norm.weight)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class ShownOnly(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        observe_attention("shown", q, k, v)
        return v


def qwen() -> nn.Module:
    return library("Qwen3", "Model", **_LLAMA, num_attention_heads=6, num_key_value_heads=3, head_dim=8)


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


# -- over the steps -------------------------------------------------------------------------------------------------


def test_the_weights_are_looked_for_in_the_observed_step_after_the_first_head_above_tau() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for heads, expected in (({}, ()), ({1: ABOVE}, ("Block",)), ({}, ()), ({2: ABOVE}, ())):
        clipped = clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Block", heads))
        assert clipped.waiting == expected
    assert [head.head for head in clipped.heads] == [2]


def test_nothing_is_left_on_the_model_and_copies_are_clean() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Block", {1: ABOVE}))
    with clipping.probe:
        clipping.clipper.begin(clipping.model)
        twin = copy.deepcopy(clipping.model)
        with pytest.raises(RuntimeError):
            clipping.model(torch.zeros(2, 3))
    twin(**clipping.inputs)
    assert not clipping.clipper._finder._outputs or twin.c_attn not in clipping.clipper._finder._outputs
    clipping.clipper.end()
    clipping.clipper.end()
    for module in clipping.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert clipping.clipper._finder._outputs == {}


def test_weights_that_are_put_back_are_noticed() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    weights = copy.deepcopy(clipping.model.state_dict())
    told = []
    for _ in range(9):
        clipped = clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Block", {1: ABOVE}))
        told.append((len(clipped.heads), clipped.notes.get("Block", "")))
        clipping.model.load_state_dict(weights)  # as an optimizer does that keeps its own copy
    assert [count for count, _ in told] == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [bool(text) for _, text in told] == [False] * 4 + [True] * 5
    assert "head 1 was rescaled several times, and each time its logits were soon as large again" in told[-1][1]


def test_processes_do_alike() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    asked: list[bool] = []

    def only_here(known: bool) -> bool:
        asked.append(known)
        return len(asked) < 3  # all processes are well; then one of them knows nothing of the weights

    for _ in range(2):
        statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
        clipped = clipping.clipper.apply(clipping.model, statistics, agree=only_here)
    assert clipped.refused == {"Block": "head 1: its weights were not found alike on every process"}
    assert asked == [True] * 4  # twice whether it goes on, then whether queries, and keys, of the head are known


def test_processes_stop_alike() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for agreed in (True, False):
        statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
        clipped = clipping.clipper.apply(clipping.model, statistics, agree=[lambda _: False, lambda _: True][agreed])
    assert clipped == Clipped(refused={"Block": "QK-Clip failed on another process"})


def test_heads_that_are_spread_over_processes_are_left_alone() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for _ in range(2):
        own = pretend(clipping.observe(), "Block", {1: ABOVE})["Block"]
        both = replace(own, logit_max=torch.tensor([1.0, ABOVE, 1, 1, 1, 1]), rows=own.rows.repeat(2), q_rms=None)
        clipped = clipping.clipper.apply(clipping.model, {"Block": both})
    assert "other heads than the statistics tell of" in clipped.refused["Block"]


def test_one_of_several_processes_does_nothing_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_monitor.qk_clip._processes", lambda: 2)
    clipping = Clipping(Block(), {"x": hidden(21)})
    clipped = clipping.clip("Block", {1: ABOVE})
    reason = "several processes train this model, and nothing makes sure that they rescale alike"
    assert clipped == Clipped(refused={"Block": reason})


@pytest.mark.usefixtures("visible_operations")
def test_looking_for_the_weights_waits_for_nothing_in_the_forward_pass() -> None:
    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "equal"}, func
            return func(*args, **(kwargs or {}))

    clipping = Clipping(Block(flash=False), {"x": hidden(21)})
    statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
    assert clipping.clipper.apply(clipping.model, statistics).waiting == ("Block",)
    with clipping.probe:
        clipping.clipper.begin(clipping.model)
        with NoSync():  # type: ignore[no-untyped-call] # torch has no hints for it
            clipping.model(**clipping.inputs)
    assert [head.head for head in clipping.clipper.apply(clipping.model, statistics).heads] == [1]


def test_calls_of_one_module_are_one_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    clipping = Clipping(Twice(), {"x": hidden(21)}, per_call=True)
    for _ in range(2):
        statistics = pretend(clipping.observe(), "block@1", {1: ABOVE})
        assert list(statistics) == ["block@0", "block@1"]
        clipped = clipping.clipper.apply(clipping.model, statistics)
    assert [(head.layer, head.head, head.logit_max) for head in clipped.heads] == [("block", 1, ABOVE)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_found(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return out

    clipping = Clipping(Saving(), {"x": hidden(21).requires_grad_()})
    assert [head.head for head in clipping.clip("block", {1: ABOVE}).heads] == [1]


def test_autocast_is_told_apart() -> None:
    class Autocast(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    clipping = Clipping(Autocast(), {"x": hidden(21)})
    [head] = clipping.clip("Autocast", {1: ABOVE}).heads
    assert not head.queries_alone


def test_a_compiled_model_is_clipped_in_its_eager_steps() -> None:
    clipping = Clipping(torch.compile(Block(), backend="eager"), {"x": hidden(21)})
    [head] = clipping.clip("Block", {1: ABOVE}).heads
    assert (head.head, head.queries_alone) == (1, "")


def test_an_error_of_ours_ends_the_clipping_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    before = copy.deepcopy(clipping.model.state_dict())
    clipping.clip("Block", {})

    def broken(*_: Any) -> None:
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(clipping.clipper._finder, "begin", broken)
    clipped = clipping.clip("Block", {1: ABOVE})
    assert clipped.refused == {"Block": "QK-Clip failed and is off from now on: RuntimeError: no hooks today"}
    assert all(torch.equal(value, before[key]) for key, value in clipping.model.state_dict().items())


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tau": 0}, ValueError, "`tau` expects a positive finite number, got 0"),
        ({"tau": math.inf}, ValueError, "`tau` expects a positive finite number, got inf"),
        ({"tau": "100"}, TypeError, "`tau` expects a number, got '100' of type str"),
        ({"alpha": True}, TypeError, "`alpha` expects a number, got True of type bool"),
        ({"alpha": 1.5}, ValueError, r"`alpha` expects a share in \[0, 1\], got 1.5"),
        ({"alpha": math.nan}, ValueError, "`alpha` expects a share"),
    ],
)
def test_wrong_settings_fail_at_once(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QKClip(**settings)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_two_factors_make_gamma(alpha: float) -> None:
    query, key = QKClip(tau=100.0, alpha=alpha).factors(250.0)
    assert query * key == pytest.approx(0.4)
    assert math.log(query) == pytest.approx(alpha * math.log(0.4))


def test_what_is_needed_and_how_it_is_shown() -> None:
    assert QKClip().requires == {"logit_max"}
    assert repr(QKClip(alpha=0.25)) == "QKClip(tau=100.0, alpha=0.25)"


# -- in a training --------------------------------------------------------------------------------------------------


class Unscaled(pl.LightningModule):
    """One attention without its scale, trained so fast that its logits run away."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.block = kind()
        self.block.attend = partial(F.scaled_dot_product_attention, scale=1.0)  # type: ignore[method-assign] # no subclass
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        [x] = batch
        loss = F.mse_loss(self.block(x), x.roll(1, dims=1))  # each token is to find the one before
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Watching(AttentionMonitor):
    """The monitor with QK-Clip, which keeps what was done."""

    def __init__(self, clip: QKClip, **settings: Any) -> None:
        super().__init__(mitigation=clip, **settings)
        self.clipped: list[Clipped] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        assert self._clipper is not None
        apply = self._clipper.apply

        def kept(*args: Any, **kwargs: Any) -> Clipped:
            self.clipped.append(apply(*args, **kwargs))
            return self.clipped[-1]

        self._clipper.apply = kept  # type: ignore[method-assign] # of this one clipper

    @property
    def largest(self) -> list[float]:
        found = (statistics.logit_max for _, layers in self.history for statistics in layers.values())
        return [float(logits.max()) for logits in found if logits is not None]


STEPS = 40


def fit(callback: Any = None, kind: type[Block] = Block, accumulate: int = 1) -> Unscaled:
    model = Unscaled(kind)
    settings = {"accumulate_grad_batches": accumulate, "callbacks": [callback] if callback else []}
    quiet(**settings).fit(model, DataLoader(TensorDataset(hidden(21).repeat(STEPS, 1, 1)), batch_size=BATCH))
    return model


SATURATED = pytest.mark.filterwarnings("ignore::attn_monitor.events.AttentionWarning")


@SATURATED
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_runs_away_stays_about_tau_with_clipping_and_does_not_without(accumulate: int) -> None:
    free, held = Watching(QKClip(tau=1e9)), Watching(QKClip(tau=30.0))
    fit(free, accumulate=accumulate)
    fit(held, accumulate=accumulate)
    assert max(free.largest) > 70
    first = next(number for number, clipped in enumerate(held.clipped) if clipped.heads)
    assert held.largest[: first + 1] == free.largest[: first + 1]
    assert max(held.largest[first + 1 :]) < 36
    assert sum(len(clipped.heads) for clipped in held.clipped) > 10
    assert not any(clipped.refused for clipped in held.clipped)
    assert not any(clipped.heads or clipped.waiting for clipped in free.clipped)


@SATURATED
@pytest.mark.parametrize(("kind", "tau"), [(Block, 1e9), (Normalised, 0.01)])
def test_where_nothing_is_rescaled_the_training_is_the_same_to_the_bit(kind: type[Block], tau: float) -> None:
    plain, clipping = fit(kind=kind), Watching(QKClip(tau=tau))
    watched = fit(clipping, kind=kind)
    assert torch.equal(torch.stack(plain.losses), torch.stack(watched.losses))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert any(clipped.refused for clipped in clipping.clipped) == (tau < 1)


@SATURATED
def test_the_monitor_logs_how_many_heads_it_rescaled_and_says_what_it_refused() -> None:
    seen: list[float] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics["attn_monitor/clipped_heads"]))

    clipping = Watching(QKClip(tau=30.0), every_n_steps=1)
    model = Unscaled()
    data = DataLoader(TensorDataset(hidden(21).repeat(STEPS, 1, 1)), batch_size=BATCH)
    quiet(callbacks=[clipping, Look()]).fit(model, data)
    assert seen == [len(clipped.heads) for clipped in clipping.clipped]
    assert sum(seen) > 0

    with pytest.warns(AttentionWarning, match=r"QK-Clip: .*block head \d \(largest logit [\d.]+ > 30, weights times 0"):
        fit(AttentionMonitor(mitigation=QKClip(tau=30.0)))
    with pytest.warns(AttentionWarning, match=r"QK-Clip leaves alone: block \(.*normalised"):
        fit(AttentionMonitor(mitigation=QKClip(tau=0.01)), kind=Normalised)


def test_the_monitor_looks_for_weights_in_the_very_next_step() -> None:
    """The clip comes one step after the look, not one interval."""
    monitor = AttentionMonitor(mitigation=QKClip(tau=0.5), every_n_steps=20, adaptive_steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        fit(monitor)
    assert [step for step, _ in monitor.history][:3] == [0, 1, 19]


def test_wrong_mitigations_fail_at_once() -> None:
    with pytest.raises(TypeError, match=r"`mitigation` expects a QKClip or None, got 100"):
        AttentionMonitor(mitigation=100)  # type: ignore[arg-type] # as a user would
    with pytest.raises(ValueError, match="`mitigation` needs the largest logit, which `max_queries` does not give"):
        AttentionMonitor(mitigation=QKClip(), max_queries=7)

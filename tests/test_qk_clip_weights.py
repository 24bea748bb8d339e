"""QK-Clip against closed forms on real models: which entries change, and by how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor.qk_clip import QKClip
from tests.clipping import ABOVE, LLAMA, Block, Case, Clipping, Packed, block, hidden, library, part, tokens
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE


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


def packed(weights: bool = False, **settings: Any) -> Case:
    rest = rows("in_proj_", part(0, 1, 7), part(21, 1, 7))
    return Packed(weights, **settings), {"x": hidden(21)}, "Packed", rest, 0.5


def split_packed() -> Case:
    changed = {"attend.q_proj_weight": [*part(0, 1, 7)], "attend.k_proj_weight": [*part(0, 1, 7)]}
    changed["attend.in_proj_bias"] = [*part(0, 1, 7), *part(21, 1, 7)]
    inputs = {"x": hidden(21).transpose(0, 1), "memory": hidden(17)[:, :8].transpose(0, 1)}
    return Across(), inputs, "attend", changed, 0.5


def gpt2(implementation: str) -> Case:
    model = library("GPT2", "Model", implementation, n_embd=35, n_head=5, n_layer=1)
    columns = [*part(0, 1, 7), *part(35, 1, 7)]
    changed = {"h.0.attn.c_attn.weight": (slice(None), columns), "h.0.attn.c_attn.bias": columns}
    return model, tokens(), "h.0.attn", changed, 0.5


def llama(implementation: str) -> Case:
    sizes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3}
    model = library("Llama", "Model", implementation, **LLAMA, **sizes)
    return model, tokens(), "layers.0.self_attn", rows("layers.0.self_attn.q_proj.", part(0, 1, 8), bias=""), 0.25


def llama_without_groups() -> Case:
    model = library("Llama", "Model", **LLAMA, num_attention_heads=6, num_key_value_heads=6, attention_bias=True)
    name = "layers.0.self_attn."
    changed = {**rows(f"{name}q_proj.", part(0, 1, 8)), **rows(f"{name}k_proj.", part(0, 1, 8))}
    return model, tokens(), "layers.0.self_attn", changed, 0.5


def neox() -> Case:
    model = library("GPTNeoX", "Model", **LLAMA, num_attention_heads=6)
    changed = rows("layers.0.attention.query_key_value.", range(24, 40))
    return model, tokens(), "layers.0.attention", changed, 0.5


def bert(implementation: str) -> Case:
    model = library("Bert", "Model", implementation, **LLAMA, num_attention_heads=6)
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
    model = library("DeepseekV3", "Model", **LLAMA, **sizes, **more, n_group=1, topk_group=1, first_k_dense_replace=1)
    return model, tokens(), "layers.0.self_attn", rows("layers.0.self_attn.q_b_proj.", part(0, 1, 11), bias=""), 0.25


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

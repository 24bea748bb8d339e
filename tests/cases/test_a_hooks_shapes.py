"""A: grouped queries, other lengths and widths, generation with a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from attn_monitor import AttentionMonitor
from tests.cases.support import Trained, close, collect, fit, normal, only, serve, value
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference

pytestmark = LIGHTNING_ADVICE


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 31,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def test_a06_nothing_depends_on_output_attentions() -> None:
    model = tiny_llama()
    ids = torch.arange(10).reshape(2, 5)
    assert not model(ids, output_attentions=True).attentions  # the trap: the default kernel has none
    fused = collect(model, lambda: model(ids).logits.square().sum().backward())
    assert list(fused) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    model.set_attn_implementation("eager")
    eager = collect(model, lambda: model(ids).logits.square().sum().backward())
    assert list(eager) == list(fused)
    for layer, stats in fused.items():
        close(stats, eager[layer], relative=1e-4)


def test_a20_grouped_queries_and_a_free_head_dimension() -> None:
    model = tiny_llama(num_hidden_layers=1)
    ids = torch.arange(14).reshape(2, 7)
    stats = collect(model, lambda: model(ids).logits.square().mean().backward())["model.layers.0.self_attn"]
    assert (stats.heads, stats.head_dim, stats.keys) == (4, 32, 7)
    assert value(stats, "scale").tolist() == pytest.approx([32**-0.5] * 4)
    assert value(stats, "scale_ratio").tolist() == pytest.approx([1.0] * 4)
    assert value(stats, "grad_logits_norm").min() > 0

    taken: list[tuple[Tensor, Tensor]] = []

    def spy(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        taken.append((query.detach(), key.detach()))
        return original(query, key, *args, **kwargs)

    original = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        model(ids)
    ((query, key),) = taken
    assert_matches(stats, attention_reference(query, key, is_causal=True))


@pytest.mark.parametrize("layout", ["sequence first", "batch first", "unbatched"])
def test_a21_cross_attention_of_other_lengths_and_widths(layout: str) -> None:
    mha = nn.MultiheadAttention(
        16, 4, kdim=24, vdim=12, batch_first=layout == "batch first", add_zero_attn=True, add_bias_kv=True
    )
    query, key, val = normal(2, 5, 16), normal(2, 9, 24), normal(2, 9, 12)
    if layout == "unbatched":
        query, key, val = query[:1], key[:1], val[:1]
        given = (query[0], key[0], val[0])
    elif layout == "sequence first":
        given = (query.transpose(0, 1), key.transpose(0, 1), val.transpose(0, 1))
    else:
        given = (query, key, val)
    stats = only(collect(mha, lambda: mha(*given)[0].square().sum().backward()))
    assert (stats.keys, stats.heads, stats.head_dim) == (11, 4, 4)

    assert mha.q_proj_weight is not None
    assert mha.k_proj_weight is not None
    assert mha.bias_k is not None
    biases = mha.in_proj_bias.chunk(3)
    keys = F.linear(key, mha.k_proj_weight, biases[1])
    extra = [mha.bias_k.expand(len(keys), 1, 16), torch.zeros(len(keys), 1, 16)]
    q, k = F.linear(query, mha.q_proj_weight, biases[0]), torch.cat([keys, *extra], dim=1)
    q, k = (part.detach().unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k))
    assert_matches(stats, attention_reference(q, k))
    assert value(stats, "grad_logits_norm").min() > 0


class Generating(Trained):
    """Generates text, with a cache, in every validation step."""

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0], labels=batch[0]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        model: Any = self.net
        out = model.generate(batch[0], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
        assert out.shape == (1, 10)


def test_a22_generation_in_validation_stays_out_of_the_training_numbers() -> None:
    torch.manual_seed(4)
    ids = torch.randint(1, 31, (3, 7))
    twins = [tiny_llama(num_hidden_layers=1)]
    twins.append(copy.deepcopy(twins[0]))
    plain, validated = AttentionMonitor(), AttentionMonitor()
    fit(Generating(twins[0]), plain, serve(ids))
    trainer, _ = fit(Generating(twins[1]), validated, serve(ids), serve(ids[:2]), val_check_interval=1)
    for (_, one), (_, other) in zip(plain.history, validated.history, strict=True):
        close(one["net.model.layers.0.self_attn"], other["net.model.layers.0.self_attn"], relative=0, absolute=0)
    assert not any("attn" in key for key in trainer.callback_metrics if key.startswith("val_"))
    assert validated.evaluations == {}


def test_a22_steps_with_a_cache_are_pooled_row_by_row_where_one_asks_for_validation() -> None:
    torch.manual_seed(4)
    ids = torch.randint(1, 31, (1, 7))
    model = tiny_llama(num_hidden_layers=1, num_key_value_heads=4)
    monitor = AttentionMonitor(stages=("validate",))
    fit(Generating(model), monitor, serve(ids), serve(ids))
    stats = monitor.evaluations["validate"]["net.model.layers.0.self_attn"]
    assert (stats.calls, stats.keys) == (3, 9)  # 7 queries, then one over 8 and one over 9 keys
    assert stats.rows.tolist() == [9] * 4

    # Pooled by rows it is one causal pass over the text as generated, for that is what a cache computes.
    written: Any = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    again = collect(model, lambda: model(written[:, :-1]), gradients=False)["model.layers.0.self_attn"]
    for name in ("logit_std", "logit_row_std", "entropy_normalized", "jacobian_trace", "logit_max"):
        torch.testing.assert_close(value(stats, name), value(again, name), rtol=1e-5, atol=1e-6)

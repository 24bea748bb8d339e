"""B: softcap, wrong scales and missing ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, T5Config, T5EncoderModel
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.t5 import modeling_t5

from attn_monitor import SaturationRule
from attn_monitor.audit import scale_findings
from attn_monitor.functional import attention_statistics
from tests.cases.numerics import Shown, audit_of, events_of, saturated, spy_on
from tests.cases.support import (
    Core,
    SelfAttention,
    collect,
    normal,
    only,
    value,
)
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference

pytestmark = LIGHTNING_ADVICE
RULE = SaturationRule()


def test_b03_a_softcap_does_not_hide_what_is_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Gemma2Config(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        use_cache=False,
    )
    seen = spy_on(monkeypatch, modeling_gemma2)
    model: Any = Gemma2ForCausalLM(config)
    model.set_attn_implementation("eager")
    projection: Any = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        projection.weight *= 1e5
    ids = torch.arange(14).reshape(2, 7)
    stats = only(collect(model, lambda: model(ids).logits.square().mean().backward()))
    (call,) = seen
    assert call["softcap"] == 50.0
    wanted = attention_reference(
        call["query"], call["key"], masks=[torch.ones(7, 7, dtype=torch.bool).tril()], scale=1 / 16, softcap=50.0
    )
    assert_matches(stats, wanted, relative=1e-4, absolute=1e-4)
    assert value(stats, "logit_max").max() <= 50 * (1 + 1e-5)
    assert value(stats, "qk_std").min() > 5 * math.sqrt(16)
    assert value(stats, "qk_std").min() > 2 * value(stats, "logit_std").max()
    assert value(stats, "scale").tolist() == pytest.approx([1 / 16] * 2)
    assert all(saturated(stats))


KEYS = 256


@pytest.mark.parametrize(
    ("scale", "ratio", "flat", "named"),
    [
        (1 / 8, 1.0, (0.89, 0.93), ""),
        (1.0, 8.0, (0.10, 0.16), "the scale 1/sqrt(d_k) is missing"),
        (1 / 64, 0.125, (0.998, 1.0), "1/d_k stands in place of 1/sqrt(d_k), or the scale is applied twice"),
        (8.0, 64.0, (0.0, 0.02), "sqrt(d_k) stands in place of 1/sqrt(d_k)"),
    ],
    ids=["right", "missing", "twice", "inverted"],
)
def test_b04_a_wrong_scale_shows_and_is_named(
    scale: float, ratio: float, flat: tuple[float, float], named: str
) -> None:
    qkv = normal(3, 2, KEYS, 64)
    stats = attention_statistics(*qkv[:, None], scale=scale)
    model = Core(scale)
    seen = only(collect(model, lambda: model(*qkv[:, None])))
    for record in (stats, seen):
        assert value(record, "scale_ratio").tolist() == pytest.approx([ratio] * 2)
        assert (
            flat[0] < value(record, "entropy_normalized").min() <= value(record, "entropy_normalized").max() < flat[1]
        )
    assert value(seen, "logit_std").tolist() == pytest.approx([8 * scale] * 2, rel=0.02)
    found = events_of(Core(scale), qkv)
    assert [event.cause for event in found] == ([f"likely cause: {named}"] * 2 if ratio > 1 else [])
    told = f"scale audit: scale * sqrt(d_k=64) is {ratio:.3g}, {named}, in net.core"
    assert audit_of(Shown(Core(scale)), qkv[None]) == ([told] if named else [])


def test_b05_dividing_by_the_root_of_the_model_width_shows_in_the_scale() -> None:
    model = SelfAttention(512, 8, Core(512**-0.5))
    with torch.no_grad():
        model.qkv.weight.copy_(torch.cat([torch.eye(512)] * 3).roll(7, 1))
        model.qkv.bias.zero_()
    stats = only(collect(model, lambda: model(normal(2, 40, 512))))
    assert (stats.head_dim, stats.heads) == (64, 8)
    assert value(stats, "scale").tolist() == pytest.approx([512**-0.5] * 8)
    assert value(stats, "scale_ratio").tolist() == pytest.approx([0.354] * 8, abs=0.02)
    assert value(stats, "scale_ratio").max() < 0.8  # below the safe range
    assert not any(saturated(stats))
    told = "1/sqrt(d_model) stands in place of 1/sqrt(d_k) of 8 heads"
    assert audit_of(model, normal(2, 40, 512)) == [f"scale audit: scale * sqrt(d_k=64) is 0.354, {told}, in net.core"]
    assert audit_of(SelfAttention(512, 8, Core(64**-0.5)), normal(2, 40, 512)) == []


def test_b06_a_scale_that_is_split_over_query_and_key_is_the_right_one() -> None:
    class Split(Core):
        def logits(self, q: Tensor, k: Tensor) -> Tensor:
            root = q.shape[-1] ** -0.25
            return (q * root) @ (k * root).mT

    qkv = normal(3, 2, 40, 64)
    model = Split()
    stats = only(collect(model, lambda: model(*qkv[:, None])))
    assert value(stats, "scale_ratio").tolist() == pytest.approx([1.0] * 2)
    assert_matches(stats, attention_reference(qkv[:1], qkv[1:2]))  # q_rms and k_rms without the factors
    assert events_of(Split(), qkv) == []


@pytest.mark.skipif(
    not hasattr(modeling_t5, "eager_attention_forward"), reason="this T5 calls no function for its attention to spy on"
)
def test_b07_attention_without_a_scale_by_design_alarms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    config = T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=2, vocab_size=50, d_ff=32)
    seen = spy_on(monkeypatch, modeling_t5)
    model: Any = T5EncoderModel(config)
    model.eval().set_attn_implementation("eager")
    ids = torch.arange(1, 15).reshape(2, 7)
    padding = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    found = collect(model, lambda: model(ids, attention_mask=padding))
    assert len(seen) == len(found) == 2
    for call, stats in zip(seen, found.values(), strict=True):
        bias, allowed = call["position_bias"].detach(), padding.bool()[:, None, None]
        assert bias.abs().max() > 0
        wanted = attention_reference(call["query"], call["key"], masks=[bias, allowed], scale=1.0)
        assert_matches(stats, wanted)  # the bias is part of the logits, the padding is not
        assert value(stats, "scale").tolist() == [1.0] * 4
        assert value(stats, "scale_ratio").tolist() == pytest.approx([math.sqrt(8)] * 4)
        assert value(stats, "logit_std").max() < 5
        assert not any(saturated(stats))
    assert scale_findings(found, RULE) == []  # nor does the audit of the first step say a word


def test_b08_normalised_queries_and_keys_without_a_scale_are_saturated() -> None:
    query, key = (F.rms_norm(normal(1, 4, 128, 256, seed=seed), (256,)) for seed in (1, 2))
    hot, healthy = attention_statistics(query, key, scale=1.0), attention_statistics(query, key, scale=1 / 16)
    assert 15 < value(hot, "logit_std").min() <= value(hot, "logit_std").max() < 17
    assert 0.9 < value(healthy, "logit_std").min() <= value(healthy, "logit_std").max() < 1.1
    assert saturated(hot) == [True] * 4
    assert saturated(healthy) == [False] * 4
    assert RULE.ratio(hot).tolist() == pytest.approx([1.0] * 4, rel=0.05)
    assert value(hot, "jacobian_trace").max() < 0.25 < 0.9 < value(healthy, "jacobian_trace").min()

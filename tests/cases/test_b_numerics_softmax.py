"""B: masks, sinks, one-hot rows, and softmaxes that are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss

from attn_monitor import AttentionMonitor, AttentionProbe, observe_logits
from attn_monitor.functional import softmax_statistics
from tests.cases.numerics import saturated, spy_on
from tests.cases.support import (
    Core,
    SelfAttention,
    Trained,
    collect,
    entropy,
    fit,
    normal,
    only,
    serve,
    value,
)
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference

pytestmark = LIGHTNING_ADVICE


class Padded(nn.Module):
    """Causal attention with a key mask that fills with -inf, so that padded queries give nan."""

    def __init__(self, padding: Tensor, fused: bool) -> None:
        super().__init__()
        self.attn = nn.Linear(12, 36)
        self.padding, self.fused = padding, fused

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (2, 6)).transpose(1, 2) for part in self.attn(x).chunk(3, -1)]

    def mask(self) -> Tensor:
        length = self.padding.shape[-1]
        return self.padding[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask())
        return (q @ k.mT / math.sqrt(6)).masked_fill(~self.mask(), -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_b02_padded_queries_are_counted_apart_and_alarm_nobody(fused: bool) -> None:
    padding = torch.tensor([[1] * 6, [0] * 4 + [1] * 2]).bool()
    model, x = Padded(padding, fused), normal(2, 6, 12)
    if not fused:
        assert model(x)[1, :, :4].isnan().all()  # the trap
    stats = only(collect(model, lambda: model(x)))
    assert stats.rows.tolist() == [6 + 2] * 2
    assert stats.masked_rows.tolist() == [4] * 2
    assert stats.nonfinite.tolist() == [0, 0]
    q, k, _ = (part.detach() for part in model.split(x))
    assert_matches(stats, attention_reference(q, k, masks=[model.mask()]))

    logits = (q @ k.mT / math.sqrt(6)).double().masked_fill(~model.mask(), -math.inf)
    valid = model.mask().sum(-1) >= 2
    rows = entropy(logits.softmax(-1))[valid.expand(2, 2, 6)].unflatten(0, (-1,))
    assert value(stats, "entropy").mean().item() == pytest.approx(rows.mean().item(), abs=1e-5)

    monitor = AttentionMonitor()
    fit(Trained(nn.Sequential(model, _Finite())), monitor, serve(x, 2))
    assert len(monitor.history) == 1
    assert monitor.events == []


class _Finite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num()


def test_b13_a_softmax_over_the_queries_is_measured_along_that_axis() -> None:
    class Wrong(Core):
        def probs(self, logits: Tensor) -> Tensor:
            return logits.softmax(-2)

    query, key = normal(2, 3, 5, 11, seed=1), normal(2, 3, 7, 11, seed=2)
    model = Wrong()
    rows = model.probs(model.logits(query, key)).sum(-1)
    assert (rows - 1).abs().max() > 0.1  # the trap: the rows do not sum to 1
    stats = only(collect(model, lambda: model(query, key, key)))
    assert stats.keys == 5  # what the softmax runs over, where a right one has 7
    assert stats.rows.tolist() == [2 * 7] * 3
    assert_matches(stats, attention_reference(key, query), names=["entropy", "logit_std", "logit_row_std", "logit_max"])


def test_b14_a_learned_sink_is_one_more_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sinking(Core):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.sink = nn.Parameter(torch.tensor([3.0, 4.0, 5.0])[:heads])

        def probs(self, logits: Tensor) -> Tensor:
            sink = self.sink[None, :, None, None].expand(len(logits), -1, logits.shape[2], -1)
            return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]

    query, key = normal(2, 3, 5, 11, seed=1), normal(2, 3, 7, 11, seed=2)
    model = Sinking(3)
    rows = model.probs(model.logits(query, key)).sum(-1)
    assert rows.max() < 0.9  # rightly so
    with AttentionProbe(model) as probe, torch.no_grad():
        model(query, key, key)
    assert not probe.notes
    assert not probe.skipped
    stats = only(probe.compute())
    assert_matches(stats, attention_reference(query, key, sinks=model.sink.detach()))
    assert 0 < value(stats, "sink_mass").min() <= value(stats, "sink_mass").max() < 1
    assert value(stats, "entropy").max() <= math.log(7 + 1)


def test_b14_the_sinks_of_a_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GptOssConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        use_cache=False,
    )
    seen = spy_on(monkeypatch, modeling_gpt_oss)
    model: Any = GptOssForCausalLM(config)
    model.eval().set_attn_implementation("eager")
    attention: Any = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    stats = only(collect(model, lambda: model(torch.arange(14).reshape(2, 7))))
    (call,) = seen
    wanted = attention_reference(
        call["query"],
        call["key"],
        masks=[torch.ones(7, 7, dtype=torch.bool).tril()],
        scale=call["scaling"],
        sinks=attention.sinks.detach(),
    )
    names = ["entropy", "entropy_normalized", "max_probability", "sink_mass", "jacobian_trace", "logit_row_std"]
    assert_matches(stats, wanted, names=names)


def test_b15_mass_on_the_first_token_is_no_collapse() -> None:
    logits = 0.1 * normal(1, 2, 16, 16)
    logits[..., 0] += 6
    stats = softmax_statistics(logits, head_dim=16)
    assert value(stats, "entropy").max() < 0.6
    assert value(stats, "sink_mass").min() > 0.9
    assert saturated(stats) == [False, False]


def test_b16_masked_and_one_hot_rows_have_an_exact_entropy_and_harm_no_gradient() -> None:
    masked = softmax_statistics(torch.tensor([[1.0, 2.0, -math.inf]]))
    p = 1 / (1 + math.exp(-1))
    assert value(masked, "entropy").item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-7)
    assert value(masked, "entropy").item() == pytest.approx(0.5822, abs=1e-3)
    assert value(softmax_statistics(torch.tensor([[1e4, 0.0, 0.0]])), "entropy").item() == 0

    class Masked(Core):
        def logits(self, q: Tensor, k: Tensor) -> Tensor:
            return (super().logits(q, k) * 1e3).masked_fill(torch.arange(q.shape[2]) == 2, -math.inf)

    qkv = normal(3, 1, 2, 5, 7).requires_grad_()
    twin = qkv.detach().clone().requires_grad_()
    model = Masked()
    stats = only(collect(model, lambda: model(*qkv).square().sum().backward()))
    model(*twin).square().sum().backward()
    assert value(stats, "grad_logits_norm").isfinite().all()
    assert qkv.grad is not None
    assert twin.grad is not None
    assert qkv.grad.isfinite().all()
    assert torch.equal(qkv.grad, twin.grad)


def sparsemax(logits: Tensor) -> Tensor:
    ordered = logits.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    kept = (ordered - excess / torch.arange(1, logits.shape[-1] + 1) > 0).sum(-1, keepdim=True)
    return (logits - excess.gather(-1, kept - 1) / kept).clamp(min=0)


@pytest.mark.parametrize("normalise", [torch.sigmoid, torch.relu, torch.square, sparsemax])
def test_b17_attention_without_a_softmax_is_skipped_with_its_reason(normalise: Callable[[Tensor], Tensor]) -> None:
    class Gated(Core):
        def probs(self, logits: Tensor) -> Tensor:
            return normalise(logits)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated = SelfAttention(12, 2, Gated())
            self.soft = SelfAttention(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.soft(self.gated(x))

    monitor = AttentionMonitor()
    trainer, (said,) = fit(Trained(Mixed()), monitor, serve(normal(1, 5, 12)))
    assert trainer.global_step == 1
    assert "seen, but not measured: net.gated.core (" in said
    assert "observe_logits" in said
    assert [list(record) for _, record in monitor.history] == [["net.soft"]]


def test_b17_the_logits_can_be_shown_where_no_softmax_is_seen() -> None:
    class Shows(Core):
        def probs(self, logits: Tensor) -> Tensor:
            observe_logits("gate", logits, head_dim=11)
            return logits.sigmoid()

    model = Shows()
    query, key = normal(2, 3, 5, 11, seed=1), normal(2, 3, 7, 11, seed=2)
    with AttentionProbe(model) as probe:
        model(query, key, key)
    assert_matches(probe.compute()["gate"], attention_reference(query, key), names=["logit_std", "logit_max"])


def test_b17_the_difference_of_two_softmaxes_is_two_softmaxes() -> None:
    class Difference(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            one, two = q[..., :6] @ k[..., :6].mT, q[..., 6:] @ k[..., 6:].mT
            first = (one / math.sqrt(6)).softmax(-1)
            second = (two / math.sqrt(6)).softmax(-1)
            return (first - 0.5 * second) @ v

    model = Difference()
    query, key = normal(2, 3, 5, 12, seed=1), normal(2, 3, 7, 12, seed=2)
    found = collect(model, lambda: model(query, key, key))
    assert list(found) == ["Difference", "Difference#1"]
    assert_matches(found["Difference"], attention_reference(query[..., :6], key[..., :6]))
    assert_matches(found["Difference#1"], attention_reference(query[..., 6:], key[..., 6:]))

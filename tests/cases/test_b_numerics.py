"""B: unstable training, masks, scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, T5Config, T5EncoderModel
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.t5 import modeling_t5

from attn_monitor import AttentionMonitor, AttentionProbe, SaturationEvent, SaturationRule, observe_logits, tiles
from attn_monitor.audit import scale_findings
from attn_monitor.functional import attention_statistics, softmax_statistics
from tests.cases.support import (
    Core,
    SelfAttention,
    Thermostat,
    Trained,
    collect,
    curve,
    entropy,
    fit,
    normal,
    only,
    serve,
    value,
)
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference, dense_logits, softmax_reference

pytestmark = LIGHTNING_ADVICE
RULE = SaturationRule()


def saturated(stats: Any) -> list[bool]:
    """Return which heads the rule flags."""
    return (RULE.ratio(stats) > RULE.limit(stats)).tolist()


class Shown(nn.Module):
    """Runs a core on what it is given as the only input: query, key and value, stacked."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, qkv: Tensor) -> Tensor:
        return self.core(*(qkv * self.weight).unbind(1))


def events_of(core: nn.Module, qkv: Tensor) -> list[SaturationEvent]:
    """Train one step on query, key and value [3, H, T, D] and return the events."""
    monitor = AttentionMonitor()
    fit(Trained(Shown(core)), monitor, serve(qkv[None]))
    return monitor.events


def test_b01_products_beyond_half_precision_are_measured_where_only_the_scaled_logit_matters() -> None:
    query = torch.full((1, 1, 2, 128), 25.0, dtype=torch.float16)
    assert not (query @ query.mT).isfinite().any()  # the trap: 80000 > 65504
    stats = attention_statistics(query, query, scale=128**-0.5)
    assert value(stats, "logit_max").item() == pytest.approx(7071, abs=1)
    assert value(stats, "logit_std").item() == 0
    assert stats.nonfinite.tolist() == [0]


def test_b01_an_overflow_that_reaches_the_softmax_is_counted() -> None:
    qkv = normal(3, 2, 5, 128).half()
    qkv[:2, 1, 3:] = 25.0
    model = Core()
    stats = only(collect(model, lambda: model(*qkv[:, None])))
    assert stats.nonfinite.tolist() == [0, 4]
    assert all(math.isfinite(std) for std in value(stats, "logit_std"))

    found = events_of(_InHalf(), qkv.float())
    assert [(event.head, event.statistic, event.severity) for event in found] == [
        (1, "nonfinite", "critical"),
        (1, "logit_row_std", "warning"),  # of its finite logits
    ]
    assert found[0].value == 4.0


class _InHalf(Core):
    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return (q.half() @ k.half().mT).float() * q.shape[-1] ** -0.5


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


def spy_on(patch: pytest.MonkeyPatch, modeling: Any) -> list[dict[str, Any]]:
    """Record the arguments of each eager attention of a transformers model."""
    original = modeling.eager_attention_forward
    seen: list[dict[str, Any]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        seen.append({"query": query.detach(), "key": key.detach(), "mask": attention_mask, **kwargs})
        return original(module, query, key, value, attention_mask, **kwargs)

    patch.setattr(modeling, "eager_attention_forward", spy)
    return seen


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
    ("scale", "ratio", "flat", "cause"),
    [
        (1 / 8, 1.0, (0.89, 0.93), None),
        (1.0, 8.0, (0.10, 0.16), "likely cause: the scale 1/sqrt(d_k) is missing"),
        (1 / 64, 0.125, (0.998, 1.0), None),
        (8.0, 64.0, (0.0, 0.02), "likely cause: the scale is inverted, sqrt(d_k) in place of 1/sqrt(d_k)"),
    ],
    ids=["right", "missing", "twice", "inverted"],
)
def test_b04_a_wrong_scale_shows_and_is_named(
    scale: float, ratio: float, flat: tuple[float, float], cause: str | None
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
    assert [event.cause for event in found] == ([] if cause is None else [cause] * 2)


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


class Growing(nn.Module):
    """Layers of which the last one's products, in half precision, grow with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": _GrowingAttention(12)}) for _ in range(3)])
        self.layers[:2].requires_grad_(False)  # or their gradients would break with the last layer
        self.broken: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.get_submodule("attn")(x)
        self.broken.append(bool(x.isnan().any()))
        return x


class _GrowingAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x)[:, None].half(), self.k(x)[:, None].half()
        return ((q @ k.mT).float() / math.sqrt(q.shape[-1])).softmax(-1)[:, 0] @ x


def test_b09_slow_growth_is_warned_of_once_and_long_before_the_first_nan() -> None:
    net = Growing()
    last: Any = net.layers[2].get_submodule("attn")

    def grow(step: int) -> None:
        with torch.no_grad():
            last.q.weight *= 1.06
            last.k.weight *= 1.06

    monitor = AttentionMonitor(saturation=SaturationRule(threshold=1.0))
    _, said = fit(Trained(net, grow, lr=0.0), monitor, serve(normal(1, 5, 12).expand(110, 5, 12)))
    first_nan = net.broken.index(True)
    first = monitor.events[0]
    assert first.layer == "net.layers.2.attn"
    assert first.statistic == "logit_row_std"
    assert first.step < first_nan - 30
    assert first.severity == "warning"  # the other layers are healthy
    assert [event.statistic for event in monitor.events] == ["logit_row_std", "nonfinite"]
    for heading in ("1 head is newly saturated:", "1 head is critical, its logits are nan or inf:"):
        assert len([text for text in said if text.startswith(heading)]) == 1
    assert "grew" in first.cause
    assert "since step 0" in first.cause


def test_b09_one_noisy_batch_opens_no_event() -> None:
    def spikes(net: Thermostat) -> Any:
        def script(step: int) -> None:
            net.std = 50.0 if step in (3, 6, 7) else 1.0

        return script

    patient, hasty = AttentionMonitor(saturation=SaturationRule(patience=3)), AttentionMonitor()
    net = Thermostat()
    fit(Trained(net, spikes(net), lr=0.0), [patient, hasty], serve(torch.zeros(10, 1)))
    assert patient.events == []
    assert [(event.step, event.head) for event in hasty.events] == [(3, 0), (3, 1), (6, 0), (6, 1)]


def test_b10_the_largest_logit_is_per_head_scaled_signed_and_of_allowed_pairs() -> None:
    query, key = normal(2, 4, 5, 7, seed=1), normal(2, 4, 5, 7, seed=2)
    query[:, 2] *= 20
    query[1, 3, 0], key[1, 3, 4] = 100.0, 100.0  # above the diagonal

    class Causal(Core):
        def logits(self, q: Tensor, k: Tensor) -> Tensor:
            return super().logits(q, k).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)

    model = Causal()
    _, logits, allowed = dense_logits(query, key, is_causal=True, scale=7**-0.5)
    largest = logits.masked_fill(~allowed, -math.inf).amax((0, 2, 3))
    smallest = logits.masked_fill(~allowed, math.inf).amin((0, 2, 3))
    assert logits.max() > 10 * largest.max()  # the huge pair is there, and blocked
    for stats in (
        attention_statistics(query, key, is_causal=True),
        only(collect(model, lambda: model(query, key, key))),
        attention_statistics(query, key, attn_mask=allowed),
    ):
        torch.testing.assert_close(value(stats, "logit_max"), largest, rtol=1e-5, atol=0)
        torch.testing.assert_close(value(stats, "logit_min"), smallest, rtol=1e-5, atol=0)
        absolute = torch.maximum(value(stats, "logit_max").abs(), value(stats, "logit_min").abs())
        wanted = logits.masked_fill(~allowed, 0).abs().amax((0, 2, 3))
        torch.testing.assert_close(absolute, wanted, rtol=1e-5, atol=0)


class Ragged(nn.Module):
    """Attentions of 2, 4 and 8 heads, the last of them over other keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SelfAttention(16, 2), SelfAttention(16, 4)])
        self.cross = nn.MultiheadAttention(16, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x + self.cross(x, x.repeat(1, 2, 1)[:, :9], x.repeat(1, 2, 1)[:, :9])[0]


def test_b11_layers_of_different_shapes_have_one_summary() -> None:
    monitor = AttentionMonitor()
    trainer, said = fit(Trained(Ragged()), monitor, serve(normal(2, 5, 16) / 4))
    assert said == []
    record = monitor.history[-1][1]
    assert {name: (stats.heads, stats.keys) for name, stats in record.items()} == {
        "net.layers.0": (2, 5),
        "net.layers.1": (4, 5),
        "net.cross": (8, 9),
    }
    worst = max(float(RULE.ratio(stats).max()) for stats in record.values())
    assert float(trainer.callback_metrics["attn_monitor/saturation_ratio_max"]) == pytest.approx(worst, rel=1e-6)
    assert trainer.callback_metrics["attn_monitor/observed_layers"] == 3


def test_b12_a_maximum_is_that_of_its_own_step() -> None:
    net = Thermostat()

    def spike(step: int) -> None:
        net.std = 50.0 if step == 3 else 1.0

    monitor = AttentionMonitor(gradients=False)
    trainer, _ = fit(Trained(net, spike, lr=0.0), monitor, serve(torch.zeros(6, 1)))
    largest = curve(monitor, "net", "logit_max")
    assert largest[3] > 40
    assert all(value == pytest.approx(largest[3] / 50, rel=1e-5) for step, value in enumerate(largest) if step != 3)
    assert {event.step for event in monitor.events} == {3}
    assert trainer.callback_metrics["attn_monitor/saturated_heads"] == 0


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


@pytest.mark.parametrize("entries", [16 * 64, 2**19])
def test_b18_chunks_of_huge_logits_give_the_dense_result(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", entries)
    logits = normal(2, 4, 64, 64) * 80
    stats = softmax_statistics(logits)
    wanted = softmax_reference(logits, torch.ones_like(logits, dtype=torch.bool))
    torch.testing.assert_close(value(stats, "entropy"), wanted["entropy"], rtol=0, atol=1e-5)
    assert_matches(stats, wanted)


def test_b19_parts_pool_to_the_spread_of_all_their_logits() -> None:
    net = Thermostat()
    settings = iter([(1.0, 0.0), (9.0, 4.0), (2.0, -3.0)])

    class Scripted(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            net.std, net.mean = next(settings)
            return super().training_step(batch, batch_idx)

    monitor = AttentionMonitor()
    fit(Scripted(net, lr=0.0), monitor, serve(torch.zeros(3, 1)), accumulate_grad_batches=3)
    parts = [net.pattern * std + mean for std, mean in ((1.0, 0.0), (9.0, 4.0), (2.0, -3.0))]
    pooled = torch.stack(parts, 1).flatten(1).double()
    stats = monitor.history[0][1]["net"]
    assert stats.rows.tolist() == [3 * 5] * 2
    torch.testing.assert_close(value(stats, "logit_std"), pooled.std(1, correction=0), rtol=1e-5, atol=0)
    assert value(stats, "logit_std").min() > 1.3 * (1 + 9 + 2) / 3  # the trap: the mean of the three

    alone = attention_statistics(normal(1, 2, 1, 7, seed=1), normal(1, 2, 1, 7, seed=2))
    assert value(alone, "logit_std").tolist() == [0, 0]
    assert alone.entropy is None
    assert saturated(alone) == [False, False]

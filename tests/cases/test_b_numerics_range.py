"""B: overflow, slow growth, noise, and sums over steps and chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, SaturationRule, tiles
from attn_monitor.functional import attention_statistics, softmax_statistics
from tests.cases.numerics import events_of, saturated
from tests.cases.support import (
    Core,
    SelfAttention,
    Thermostat,
    Trained,
    collect,
    curve,
    fit,
    normal,
    only,
    serve,
    value,
)
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, dense_logits, softmax_reference

pytestmark = LIGHTNING_ADVICE
RULE = SaturationRule()


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

"""The scale of the scores: right wherever it is applied, and not given where it is not one number for a head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, attention_reference
from tests.spellings import ALLOWED, SCALE, Attention, B, D, E, H, T

TEMPERATURES = torch.linspace(0.2, 0.6, B).view(B, 1, 1, 1)
HEADS = torch.tensor([2.0, 3.0, 5.0])


def watched(model: nn.Module, *inputs: Tensor) -> tuple[AttentionStatistics, str]:
    with AttentionProbe(model) as probe:
        model(*inputs).square().sum().backward()
    assert not probe.skipped
    ((name, stats),) = probe.compute().items()
    return stats, probe.notes.get(name, "")


@pytest.mark.parametrize("factor", [TEMPERATURES, 1 / TEMPERATURES])
def test_a_temperature_per_sample_is_no_scale_and_the_logits_are_right(factor: Tensor) -> None:
    def warmed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores = scores * factor if factor is TEMPERATURES else scores / factor
        return scores.masked_fill(~ALLOWED, -1e4).softmax(-1) @ v

    model, x = Attention(warmed), torch.randn(B, T, E)
    stats, note = watched(model, x)
    q, k, _ = (part.detach() for part in model.heads(x))
    wanted = attention_reference(q * TEMPERATURES, k, is_causal=True, scale=1.0)
    assert_matches(stats, {name: value for name, value in wanted.items() if name not in ("q_rms", "alignment")})
    assert_matches(stats, attention_reference(q, k, is_causal=True), names=["q_rms"])
    assert (stats.scale, stats.scale_ratio, stats.alignment) == (None, None, None)
    assert "scale" in note


@pytest.mark.parametrize(
    "factor",
    [
        torch.arange(1.0, T + 1).log1p()[:, None],  # one per query
        torch.rand(B, H, 1, 1),
        torch.rand(T, T),
    ],
)
def test_a_factor_that_varies_within_a_head_is_no_scale(factor: Tensor) -> None:
    def varied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * SCALE * factor).softmax(-1) @ v

    stats, _ = watched(Attention(varied), torch.randn(B, T, E))
    assert stats.scale is None or bool(stats.scale.isnan().all())
    assert stats.alignment is None or bool(stats.alignment.isnan().all())
    assert stats.logit_std is not None
    assert stats.q_rms is not None
    assert bool(stats.q_rms.isfinite().all())


def test_a_linear_attention_with_decay_does_not_make_the_scale_of_the_next_attention_unknown() -> None:
    class Hybrid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            v = (q @ k.mT * torch.rand(T, T)) @ v * torch.rand(T, 1)
            return (v @ v.mT * SCALE).softmax(-1) @ v

    stats, _ = watched(Hybrid(), torch.randn(B, T, E))
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale, torch.full((H,), SCALE, dtype=torch.float64))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q[:, :, None], k[:, :, None], v[:, :, None]
    q = torch.cat([q, q], dim=2)
    return ((q @ k.mT) * HEADS.view(H, 1, 1, 1)).softmax(-1).matmul(v).mean(2)


def on_the_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ (k * HEADS.view(H, 1, 1)).mT).softmax(-1) @ v


def sdpa_on_the_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k * HEADS.view(H, 1, 1), v, scale=1.0)


def sdpa_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.repeat_interleave(2, dim=1)
    out = F.scaled_dot_product_attention(q, k * HEADS.view(H, 1, 1), v, scale=1.0, enable_gqa=True)
    return out.unflatten(1, (H, 2)).mean(2)


@pytest.mark.parametrize("attend", [grouped, on_the_key, sdpa_on_the_key, sdpa_grouped])
def test_a_temperature_per_head_is_the_scale_wherever_it_stands(attend: Callable[..., Tensor]) -> None:
    model, x = Attention(attend), torch.randn(B, T, E)
    stats, _ = watched(model, x)
    copies = stats.heads // H
    assert stats.scale is not None
    assert stats.k_rms is not None
    torch.testing.assert_close(stats.scale, HEADS.double().repeat_interleave(copies))
    q, k, _ = (part.detach().repeat_interleave(copies, dim=1) for part in model.heads(x))
    wanted = attention_reference(q, k, scale=HEADS.repeat_interleave(copies))
    assert_matches(stats, wanted, names=["k_rms", "q_rms", "qk_std", "alignment", "logit_std"])


def test_what_masks_before_a_scale_masks_after_it() -> None:
    half = ~ALLOWED * -5000.0

    def scaled_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT + half) * 0.1 + half).softmax(-1) @ v

    stats, _ = watched(Attention(scaled_between), torch.randn(B, T, E))
    assert stats.logit_min is not None
    assert -10 < float(stats.logit_min.min()) < 0  # and not -5500, which is no logit of anything

"""What scores go through between the product and the softmax in real models, each way on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, attention_reference, gradient_reference
from tests.spellings import ALLOWED, SCALE, Attention, B, D, E, H, T


def watched(model: nn.Module, *inputs: Tensor) -> AttentionStatistics:
    """Run forward and backward under a probe that must find one attention and skip nothing."""
    with AttentionProbe(model) as probe:
        model(*inputs).square().sum().backward()
    assert not probe.skipped
    (stats,) = probe.compute().values()
    return stats


def expected(model: Attention, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """Every statistic in float64 by the reference, gradients of out.square().sum()."""
    model = model.double()
    q, k, v = (part.detach() for part in model.heads(x.double()))
    out = model.attend(*model.heads(x.double())).detach().requires_grad_()
    model.out(out.transpose(1, 2).reshape(len(x), -1, E)).square().sum().backward()
    assert out.grad is not None
    gradients = gradient_reference(q, k, v, out.grad, **options)
    return {
        **attention_reference(q, k, **options),
        **{name: gradients[name] for name in ("grad_logits_norm", "grad_probs_norm", "gradient_gain")},
    }


# -- learned sinks --------------------------------------------------------------------------------------------------

LOWEST = torch.finfo(torch.float32).min
SINKS = torch.tensor([0.5, -1.0, 2.0])


def column(q: Tensor) -> Tensor:
    return SINKS.to(q.dtype).reshape(1, -1, 1, 1).expand(len(q), -1, T, -1)


def sink_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4)
    return torch.cat([scores, column(q)], dim=-1).softmax(-1)[..., :-1] @ v


def sink_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4)
    return torch.cat([column(q), scores], dim=-1).softmax(-1)[..., 1:] @ v


def sink_with_added_mask_and_shift(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * SCALE + ~ALLOWED * LOWEST, column(q)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1)[..., :-1] @ v


def sink_with_late_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * SCALE, column(q)], dim=-1)
    return scores.masked_fill(~F.pad(ALLOWED, (0, 1), value=True), -math.inf).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(
    "attend",
    [sink_after, sink_before, sink_with_added_mask_and_shift, sink_with_late_mask],
    ids=lambda attend: attend.__name__,
)
def test_a_learned_sink_is_an_outcome_and_no_logit(attend: Callable[..., Tensor]) -> None:
    model, x = Attention(attend), 2 * torch.randn(B, T, E)
    stats = watched(model, x)
    assert (stats.keys, stats.head_dim) == (T, D)
    assert_matches(stats, expected(model, x, is_causal=True, sinks=SINKS))


def test_softmax_with_one_added_is_a_sink_of_zero() -> None:
    def plus_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.pad(q @ k.mT * SCALE, (0, 1)).softmax(-1)[..., :-1] @ v

    model, x = Attention(plus_one), 2 * torch.randn(B, T, E)
    assert_matches(watched(model, x), expected(model, x, sinks=torch.zeros(H)))


def test_columns_that_differ_by_row_are_keys() -> None:
    def more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([q @ k.mT * SCALE, q[..., :1]], dim=-1).softmax(-1)[..., :-1] @ v

    stats = watched(Attention(more_keys), torch.randn(B, T, E))
    assert (stats.keys, stats.q_rms) == (T + 1, None)


# -- what changes nothing -------------------------------------------------------------------------------------------


def largest_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4)
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v


def largest_subtracted_then_moved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4)
    scores = (scores - scores.max(-1, keepdim=True)[0]).view(-1, T, T)
    return scores.softmax(-1).view(-1, H, T, T) @ v


def larger_of_scores_and_floor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE + ~ALLOWED * LOWEST
    return torch.max(scores, torch.tensor(LOWEST)).softmax(-1) @ v


def an_unknown_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.hardtanh((q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4), -2e4, 1e4).softmax(-1) @ v


def split_into_windows_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # As shifted windows: the batch is split for the mask and put together again.
    scores = (q @ k.mT * SCALE).view(-1, B, H, T, T) + ~ALLOWED * -1e4
    return scores.view(-1, H, T, T).softmax(-1) @ v


def key_scaled_and_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = (k * SCALE).repeat_interleave(2, dim=0)[::2]
    return (q @ k.mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def query_scaled_and_stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = torch.stack([part * SCALE for part in q.unbind(1)], dim=1)
    return (q @ k.mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def rolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = (q * SCALE).roll(1, dims=2).roll(-1, dims=2)
    return (q @ k.mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


@pytest.mark.parametrize(
    "attend",
    [
        *(largest_subtracted, largest_subtracted_then_moved, larger_of_scores_and_floor, an_unknown_function),
        *(split_into_windows_and_back, key_scaled_and_repeated, query_scaled_and_stacked, rolled),
    ],
    ids=lambda attend: attend.__name__,
)
def test_the_numbers_are_those_of_the_reference(attend: Callable[..., Tensor]) -> None:
    model, x = Attention(attend), 2 * torch.randn(2 * B, T, E)
    stats = watched(model, x)
    assert_matches(stats, expected(model, x, is_causal=True))
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale, torch.full((H,), SCALE, dtype=torch.float64))


# -- axes -----------------------------------------------------------------------------------------------------------


def test_heads_of_raw_projections_with_the_length_first() -> None:
    class Relative(nn.Module):
        """As XLNet: length, batch, heads, depth; projections by einsum; a second product is added as a bias."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(4, E, H, D) / 6)

        def factors(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch.einsum("ibh,hnd->ibnd", x.transpose(0, 1), weight) for weight in self.weights)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v, r = self.factors(x)
            content, position = (torch.einsum("ibnd,jbnd->bnij", q, factor) for factor in (k, r))
            scores = (content + position) * SCALE
            scores = scores - 1e30 * torch.einsum("ijbn->bnij", (~ALLOWED).float()[:, :, None, None])
            return torch.einsum("bnij,jbnd->ibnd", scores.softmax(3), v)

    model, x = Relative(), torch.randn(B, T, E)
    stats = watched(model, x)
    q, k, _, r = (part.detach().permute(1, 2, 0, 3) for part in model.factors(x))
    bias = torch.einsum("bnid,bnjd->bnij", q.double(), r.double()) * SCALE
    assert_matches(stats, attention_reference(q, k, masks=(bias,), is_causal=True))


def test_heads_made_of_several_axes() -> None:
    class Experts(nn.Module):
        """As attention with experts: heads are (expert, head)."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.ModuleList([nn.Linear(E, 10), nn.Linear(E, 10)]), nn.Linear(E, 20)

        def forward(self, x: Tensor) -> Tensor:
            q = torch.stack([expert(x) for expert in self.q], dim=2).view(B, T, 4, 5).transpose(1, 2)
            k, v = (part.view(B, T, 2, 5).transpose(1, 2).repeat(1, 2, 1, 1) for part in self.kv(x).chunk(2, -1))
            return (q @ k.mT).softmax(-1) @ v

    stats = watched(Experts(), torch.randn(B, T, E))
    assert (stats.heads, stats.rows.tolist()) == (4, [B * T] * 4)
    assert stats.alignment is not None


def test_heads_that_only_the_key_still_knows() -> None:
    class Pooled(nn.Module):
        """As hierarchical vision models: the largest of several queries; heads come before windows."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).view(B, 4, 2, 3, H, D).permute(3, 0, 4, 2, 1, 5)
            q, k, v = parts.unbind(0)  # batch, heads, windows, length, depth
            q = q.view(B, H, 2, 2, 2, D).max(dim=3).values
            return (q @ k.mT * SCALE).softmax(-1) @ v

    stats = watched(Pooled(), torch.randn(B, 8, E))
    assert (stats.heads, stats.keys, stats.rows.tolist()) == (H, 4, [B * 2 * 2] * H)


def test_bands_that_are_written_into_a_buffer() -> None:
    def banded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # As sliding windows in chunks, here without overlap: heads folded into the batch, axes cut unevenly.
        batch, _, length, depth = q.shape
        q, k = (part.reshape(batch * H, length, depth) for part in (q, k))
        size = (batch * H, length // 2, 2, depth)
        q, k = (part.as_strided(size, (length * depth, 2 * depth, depth, 1)) for part in (q, k))
        scores = torch.einsum("bcxd,bcyd->bcxy", q, k)
        padded = F.pad(scores, (0, 0, 0, 1)).view(batch * H, length // 2, 2, 3)
        buffer = padded.new_zeros((batch * H, length // 2 + 1, 2, 4))
        buffer[:, :-1, :, :2] = padded[..., :2]  # what is left of a column fewer
        buffer[:, :-1, :, 2:] = -math.inf
        buffer = buffer[:, :-1].reshape(batch, H, length, 4).transpose(2, 1)
        probabilities = (buffer * SCALE).softmax(-1)
        return torch.einsum("blhk,bhld->bhld", probabilities, v)

    model, x = Attention(banded), torch.randn(B, 6, E)
    with AttentionProbe(model) as probe:
        model(x)
    (stats,) = probe.compute().values()
    assert (stats.heads, stats.head_dim, stats.rows.tolist()) == (H, D, [B * 6] * H)
    assert stats.q_rms is None


# -- scores that are no products ------------------------------------------------------------------------------------


def test_distances_are_scores_without_query_and_key() -> None:
    def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.cdist(q, k) / -0.5).softmax(-1) @ v

    stats = watched(Attention(near), torch.randn(B, T, E))
    assert (stats.heads, stats.head_dim, stats.q_rms, stats.qk_std) == (H, D, None, None)
    assert stats.scale is not None
    assert stats.scale.tolist() == [-2.0] * H


def similarity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1) / 0.1).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_softmax_of_unknown_origin_is_skipped_with_its_reason() -> None:
    scripted = torch.jit.script(_softcap)

    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scripted(q @ k.mT * SCALE).softmax(-1) @ v

    for attend in (similarity, compiled):
        model = Attention(attend)
        with AttentionProbe(model) as probe:
            model(torch.randn(B, T, E)).sum().backward()
        assert dict(probe.compute()) == {}
        assert "where its logits come from was not seen" in probe.skipped["Attention"]


def _softcap(scores: Tensor) -> Tensor:
    return torch.tanh(scores / 2.0) * 2.0


class Unlike(nn.Module):
    """Linear attention, a norm, then raw matrices: a router, or softmax attention."""

    def __init__(self, route: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.router = nn.Parameter(torch.randn(E, 5))
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y = F.layer_norm(q @ (k.mT @ v), (E,)) + x
        if not self.route:
            return (y @ y.mT).softmax(-1) @ v
        gates = (y @ self.router).softmax(-1)
        return torch.einsum("btx,btxe->bte", gates, torch.stack([v] * 5, dim=2))


def test_what_comes_after_linear_attention_is_no_score_of_its() -> None:
    model = Unlike(route=True)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E)).sum().backward()
    assert dict(probe.compute()) == {}
    assert probe.skipped == {}
    stats = watched(Unlike(route=False), torch.randn(B, T, E))
    assert (stats.keys, stats.head_dim) == (T, E)

"""Heads and batch in every arrangement of the axes, and what goes in between the logits and the value."""

from __future__ import annotations

import math
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_monitor import AttentionProbe
from tests.reference import assert_matches, assert_same, attention_reference
from tests.spellings import ALLOWED, SCALE, Attention, B, D, E, H, T
from tests.watched import Free, in_heads, only, watched

# -- shapes and axes ------------------------------------------------------------------------------------------------


def test_grouped_queries_in_five_dimensions_are_counted_as_heads() -> None:
    groups, width = 3, 2

    def grouped(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[..., : groups * width * 5].view(B, T, groups, width, 5).permute(0, 2, 3, 1, 4)
        k, v = (part[..., : groups * 5].view(B, T, groups, 1, 5).permute(0, 2, 3, 1, 4) for part in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    def fused(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[..., : groups * width * 5].view(B, T, groups * width, 5).transpose(1, 2)
        k, v = (part[..., : groups * 5].view(B, T, groups, 5).transpose(1, 2) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)

    model, x = Free(grouped), torch.randn(B, T, E)
    found = only(watched(model, x))
    model.function = fused
    wanted = only(watched(model, x))
    assert found.heads == wanted.heads == groups * width
    assert_same(found, wanted)


def test_windows_are_batch() -> None:
    def windowed(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.view(B, T, 1, H, D).expand(B, T, 2, H, D).transpose(2, 3) for part in (q, k, v))
        return (q @ k.mT / math.sqrt(D) + torch.zeros(B, T, 1, 2, 2)).softmax(-1) @ v

    stats = only(watched(Free(windowed), torch.randn(B, T, E)))
    assert stats.rows.tolist() == [B * T * 2] * H


def test_heads_that_nothing_tells_apart_are_pooled_with_a_note() -> None:
    def opaque(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (F.layer_norm(part.reshape(B * H, T, D), (D,)) for part in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)

    model = Free(opaque)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    stats = probe.compute()["Free"]
    assert (stats.heads, stats.rows.tolist(), stats.head_dim) == (1, [B * H * T], D)
    assert "could not be told apart" in probe.notes["Free"]


def test_one_unbatched_head_in_two_dimensions() -> None:
    def plain(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q[0], k[0], v[0]
        return torch.softmax(q @ k.T / math.sqrt(E), dim=-1) @ v

    model, x = Free(plain), torch.randn(B, T, E)
    stats = only(watched(model, x))
    q, k, _ = (part[0].detach() for part in model.qkv(x).chunk(3, -1))
    assert_matches(stats, attention_reference(q[None, None], k[None, None]))
    assert stats.grad_logits_norm is not None


def test_talking_heads_keep_logits_and_lose_query_and_key() -> None:
    def talking(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = in_heads(q, k, v)
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT * SCALE, model.mixing)
        probs = torch.einsum("bgqk,gh->bhqk", scores.softmax(-1), model.mixing)
        return probs @ v

    stats = only(watched(Free(talking), torch.randn(B, T, E)))
    assert (stats.heads, stats.head_dim, stats.rows.tolist()) == (H, D, [B * T] * H)
    assert stats.q_rms is None
    assert stats.logit_std is not None


# -- blind spots ----------------------------------------------------------------------------------------------------


def test_heads_packed_into_a_single_query_are_heads() -> None:
    groups, width = 2, 3

    def packed(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[:, -1:, : groups * width * 5].unflatten(-1, (groups * width, 5)).transpose(1, 2)
        k, v = (part[..., : groups * 5].unflatten(-1, (groups, 5)).transpose(1, 2) for part in (k, v))
        mask = torch.zeros(B, 1, 1, T)
        if model.packs:
            return F.scaled_dot_product_attention(q.reshape(B, groups, width, 5), k, v, mask)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    model, x = Free(packed), torch.randn(B, T, E)
    found = []
    for packs in (False, True):
        model.packs = packs
        found.append(only(watched(model, x)))
    assert found[1].heads == groups * width
    assert_same(found[1], found[0])


def test_two_dimensional_probabilities_are_counted_once_and_not_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def twice(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probs = torch.softmax(q[0] @ k[0].T / math.sqrt(E), dim=-1)
        similarities = torch.softmax(q[0] @ k[0].T, dim=-1)
        kept.extend([weakref.ref(probs), weakref.ref(similarities)])
        return probs @ v[0] + probs @ (2 * v[0]) + similarities.diagonal().sum()

    model = Free(twice)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E)).square().sum().backward()
        assert [reference() for reference in kept] == [None, None]
    stats = only(dict(probe.compute()))
    assert (stats.calls, stats.rows.tolist()) == (1, [T])


def test_a_blocked_column_beside_the_scores_is_no_sink() -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.pad((q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4), (0, 1), value=-math.inf)
        return scores.softmax(-1)[..., :-1] @ v

    model, x = Attention(padded), torch.randn(B, T, E)
    stats = only(watched(model, x))
    q, k, _ = (part.detach() for part in model.heads(x))
    assert_matches(stats, attention_reference(q, k, is_causal=True), names=["entropy", "jacobian_trace", "logit_std"])

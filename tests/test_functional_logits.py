"""Given logits, sampled rows, and the choice of statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_monitor import tiles
from attn_monitor.arguments import softmax_call
from attn_monitor.catalog import ALL, GRADIENTS
from attn_monitor.functional import attention_statistics, softmax_statistics
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_sums
from tests.attention_inputs import FORWARD, B, D, H, K, Q, make_inputs
from tests.reference import (
    assert_matches,
    attention_reference,
    dense_logits,
    factor_reference,
    softmax_reference,
)

# -- given logits ---------------------------------------------------------------


@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min, -65504.0])
def test_fills_of_bare_logits_are_blocked(fill: float) -> None:
    logits, allowed = torch.randn(B, H, Q, K), torch.rand(B, H, Q, K) > 0.3
    allowed[0, :, 3] = False
    filled = torch.where(allowed, logits, fill)
    assert_matches(softmax_statistics(filled), softmax_reference(logits, allowed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fills_of_half_precision_logits_are_blocked(dtype: torch.dtype) -> None:
    logits, allowed = torch.randn(B, H, Q, K).to(dtype), torch.rand(B, H, Q, K) > 0.3
    filled = logits.masked_fill(~allowed, torch.finfo(dtype).min)
    assert_matches(softmax_statistics(filled), softmax_reference(logits, allowed))


def test_a_large_negative_logit_counts_unless_the_mask_blocks_it() -> None:
    logits = torch.tensor([[0.0, 1.0, -1e4], [0.0, 2.0, -300.0]])
    stats = softmax_statistics(logits)
    assert stats.logit_min is not None
    assert stats.logit_min.tolist() == [-1e4]
    masked = softmax_statistics(logits, mask=torch.tensor([0.0, 5.0, -9000.0]))  # the 5 is in the logits already
    assert masked.logit_min is not None
    assert masked.logit_min.tolist() == [0.0]
    assert_matches(masked, softmax_reference(logits[None, None], torch.tensor([[[[True, True, False]]]])))


@pytest.mark.parametrize("plain", [True, False])
def test_the_factors_of_given_logits(plain: bool) -> None:
    query, key = make_inputs()
    bias = torch.zeros(Q, K) if plain else torch.randn(Q, K)
    mask = torch.rand(B, 1, Q, K) > 0.3
    product, logits, allowed = dense_logits(query, key, masks=[bias, mask], scale=0.5)
    call = AttentionCall(
        query=query, key=key, scale=0.5, logits=logits.float().masked_fill(~allowed, -math.inf), plain=plain
    )
    stats = attention_sums(call, FORWARD).finalize(FORWARD)
    assert_matches(stats, softmax_reference(logits, allowed) | factor_reference(query, key, product, allowed, 0.5))

    alone = AttentionCall(logits=call.logits, plain=plain, scale=None)
    stats = attention_sums(alone, FORWARD).finalize(FORWARD)
    assert (stats.q_rms, stats.k_rms, stats.alignment, stats.scale) == (None, None, None, None)
    assert (stats.qk_std is not None) is plain


@pytest.mark.parametrize(
    ("shape", "options", "order"),
    [
        ((5, 3), {}, "qk"),
        ((5, 3), {"dim": 0}, "kq"),
        ((2, 5, 3), {}, "bqk"),
        ((2, 5, 3), {"dim": 1}, "bkq"),
        ((2, 5, 3), {"head_axis": 0}, "hqk"),
        ((7, 2, 5, 3), {}, "bhqk"),
        ((7, 2, 5, 3), {"dim": 2}, "bhkq"),
        ((7, 2, 5, 3), {"dim": 0, "head_axis": -1}, "kbqh"),
        ((7, 2, 5, 3), {"dim": 1, "head_axis": None}, "bkcq"),
        ((7, 2, 5, 3, 4), {}, "bcdqk"),
        ((7, 2, 5, 3, 4), {"head_axis": 3, "dim": 1}, "bkchq"),
    ],
    ids=str,
)
def test_axes_of_logits(shape: tuple[int, ...], options: dict[str, Any], order: str) -> None:
    logits = torch.randn(shape)
    mask = torch.rand(*(size if axis in "kh" else 1 for size, axis in zip(shape, order, strict=True))) > 0.2
    batch = [axis for axis in order if axis in "bcd"]
    letters = " ".join(order)
    target = "".join([*batch, *("h" if "h" in order else ""), "q", "k"])
    moved = torch.einsum(f"{letters.replace(' ', '')}->{target}", logits)
    allowed = torch.einsum(f"{order}->{target}", mask.expand(shape).double()) > 0
    heads = shape[order.index("h")] if "h" in order else 1
    canonical = (-1, heads, shape[order.index("q")], shape[order.index("k")])
    stats = softmax_statistics(logits, mask=mask, **options)
    assert_matches(stats, softmax_reference(moved.reshape(canonical), allowed.reshape(canonical)))
    call, move = softmax_call(logits, **options)
    assert call.logits is not None
    torch.testing.assert_close(move(logits), call.logits)


def test_one_axis_of_logits_is_one_row() -> None:
    logits = torch.randn(K)
    expected = softmax_reference(logits[None, None, None], torch.ones(1, 1, 1, K, dtype=torch.bool))
    stats = softmax_statistics(logits, head_dim=5)
    assert_matches(stats, expected)
    assert stats.head_dim == 5


# -- sampled rows ---------------------------------------------------------------


def test_sampled_rows_estimate_and_say_so() -> None:
    query, key = torch.randn(2, 4, 2, 600, 16)
    exact = attention_statistics(query, key, is_causal=True)
    stats = attention_statistics(query, key, is_causal=True, max_queries=150)
    assert (stats.logit_max, stats.logit_min) == (None, None)
    assert stats.approximate == FORWARD - {"logit_max", "logit_min", "k_rms"}
    assert stats.rows.tolist() == [4 * 150] * 2
    for name, tolerance in {"logit_std": 0.02, "entropy": 0.02, "jacobian_trace": 0.01, "q_rms": 0.02}.items():
        assert getattr(stats, name).tolist() == pytest.approx(getattr(exact, name).tolist(), rel=tolerance), name


def test_no_more_rows_than_asked_for_is_exact() -> None:
    query, key = make_inputs()
    stats = attention_statistics(query, key, max_queries=Q)
    assert stats.approximate == frozenset()
    assert_matches(stats, attention_reference(query, key))


def test_each_stretch_of_rows_gives_one_sample() -> None:
    call = AttentionCall(query=torch.zeros(1, 1, 101, D), key=torch.zeros(1, 1, 101, D))
    tiled = tiles.TiledCall.of(call)
    drawn = {tuple(tiled.sampled(7, torch.Generator().manual_seed(seed)).positions) for seed in range(20)}
    assert len(drawn) == 20
    for positions in drawn:
        assert [position * 7 // 101 for position in positions] == pytest.approx(list(range(7)), abs=1)
        assert list(positions) == sorted(set(positions))
        assert max(positions) < 101


# -- the choice of statistics ---------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORWARD))
def test_each_statistic_can_be_chosen_alone(name: str) -> None:
    query, key = make_inputs()
    stats = attention_statistics(query, key, is_causal=True, statistics=[name])
    assert [other for other in ALL if getattr(stats, other) is not None] == [name]
    assert_matches(stats, attention_reference(query, key, is_causal=True), names=[name])
    assert stats.nonfinite.tolist() == [0] * H


def test_statistics_of_gradients_are_none() -> None:
    stats = attention_statistics(*make_inputs(), statistics=sorted(GRADIENTS))
    assert [name for name in ALL if getattr(stats, name) is not None] == []

"""Queries and keys with a nan or inf in them: they do not count, and a head without any other is nan."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from attn_monitor.functional import attention_statistics
from tests.attention_inputs import MASKS, H, K, Q, make_inputs, make_mask, reference_of
from tests.reference import assert_matches

FACTORS = ("q_rms", "k_rms", "qk_std", "alignment")
INFINITE = pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])


def is_nan(stats: AttentionStatistics, name: str) -> list[bool]:
    value = getattr(stats, name)
    assert value is not None
    found: list[bool] = value.isnan().tolist()
    return found


@INFINITE
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("kind", MASKS)
def test_a_head_of_which_every_vector_is_broken_is_nan(kind: str, side: str, value: float) -> None:
    query, key = make_inputs()
    (query if side == "query" else key)[:, 0, :, 3] = value
    mask = make_mask(kind, Q, K)
    stats = attention_statistics(query, key, statistics=FACTORS, **mask)
    broken = [True, False, False]
    assert is_nan(stats, f"{side[0]}_rms") == is_nan(stats, "qk_std") == is_nan(stats, "alignment") == broken
    assert is_nan(stats, "k_rms" if side == "query" else "q_rms") == [False] * H
    assert_matches(stats, reference_of(query, key, **mask), names=FACTORS)


@INFINITE
@pytest.mark.parametrize("kind", MASKS)
def test_broken_vectors_among_others_do_not_count(kind: str, value: float) -> None:
    query, key = make_inputs()
    query[0, 1, 2, 5], key[1, 2, 4, 0] = value, value
    mask = make_mask(kind, Q, K)
    assert_matches(attention_statistics(query, key, **mask), reference_of(query, key, **mask), names=FACTORS)


def test_a_vector_of_which_the_rest_is_large_does_not_count() -> None:
    query, key = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 5, 2)
    query[0, 0, 1], key[0, 0, 2] = torch.tensor([100.0, math.nan]), torch.tensor([math.inf, 50.0])
    stats = attention_statistics(query, key, statistics=["q_rms", "k_rms"])
    assert stats.q_rms is not None
    assert stats.k_rms is not None
    assert stats.q_rms.tolist() == pytest.approx([1.0])
    assert stats.k_rms.tolist() == pytest.approx([1.0])


def test_a_sample_of_rows_leaves_broken_queries_out() -> None:
    query, key = torch.full((1, 1, 101, 2), 3.0), torch.ones(1, 1, 5, 2)
    query[:, :, ::2, 1] = math.nan
    stats = attention_statistics(query, key, statistics=["q_rms"], max_queries=23)
    assert stats.q_rms is not None
    assert stats.q_rms.tolist() == pytest.approx([3.0])
    assert float(stats.standard_error.get("q_rms", torch.zeros(1))) == pytest.approx(0.0, abs=1e-5)


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.out = nn.Linear(7, 7)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if self.fused:
            return self.out(F.scaled_dot_product_attention(query, key, key))
        return self.out((query @ key.mT / math.sqrt(7)).softmax(-1) @ key)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_probe_says_the_same(fused: bool, gradients: bool) -> None:
    query, key = make_inputs()
    query[:, 0, :, 3], query[0, 1, 2, 5] = math.nan, math.inf
    model = Attention(fused)
    with AttentionProbe(model, gradients=gradients) as probe:
        model(query.requires_grad_(), key.requires_grad_()).nan_to_num().sum().backward()
    [stats] = probe.compute().values()
    assert is_nan(stats, "q_rms") == is_nan(stats, "alignment") == [True, False, False]
    assert_matches(stats, reference_of(query.detach(), key.detach()), names=FACTORS)

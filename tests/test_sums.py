"""Merging is pooling, exactly, in any order."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_monitor.catalog import ALL, GRADIENTS
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums, pool_moments
from tests.gradient_sums import attention_gradient_sums
from tests.reference import assert_matches, attention_reference

B, H, Q, D, V = 5, 3, 11, 7, 5


def assert_same(one: AttentionStatistics, other: AttentionStatistics) -> None:
    assert one.measured().keys() == other.measured().keys()
    for name, value in one.measured().items():
        torch.testing.assert_close(value, getattr(other, name), rtol=1e-6, atol=1e-7, msg=name, equal_nan=True)


def test_merged_calls_equal_the_pooled_call() -> None:
    query, key, value = torch.randn(B, H, Q, D), torch.randn(B, H, Q, D), torch.randn(B, H, Q, V)
    query[3] *= 5  # the parts differ, so that a mean of means would show
    mask = (torch.arange(Q) < torch.tensor([[11], [3], [1], [0], [7]]))[:, None, None]
    grad = torch.randn(B, H, Q, V)

    def sums(items: slice) -> AttentionSums:
        call = AttentionCall(query=query[items], key=key[items], value=value[items], masks=(mask[items],))
        return attention_sums(call, ALL).merge(attention_gradient_sums(call, grad[items]))

    parts = [sums(items) for items in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5))]
    whole = sums(slice(0, B))
    for order in (parts, parts[::-1], [parts[2], parts[0], parts[3], parts[1]]):
        merged = reduce(AttentionSums.merge, order)
        assert_same(merged.finalize(ALL), whole.finalize(ALL))
        assert merged.calls == 4
    stats = parts[0].merge(parts[1].merge(parts[2]).merge(parts[3])).finalize(ALL)
    assert_same(stats, whole.finalize(ALL))
    assert_matches(stats, attention_reference(query, key, masks=[mask], scale=1.0))
    assert (stats.head_dim, stats.keys) == (D, Q)


def test_calls_of_different_lengths_pool_by_row() -> None:
    short, long = torch.zeros(1, 1, 2, D), torch.zeros(1, 1, 8, D)
    sums = [attention_sums(AttentionCall(query=x, key=x), ALL) for x in (short, long)]
    stats = sums[0].merge(sums[1]).finalize(ALL)
    assert stats.entropy is not None
    assert stats.entropy.item() == pytest.approx((2 * math.log(2) + 8 * math.log(8)) / 10)
    assert (stats.keys, stats.calls) == (8, 2)


def test_gradients_of_several_losses() -> None:
    squares = [torch.tensor([9.0]), torch.tensor([16.0])]
    parts = [AttentionSums.from_gradients(x, 4 * x, rows=torch.tensor([2])) for x in squares]
    stats = parts[0].merge(parts[1]).finalize(GRADIENTS, losses=2)
    assert stats.grad_logits_norm is not None
    assert stats.grad_probs_norm is not None
    assert stats.gradient_gain is not None
    assert stats.grad_logits_norm.item() == pytest.approx(5 / 2)
    assert stats.grad_probs_norm.item() == pytest.approx(10 / 2)
    assert stats.gradient_gain.item() == pytest.approx(0.5)
    divided = parts[0].divided_gradients(torch.tensor(6.0)).finalize(GRADIENTS)
    assert divided.grad_logits_norm is not None
    assert divided.grad_logits_norm.item() == pytest.approx(3 / 6)
    assert divided.gradient_gain is not None
    assert divided.gradient_gain.item() == pytest.approx(0.5)


def test_gradients_leave_the_facts_of_the_forward_pass() -> None:
    call = AttentionCall(query=torch.randn(1, H, Q, D), key=torch.randn(1, H, Q, D))
    forward = attention_sums(call, frozenset({"entropy"}))
    one = torch.ones(H)
    gradients = AttentionSums.from_gradients(one, one, rows=one, approximate=GRADIENTS)
    for merged in (forward.merge(gradients), gradients.merge(forward)):
        assert (merged.calls, merged.head_dim, merged.keys) == (1, D, Q)
        assert merged.measured == {"entropy"} | GRADIENTS
        assert merged.finalize(ALL).approximate == GRADIENTS
        assert merged.finalize(frozenset({"entropy"})).approximate == frozenset()


def test_a_maximum_of_sampled_rows_is_no_maximum_of_all() -> None:
    call = AttentionCall(query=torch.randn(1, H, Q, D), key=torch.randn(1, H, Q, D))
    exact, sampled = attention_sums(call, ALL), attention_sums(call, ALL, 4)
    for merged in (exact.merge(sampled), sampled.merge(exact)):
        stats = merged.finalize(ALL)
        assert stats.logit_max is None
        assert "entropy" in stats.approximate


def test_head_dimensions_that_differ_are_unknown() -> None:
    calls = [AttentionCall(query=torch.randn(1, H, Q, d), key=torch.randn(1, H, Q, d)) for d in (3, 5)]
    merged = reduce(AttentionSums.merge, [attention_sums(call, ALL) for call in calls])
    stats = merged.finalize(ALL)
    assert (stats.head_dim, stats.scale_ratio, stats.alignment) == (None, None, None)
    assert stats.qk_std is not None


def test_heads_that_differ_are_an_error() -> None:
    calls = [AttentionCall(logits=torch.zeros(1, heads, 2, 2)) for heads in (2, 3)]
    with pytest.raises(ValueError, match="2 heads and attention with 3 heads"):
        attention_sums(calls[0], ALL).merge(attention_sums(calls[1], ALL))


def test_statistics_not_asked_for_stay_out() -> None:
    call = AttentionCall(query=torch.randn(1, H, Q, D), key=torch.randn(1, H, Q, D))
    stats = attention_sums(call, ALL).finalize(frozenset({"entropy", "q_rms"}))
    assert stats.measured().keys() == {
        *("entropy", "q_rms"),
        *("scale", "scale_ratio", "rows", "masked_rows", "nonfinite"),
    }


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_moments_pool_like_the_samples(groups: list[list[float]], random: object) -> None:
    def moments(samples: list[float]) -> torch.Tensor:
        values = torch.tensor(samples, dtype=torch.float64)
        mean = values.mean() if samples else torch.zeros((), dtype=torch.float64)
        return torch.stack([torch.tensor(float(len(samples))).double(), mean, (values - mean).square().sum()])[:, None]

    pooled = pool_moments(torch.stack([moments(group) for group in groups]))
    expected = moments([sample for group in groups for sample in group])
    size = max((abs(sample) for group in groups for sample in group), default=0.0)
    torch.testing.assert_close(pooled, expected, rtol=1e-9, atol=1e-10 * (1 + size) ** 2)
    one_by_one = reduce(lambda a, b: pool_moments(torch.stack([a, b])), [moments(group) for group in groups])
    torch.testing.assert_close(one_by_one, expected, rtol=1e-9, atol=1e-10 * (1 + size) ** 2)

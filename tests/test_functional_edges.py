"""Precisions, values that are no numbers, rows with nothing to measure, sinks and scales inside query and key."""

from __future__ import annotations

import math

import pytest
import torch

from attn_monitor.catalog import ALL
from attn_monitor.functional import attention_statistics
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.statistics import attention_sums
from tests.attention_inputs import FORWARD, MASKS, B, D, H, K, Q, make_inputs, make_mask, reference_of
from tests.reference import (
    PROBABILITIES,
    assert_matches,
    attention_reference,
    dense_logits,
    factor_reference,
    softmax_reference,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["causal", "additive"])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype, kind: str) -> None:
    query, key = (tensor.to(dtype) for tensor in make_inputs(std=3.0))
    mask = make_mask(kind, Q, K)
    assert_matches(attention_statistics(query, key, **mask), reference_of(query, key, **mask))


@pytest.mark.parametrize("kind", MASKS)
def test_double_inputs_stay_double(kind: str) -> None:
    query, key = (tensor.double() for tensor in make_inputs())
    mask = make_mask(kind, Q, K)
    assert_matches(
        attention_statistics(query, key, **mask), reference_of(query, key, **mask), relative=1e-12, absolute=1e-13
    )


def test_logits_beyond_the_range_of_float16_stay_finite() -> None:
    query = key = torch.full((1, 1, 3, 128), 25.0, dtype=torch.float16)  # 80000 before the scale
    stats = attention_statistics(query, key)
    assert stats.logit_max is not None
    assert stats.logit_max.item() == pytest.approx(128 * 625 / math.sqrt(128), rel=1e-6)
    assert stats.nonfinite.tolist() == [0.0]
    assert stats.entropy is not None
    assert stats.entropy.item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_counted_and_left_out(bad: float) -> None:
    query, key = make_inputs()
    query[0, 1, 2, 3] = bad  # a row of bad logits, of both signs for inf
    bias = torch.zeros(B, H, Q, K)
    bias[1, 2, 4, 5] = math.nan  # one bad logit among good ones
    stats = attention_statistics(query, key, attn_mask=bias)
    product, logits, allowed = dense_logits(query, key, masks=[bias], scale=D**-0.5)
    allowed[1, 2, 4, 5] = True  # nan blocks nothing
    expected = softmax_reference(logits, allowed) | factor_reference(query, key, product, allowed, D**-0.5)
    assert expected["nonfinite"].tolist() == [0, K, 1]
    assert_matches(stats, expected)


def test_a_head_without_rows_is_nan_and_a_statistic_without_any_is_none() -> None:
    query, key = make_inputs()
    mask = torch.ones(H, Q, K, dtype=torch.bool)
    mask[1] = False
    stats = attention_statistics(query, key, attn_mask=mask)
    for name in FORWARD:
        value = getattr(stats, name)
        assert value.isnan().tolist() == [False, True, False], name
    assert stats.masked_rows.tolist() == [0, B * Q, 0]

    nothing = attention_statistics(query, key, attn_mask=torch.zeros(1, 1, dtype=torch.bool))
    assert [name for name in ALL if getattr(nothing, name) is not None] == []
    assert nothing.masked_rows.tolist() == [B * Q] * H
    assert nothing.rows.tolist() == [0] * H


def test_a_single_key_enters_the_logits_only() -> None:
    query, key = make_inputs(keys=1)
    stats = attention_statistics(query, key)
    expected = reference_of(query, key)
    assert_matches(stats, expected)
    assert stats.entropy is None
    assert stats.logit_row_std is None
    assert stats.rows.tolist() == [B * Q] * H


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"keys": 0}, {"batch": 0, "queries": 0, "keys": 0}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_axes_measure_nothing(sizes: dict[str, int], is_causal: bool) -> None:
    stats = attention_statistics(*make_inputs(**sizes), is_causal=is_causal, attn_mask=torch.zeros(1, 1))
    assert [name for name in FORWARD if getattr(stats, name) is not None] == []
    assert stats.rows.tolist() == [0] * H
    rows = sizes.get("batch", B) * sizes.get("queries", Q)
    assert stats.masked_rows.tolist() == [rows] * H


# -- a learned sink, scales inside q and k ---------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("height", [-100.0, 0.0, 100.0])
def test_a_learned_sink_is_one_more_outcome(is_causal: bool, height: float) -> None:
    query, key = make_inputs()
    sinks = torch.tensor([height, height + 1, 0.5])
    call = AttentionCall(query=query, key=key, scale=D**-0.5, is_causal=is_causal, sinks=sinks)
    stats = attention_sums(call, FORWARD).finalize(FORWARD)
    assert_matches(stats, attention_reference(query, key, is_causal=is_causal, sinks=sinks))


def test_the_scale_is_divided_out_of_query_and_key() -> None:
    query, key = make_inputs()
    expected = attention_reference(query, key)
    part = torch.tensor([0.5, 2.0, -3.0])
    call = AttentionCall(
        query=query * part[:, None, None],
        key=key * D**-0.25,
        query_scale=part,
        key_scale=D**-0.25,
        scale=D**-0.25 / part,
    )
    stats = attention_sums(call, FORWARD).finalize(FORWARD)
    assert_matches(stats, expected)
    assert stats.scale is not None
    assert stats.scale.tolist() == pytest.approx([D**-0.5] * H)


# -- errors ---------------------------------------------------------------


def test_without_a_batch_axis_there_is_one_item() -> None:
    query, key = make_inputs(batch=1)
    one: AttentionStatistics = attention_statistics(query[0], key[0], is_causal=True)
    assert_matches(one, attention_reference(query, key, is_causal=True), names=PROBABILITIES)

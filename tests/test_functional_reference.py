"""The forward statistics against the float64 reference and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_monitor import tiles
from attn_monitor.functional import attention_statistics, softmax_statistics
from tests.attention_inputs import MASKS, B, D, H, K, Q, make_inputs, make_mask, reference_of
from tests.reference import (
    PROBABILITIES,
    assert_matches,
    softmax_reference,
)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", [(Q, Q), (Q, K), (K, Q)], ids=["self", "cross", "cross, fewer keys"])
@pytest.mark.parametrize("std", [1.0, 10.0])
def test_masks_match_the_reference(kind: str, sizes: tuple[int, int], std: float) -> None:
    queries, keys = sizes
    query, key = make_inputs(queries=queries, keys=keys, std=std)
    mask = make_mask(kind, queries, keys)
    assert_matches(attention_statistics(query, key, **mask), reference_of(query, key, **mask))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1.0},
        {"scale": -0.3},
        {"scale": torch.tensor(0.7)},
        {"scale": torch.tensor([0.5, 1.0, 2.0])},
        {"softcap": 1.5},
        {"softcap": 1.5, "is_causal": True, "scale": 2.0},
    ],
    ids=str,
)
def test_scale_and_softcap_match_the_reference(options: dict[str, Any]) -> None:
    query, key = make_inputs()
    mask = torch.randn(Q, K)  # a bias is added after the cap
    stats = attention_statistics(query, key, attn_mask=mask, **options)
    assert_matches(stats, reference_of(query, key, mask, **options))
    scale = options.get("scale", D**-0.5)
    expected = torch.as_tensor(scale).double().expand(H)
    torch.testing.assert_close(stats.scale, expected)
    torch.testing.assert_close(stats.scale_ratio, expected * math.sqrt(D))


@pytest.mark.parametrize("kind", ["none", "causal", "masked rows"])
@pytest.mark.parametrize("groups", [1, 2])
def test_query_heads_share_key_heads(kind: str, groups: int) -> None:
    query, key = make_inputs(heads=6, groups=groups)
    mask = make_mask(kind, Q, K)
    stats = attention_statistics(query, key, enable_gqa=True, **mask)
    assert_matches(stats, reference_of(query, key, **mask))
    repeated = attention_statistics(query, key.repeat_interleave(6 // groups, dim=1), **mask)
    for name, value in stats.measured().items():
        torch.testing.assert_close(value, getattr(repeated, name), msg=name, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("elements", [1, 50, 1000])
def test_the_size_of_tiles_does_not_matter(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = make_inputs()
    mask = make_mask("left padding and causal", Q, K)
    expected = reference_of(query, key, **mask)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
    assert_matches(attention_statistics(query, key, **mask), expected)


@pytest.mark.parametrize("std", [1e2, 1e4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_logits_keep_accurate_probabilities(std: float, is_causal: bool) -> None:
    query, key = make_inputs(std=std)
    logits = query @ key.mT  # the float32 product itself moves the probabilities: compare for the same logits
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask = mask.tril() if is_causal else mask
    stats = softmax_statistics(logits, mask=mask)
    expected = softmax_reference(logits, mask.expand(B, H, Q, K))
    assert_matches(stats, expected)
    for name in ("entropy", "jacobian_trace", "jacobian_norm"):  # not cancelled away, however small
        torch.testing.assert_close(getattr(stats, name), expected[name], rtol=1e-5, atol=1e-12, msg=name)


def test_a_large_offset_leaves_the_spread_exact() -> None:
    logits = torch.randn(B, H, Q, 101) + 1e4
    stats = softmax_statistics(logits)
    expected = softmax_reference(logits, torch.ones_like(logits, dtype=torch.bool))
    assert_matches(stats, expected)
    assert stats.logit_std is not None
    assert stats.logit_std.tolist() == pytest.approx([1.0] * H, abs=0.05)


@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0, 1000.0])
def test_a_nearly_one_hot_row_in_closed_form(gap: float) -> None:
    stats = softmax_statistics(torch.tensor([gap, 0.0]))
    rest = math.exp(-gap)
    p, q = 1 / (1 + rest), rest / (1 + rest)
    assert stats.jacobian_trace is not None
    assert stats.jacobian_norm is not None
    assert stats.entropy is not None
    assert stats.max_probability is not None
    assert stats.jacobian_trace.item() == pytest.approx(4 * p * q, rel=1e-6)
    assert stats.jacobian_norm.item() == pytest.approx(2 * p * q, rel=1e-6)
    assert stats.entropy.item() == pytest.approx(math.log1p(rest) + gap * q, rel=1e-6)
    assert stats.max_probability.item() == pytest.approx(p, rel=1e-6)


def test_uniform_rows_in_closed_form() -> None:
    stats = attention_statistics(torch.zeros(B, H, Q, D), torch.randn(B, H, K, D))
    ones = torch.ones(H, dtype=torch.float64)
    expected = {
        "logit_mean": 0 * ones,
        "logit_std": 0 * ones,
        "logit_row_std": 0 * ones,
        "critical_ratio": 0 * ones,
        "entropy": math.log(K) * ones,
        "entropy_normalized": ones,
        "max_probability": ones / K,
        "sink_mass": ones / K,
        "jacobian_trace": ones,
        "jacobian_norm": math.sqrt(K - 1) / K * ones,
        "rows": B * Q * ones,
        "masked_rows": 0 * ones,
        "nonfinite": 0 * ones,
    }
    assert_matches(stats, expected)
    assert (stats.head_dim, stats.keys, stats.calls, stats.approximate) == (D, K, 1, frozenset())
    assert stats.alignment is not None
    assert stats.alignment.isnan().all()  # q is 0: there is nothing to align


def test_a_uniform_causal_mask_normalises_each_row_by_its_own_keys() -> None:
    stats = attention_statistics(torch.zeros(B, H, Q, D), torch.zeros(B, H, Q, D), is_causal=True)
    lengths = torch.arange(2, Q + 1, dtype=torch.float64)  # the first row has one key
    ones = torch.ones(H, dtype=torch.float64)
    expected = {
        "entropy": lengths.log().mean() * ones,
        "entropy_normalized": ones,
        "sink_mass": (1 / lengths).mean() * ones,
        "jacobian_trace": ones,
        "rows": B * Q * ones,
    }
    assert_matches(stats, expected)


def test_unscaled_attention_starts_at_the_root_of_the_head_dimension() -> None:
    query, key = torch.randn(2, 8, 3, 256, 64)
    stats = attention_statistics(query, key, scale=1.0, statistics=["logit_std", "logit_row_std", "alignment"])
    for value in (stats.logit_std, stats.logit_row_std):
        assert value is not None
        assert value.tolist() == pytest.approx([8.0] * 3, rel=0.05)
    assert stats.scale_ratio is not None
    assert stats.scale_ratio.tolist() == [8.0] * 3
    assert stats.alignment is not None
    assert stats.alignment.tolist() == pytest.approx([1.0] * 3, rel=0.05)


def test_gaussian_logits_condense_at_critical_ratio_one() -> None:
    keys = 128
    logits = torch.randn(1, 2, 500, keys) * math.sqrt(2 * math.log(keys))
    stats = softmax_statistics(logits, statistics=["critical_ratio"])
    assert stats.critical_ratio is not None
    assert stats.critical_ratio.tolist() == pytest.approx([1.0, 1.0], rel=0.02)


def test_alignment_of_vectors_on_one_line_is_the_root_of_the_head_dimension() -> None:
    direction = torch.randn(64)
    signs = torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    line = (signs * direction)[None, None]
    stats = attention_statistics(line, line)
    assert stats.alignment is not None
    assert stats.alignment.item() == pytest.approx(8.0)


# -- errors ---------------------------------------------------------------


@pytest.mark.parametrize("std", [1e3, 1e4, 1e5])
def test_near_ties_among_huge_logits_are_as_exact_as_the_logits(std: float) -> None:
    logits = std * torch.randn(2, 3, 50, 16)
    largest = logits.amax(-1, keepdim=True)
    logits[..., :3] = largest - 2 * torch.rand(2, 3, 50, 3)  # several probabilities of the same size
    found = softmax_statistics(logits)
    wanted = softmax_reference(logits.double(), torch.ones_like(logits, dtype=torch.bool))
    assert_matches(found, wanted, relative=1e-6, absolute=1e-7, names=PROBABILITIES)

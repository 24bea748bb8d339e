"""Sampled rows: estimates without bias, and errors that are as large as they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_monitor import AttentionStatistics
from attn_monitor.catalog import STATISTICS
from attn_monitor.functional import attention_statistics
from attn_monitor.records import AttentionCall
from attn_monitor.softmax_gradients import qualifying_entries, softmax_gradient_sums
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from attn_monitor.uncertainty import variance_of_sum
from tests.gradient_sums import attention_gradient_sums
from tests.reference import gradient_reference

B, H, T, D, V, SAMPLED, DRAWS = 3, 2, 101, 7, 5, 23, 200
ALL = frozenset(STATISTICS)
EXACT = {"logit_max", "logit_min", "k_rms"}
ROOTS = {"logit_std", "logit_row_std", "critical_ratio", "qk_std", "q_rms", "grad_logits_norm", "grad_probs_norm"}
WITHOUT = {"alignment", "gradient_gain"}
"""Ratios of two estimates: no error is told."""


def make_call() -> tuple[AttentionCall, Tensor]:
    torch.manual_seed(0)
    position = torch.linspace(0.3, 3, T)[:, None]  # later rows are sharper
    query, key = torch.randn(B, H, T, D) * position, torch.randn(B, H, T, D)
    call = AttentionCall(query=query, key=key, value=torch.randn(B, H, T, V), is_causal=True)
    return call, torch.randn(B, H, T, V)


def draws(sums: list[AttentionSums], name: str) -> tuple[Tensor, Tensor]:
    """Return the estimates and their standard errors, [draws, H]."""
    stats = [one.finalize(ALL) for one in sums]
    values = [getattr(one, name) for one in stats]
    return torch.stack(values), torch.stack([one.standard_error[name] for one in stats])


@pytest.fixture(scope="module")
def sampled() -> tuple[AttentionStatistics, list[AttentionSums]]:
    call, grad_output = make_call()
    generator = torch.Generator().manual_seed(1)
    exact = attention_sums(call, ALL, grad_output=grad_output).finalize(ALL)
    return exact, [attention_sums(call, ALL, SAMPLED, generator, grad_output=grad_output) for _ in range(DRAWS)]


@pytest.mark.parametrize("name", sorted(ALL - EXACT - WITHOUT))
def test_estimates_are_right_on_average_and_their_errors_are_those_they_tell(
    name: str, sampled: tuple[AttentionStatistics, list[AttentionSums]]
) -> None:
    exact = getattr(sampled[0], name)
    values, errors = draws(sampled[1], name)
    spread = values.std(0)
    # Means, variances and squares of norms have no bias; a root is a little too small, by its variance / 2 value.
    unbiased, wanted = (values.square(), exact.square()) if name in ROOTS else (values, exact)
    uncertainty = unbiased.std(0) / math.sqrt(DRAWS)
    assert ((unbiased.mean(0) - wanted).abs() < 4 * uncertainty + 1e-6).all(), name
    told = errors.square().mean(0).sqrt()
    assert (told > 0.8 * spread).all(), f"{name}: told {told.tolist()}, in truth {spread.tolist()}"
    assert (told < 1.6 * spread).all(), f"{name}: told {told.tolist()}, in truth {spread.tolist()}"


def test_what_is_exact_has_no_error_and_what_is_sampled_no_extrema(
    sampled: tuple[AttentionStatistics, list[AttentionSums]],
) -> None:
    exact, sums = sampled
    assert dict(exact.standard_error) == {}
    stats = sums[0].finalize(ALL)
    assert set(stats.standard_error) == ALL - EXACT - WITHOUT
    assert (stats.logit_max, stats.logit_min) == (None, None)
    assert stats.approximate == ALL - EXACT
    torch.testing.assert_close(stats.k_rms, exact.k_rms)
    assert stats.rows.tolist() == [B * SAMPLED] * H


def test_errors_of_pooled_calls_shrink_with_their_number(
    sampled: tuple[AttentionStatistics, list[AttentionSums]],
) -> None:
    one, four = sampled[1][0], sampled[1][0]
    for other in sampled[1][1:4]:
        four = four.merge(other)
    single, pooled = one.finalize(ALL), four.finalize(ALL)
    for name in ("entropy_normalized", "logit_std"):
        ratio = pooled.standard_error[name] / single.standard_error[name]
        assert ((ratio > 0.3) & (ratio < 0.75)).all(), f"{name}: {ratio.tolist()}, expected about 1/2"


def test_the_gradients_of_a_softmax_tell_their_error() -> None:
    call, grad_output = make_call()
    assert call.query is not None
    assert call.key is not None
    assert call.value is not None
    seen = gradient_reference(call.query, call.key, call.value, grad_output, is_causal=True, scale=1.0)
    generator = torch.Generator().manual_seed(1)
    sums = []
    for _ in range(DRAWS):
        entries = qualifying_entries(call, SAMPLED, generator)
        sums.append(softmax_gradient_sums(entries, grad_logits=seen["grad_logits"], grad_probs=seen["grad_probs"]))
    for name in ("grad_logits_norm", "grad_probs_norm"):
        values, errors = draws(sums, name)
        assert ((values.square().mean(0) / seen[name].square() - 1).abs() < 0.05).all()
        ratio = errors.square().mean(0).sqrt() / values.std(0)
        assert ((ratio > 0.8) & (ratio < 1.6)).all(), f"{name}: {ratio.tolist()}"


def test_the_scale_of_the_loss_divides_the_error_too() -> None:
    call, grad_output = make_call()
    sums = attention_gradient_sums(call, grad_output, SAMPLED)
    plain, divided = sums.finalize(ALL), sums.divided_gradients(8.0).finalize(ALL, losses=2)
    for name in ("grad_logits_norm", "grad_probs_norm"):
        torch.testing.assert_close(divided.standard_error[name], plain.standard_error[name] / 16)


def test_the_variance_of_a_sum_in_closed_form() -> None:
    # Two strata of three rows each, of which one was drawn: (1 - 2/6) * (5 - 1)^2, from the two of them.
    parts = torch.tensor([1.0, 5.0]).reshape(1, 1, 1, 2)
    assert variance_of_sum(parts, torch.tensor([3.0, 3.0])).item() == pytest.approx(2 / 3 * 16)
    assert variance_of_sum(parts[..., :1], torch.tensor([6.0])).isnan().all()


def test_a_single_row_has_an_unknown_error() -> None:
    query, key = torch.randn(2, 1, 1, 9, 4)
    stats = attention_statistics(query, key, max_queries=1)
    assert stats.standard_error["entropy"].isnan().all()


def test_the_first_key_is_that_of_all_rows_also_where_a_mask_hides_it_from_the_sample() -> None:
    position = torch.arange(128)
    window = (position[:, None] - position <= 4) & (position <= position[:, None])
    query, key = torch.randn(2, 1, 1, 128, 16)
    call, names = AttentionCall(query=query, key=key, scale=0.5, masks=(window,)), frozenset({"sink_mass"})
    exact = attention_sums(call, names).finalize(names).sink_mass
    generator = torch.Generator().manual_seed(1)
    stats = [attention_sums(call, names, 32, generator).finalize(names).sink_mass for _ in range(DRAWS)]
    seen = torch.stack([one for one in stats if one is not None])
    assert exact is not None
    assert (seen.mean(0) - exact).abs() < 4 * seen.std(0) / math.sqrt(DRAWS)


@pytest.mark.parametrize("count", [85, 100, 127])
def test_rows_that_are_all_alike_are_certain(count: int) -> None:
    # Stretches of one and of two rows stand for different numbers of rows: that is no spread.
    query, key, value = torch.ones(1, 1, 128, D), torch.randn(1, 1, 64, D), torch.randn(1, 1, 64, V)
    call = AttentionCall(query=query, key=key, value=value)
    stats = attention_gradient_sums(call, torch.ones(1, 1, 128, V), count).finalize(ALL)
    assert stats.grad_logits_norm is not None
    error = stats.standard_error.get("grad_logits_norm", torch.zeros(1))
    assert error.item() < 1e-5 * stats.grad_logits_norm.item()


def test_a_statistic_that_is_zero_has_no_error() -> None:
    stats = attention_statistics(torch.zeros(1, 1, 64, 4), torch.randn(1, 1, 64, 4), max_queries=8)
    for name in ("logit_std", "logit_row_std", "q_rms", "qk_std"):
        value = getattr(stats, name)
        assert value.tolist() == [0.0]
        assert stats.standard_error.get(name, torch.zeros(1)).tolist() == [0.0]

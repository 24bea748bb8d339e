"""Gradients at the softmax against float64 autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_monitor import tiles
from attn_monitor.catalog import GRADIENTS
from attn_monitor.records import AttentionCall
from attn_monitor.softmax_gradients import qualifying_entries, softmax_gradient_sums
from tests.gradient_sums import attention_gradient_sums
from tests.reference import assert_matches, dense_logits, gradient_reference
from tests.surroundings import hostile_surroundings

B, H, G, Q, K, D, V = 2, 6, 3, 11, 13, 7, 5
NORMS = ("grad_logits_norm", "grad_probs_norm", "gradient_gain")


def make_tensors(std: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key = torch.randn(B, H, Q, D) * std**0.5, torch.randn(B, G, K, D) * std**0.5
    return query, key, torch.randn(B, G, K, V), torch.randn(B, H, Q, V)


def make_options(kind: str) -> dict[str, Any]:
    rows = torch.rand(Q, K) > 0.4
    rows[2] = False
    rows[3] = torch.arange(K) == 4  # one allowed key: its gradient does not count
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"masks": (torch.rand(B, 1, Q, K) > 0.5,)},
        "masked rows": {"masks": (rows,)},
        "additive": {"masks": (torch.randn(H, Q, K), torch.where(rows, 0.0, -1e9))},
        "softcap": {"softcap": 1.5, "is_causal": True},
        "sinks": {"sinks": torch.linspace(-3, 20, H), "is_causal": True},
    }
    return options[kind]


KINDS = ["none", "causal", "bool", "masked rows", "additive", "softcap", "sinks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", [1.0, 10.0])
def test_a_fused_kernel_matches_autograd(kind: str, std: float) -> None:
    query, key, value, grad_output = make_tensors(std)
    options = make_options(kind)
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5, **options)
    stats = attention_gradient_sums(call, grad_output).finalize(GRADIENTS)
    assert_matches(stats, gradient_reference(query, key, value, grad_output, **options), names=NORMS)
    assert (stats.calls, stats.approximate) == (0, frozenset())


@pytest.mark.parametrize("kind", KINDS)
def test_double_inputs_stay_double(kind: str) -> None:
    query, key, value, grad_output = (tensor.double() for tensor in make_tensors())
    options = make_options(kind)
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5, **options)
    stats = attention_gradient_sums(call, grad_output).finalize(GRADIENTS)
    expected = gradient_reference(query, key, value, grad_output, **options)
    assert_matches(stats, expected, names=NORMS, relative=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    query, key, value, grad_output = (tensor.to(dtype) for tensor in make_tensors())
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5, is_causal=True)
    stats = attention_gradient_sums(call, grad_output).finalize(GRADIENTS)
    assert_matches(stats, gradient_reference(query, key, value, grad_output, is_causal=True), names=NORMS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sinks"])
def test_the_gradients_of_a_softmax_match_autograd(kind: str) -> None:
    query, key, value, grad_output = make_tensors()
    options = make_options(kind)
    expected = gradient_reference(query, key, value, grad_output, **options)
    call = AttentionCall(query=query, key=key, scale=D**-0.5, **options)
    seen = {name: expected[name].float() for name in ("grad_logits", "grad_probs")}
    both = softmax_gradient_sums(
        qualifying_entries(call), grad_logits=seen["grad_logits"], grad_probs=seen["grad_probs"]
    ).finalize(GRADIENTS)
    assert_matches(both, expected, names=NORMS)
    _, logits, allowed = dense_logits(query, key, scale=D**-0.5, **options)
    bare = AttentionCall(logits=logits.float().masked_fill(~allowed, -math.inf))
    torch.testing.assert_close(qualifying_entries(bare).bits, qualifying_entries(call).bits)

    one = softmax_gradient_sums(qualifying_entries(call), grad_logits=seen["grad_logits"]).finalize(GRADIENTS)
    assert_matches(one, expected, names=NORMS[:1])
    assert (one.grad_probs_norm, one.gradient_gain) == (None, None)


def test_a_row_with_a_bad_logit_does_not_count() -> None:
    query, key, value, grad_output = make_tensors()
    bias = torch.zeros(B, H, Q, K)
    bias[1, 2, 3, 4] = math.nan
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5, masks=(bias,))
    entries = qualifying_entries(call).keep(slice(None), slice(None), slice(None)).bool()
    assert entries.shape == (B, H, Q, K)
    assert not entries[1, 2, 3].any()
    assert int((~entries).sum()) == K
    stats = attention_gradient_sums(call, grad_output).finalize(GRADIENTS)
    grad_output[1, 2, 3] = 0  # as if the row had no gradient
    expected = gradient_reference(query, key, value, grad_output)
    assert_matches(stats, expected, names=NORMS)


def test_padded_values_may_hold_nan() -> None:
    query, key, value, grad_output = make_tensors()
    mask = (torch.arange(K) < 9)[None, None, None]
    expected = gradient_reference(query, key, value, grad_output, masks=(mask,))
    value[:, :, 9:] = math.nan
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5, masks=(mask,))
    stats = attention_gradient_sums(call, grad_output).finalize(GRADIENTS)
    assert_matches(stats, expected, names=NORMS)


@pytest.mark.parametrize("size", [1e-25, 1e15])
def test_tiny_and_huge_gradients_survive_squaring(size: float) -> None:
    query, key, value, grad_output = make_tensors()
    grad_output = grad_output * size
    expected = gradient_reference(query, key, value, grad_output)
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5)
    assert_matches(attention_gradient_sums(call, grad_output).finalize(GRADIENTS), expected, names=NORMS)
    seen = {name: expected[name].float() for name in ("grad_logits", "grad_probs")}
    assert_matches(
        softmax_gradient_sums(
            qualifying_entries(call), grad_logits=seen["grad_logits"], grad_probs=seen["grad_probs"]
        ).finalize(GRADIENTS),
        expected,
        names=NORMS,
    )


@pytest.mark.parametrize("gap", [10.0, 40.0, 80.0])
def test_the_gradient_of_a_saturated_row_in_closed_form(gap: float) -> None:
    # Two keys: dS = +-p(1 - p)(dP_0 - dP_1), however close p is to 1.
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([gap, 0.0]).reshape(1, 1, 2, 1)
    call = AttentionCall(query=query, key=key, value=torch.tensor([5.0, 2.0]).reshape(1, 1, 2, 1))
    stats = attention_gradient_sums(call, torch.ones(1, 1, 1, 1)).finalize(GRADIENTS)
    rest = math.exp(-gap)
    assert stats.grad_logits_norm is not None
    assert stats.grad_logits_norm.item() == pytest.approx(3 * math.sqrt(2) * rest / (1 + rest) ** 2, rel=1e-5)
    assert stats.grad_probs_norm is not None
    assert stats.grad_probs_norm.item() == pytest.approx(math.sqrt(29))


def test_uniform_rows_pass_one_nth() -> None:
    # The Jacobian of a uniform row is (I - 11^T/n)/n: a dP orthogonal to 1 is divided by n.
    value = torch.eye(K)[None, None] - 1 / K
    call = AttentionCall(query=torch.zeros(1, 1, Q, D), key=torch.zeros(1, 1, K, D), value=value)
    stats = attention_gradient_sums(call, torch.randn(1, 1, Q, K)).finalize(GRADIENTS)
    assert stats.gradient_gain is not None
    assert stats.gradient_gain.item() == pytest.approx(1 / K, rel=1e-5)


def test_the_size_of_tiles_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, grad_output = make_tensors()
    expected = gradient_reference(query, key, value, grad_output, is_causal=True)
    call = AttentionCall(query=query, key=key, value=value, scale=D**-0.5, is_causal=True)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 100)
    monkeypatch.setattr(tiles, "MAX_ROWS", 7)
    assert_matches(attention_gradient_sums(call, grad_output).finalize(GRADIENTS), expected, names=NORMS)
    seen = {name: expected[name] for name in ("grad_logits", "grad_probs")}
    sums = softmax_gradient_sums(
        qualifying_entries(call), grad_logits=seen["grad_logits"], grad_probs=seen["grad_probs"]
    )
    assert_matches(sums.finalize(GRADIENTS), expected, names=NORMS, relative=1e-12)


def test_dropout_makes_gradients_approximate() -> None:
    query, key, value, grad_output = make_tensors()
    call = AttentionCall(query=query, key=key, value=value, dropout=True)
    assert attention_gradient_sums(call, grad_output).finalize(GRADIENTS).approximate == set(NORMS)


def test_zero_gradients_are_zero_and_no_rows_are_none() -> None:
    query, key, value, grad_output = make_tensors()
    call = AttentionCall(query=query, key=key, value=value)
    stats = attention_gradient_sums(call, torch.zeros_like(grad_output)).finalize(GRADIENTS)
    assert stats.grad_logits_norm is not None
    assert stats.grad_logits_norm.tolist() == [0.0] * H
    assert stats.gradient_gain is not None
    assert stats.gradient_gain.isnan().all()
    single = AttentionCall(query=query, key=key[:, :, :1], value=value[:, :, :1])
    assert attention_gradient_sums(single, grad_output).finalize(GRADIENTS).grad_logits_norm is None


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_empty_axes_measure_nothing(empty: str) -> None:
    b, q, k = (0 if empty == axis else 2 for axis in ("batch", "queries", "keys"))
    call = AttentionCall(query=torch.zeros(b, H, q, D), key=torch.zeros(b, G, k, D), value=torch.zeros(b, G, k, V))
    assert attention_gradient_sums(call, torch.zeros(b, H, q, V)).finalize(GRADIENTS).grad_logits_norm is None
    entries = qualifying_entries(call)
    assert entries.keep(slice(None), slice(None), slice(None)).shape == (b, H, q, k)
    stats = softmax_gradient_sums(entries, grad_logits=torch.zeros(b, H, q, k)).finalize(GRADIENTS)
    assert stats.grad_logits_norm is None


def test_nothing_waits_for_the_device_and_surroundings_change_nothing() -> None:
    query, key, value, grad_output = make_tensors()
    call = AttentionCall(query=query, key=key, value=value, is_causal=True, sinks=torch.zeros(H))
    expected = attention_gradient_sums(call, grad_output)
    before = grad_output.clone()
    grad_logits = torch.randn(B, H, Q, K)
    softmax_expected = softmax_gradient_sums(qualifying_entries(call), grad_logits=grad_logits)
    with hostile_surroundings():
        sums = attention_gradient_sums(call, grad_output)
        softmax_sums = softmax_gradient_sums(qualifying_entries(call), grad_logits=grad_logits)
    torch.testing.assert_close(softmax_sums.additive, softmax_expected.additive, rtol=0, atol=0)
    torch.testing.assert_close(sums.additive, expected.additive, rtol=0, atol=0)
    assert torch.equal(grad_output, before)


def test_bad_inputs_get_a_clear_error() -> None:
    query, key, value, grad_output = make_tensors()
    with pytest.raises(ValueError, match="need query, key and value"):
        attention_gradient_sums(AttentionCall(query=query, key=key), grad_output)
    with pytest.raises(ValueError, match=r"output's shape \(2, 6, 11, 5\), got \(2, 6, 5, 11\)"):
        attention_gradient_sums(AttentionCall(query=query, key=key, value=value), grad_output.mT)
    entries = qualifying_entries(AttentionCall(query=query, key=key))
    with pytest.raises(ValueError, match="got neither"):
        softmax_gradient_sums(entries)
    with pytest.raises(ValueError, match=r"shape of the logits \(2, 6, 11, 13\), got \[\(2, 6, 11, 5\)\]"):
        softmax_gradient_sums(entries, grad_logits=grad_output)

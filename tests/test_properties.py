"""Whatever the shape, dtype, mask, spread and offset: the numbers are those of the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from attn_monitor.catalog import GRADIENTS, STATISTICS
from attn_monitor.functional import attention_statistics, softmax_statistics
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from tests.reference import assert_matches, attention_reference, gradient_reference, softmax_reference

ALL = frozenset(STATISTICS)
ROUNDED = {"logit_std", "logit_row_std", "critical_ratio", "qk_std", "logit_mean", "logit_max", "logit_min"}
"""What the rounding of a product of float32 enters directly."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
quickly = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Case:
    """An attention to be drawn."""

    batch: int
    groups: int
    group: int
    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    std: float
    density: float
    is_causal: bool
    additive: bool
    scale: float | None
    softcap: float | None
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.seed)
        heads, spread = self.groups * self.group, self.std**0.5
        shapes = [(heads, self.queries, self.dim), (self.groups, self.keys, self.dim), (self.groups, self.keys, 5)]
        query, key, value = (torch.randn(self.batch, *shape, generator=generator) for shape in shapes)
        grad = torch.randn(self.batch, heads, self.queries, 5, generator=generator)
        return tuple(x.to(self.dtype) for x in (query * spread, key * spread, value, grad))  # type: ignore[return-value] # four of them

    def mask(self) -> Tensor:
        """Return a random mask, without keys in some rows where the density is low."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        kept = torch.rand(self.batch, 1, self.queries, self.keys, generator=generator) < self.density
        if not self.additive:
            return kept
        bias = torch.randn(1, self.groups * self.group, self.queries, self.keys, generator=generator)
        return torch.where(kept, bias, -1e9)


small = st.integers(1, 7)
cases = st.builds(
    Case,
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    group=st.integers(1, 2),
    queries=small,
    keys=st.integers(1, 9),
    dim=st.integers(1, 11),
    dtype=st.sampled_from(DTYPES),
    std=st.sampled_from([1e-2, 1.0, 10.0]),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    is_causal=st.booleans(),
    additive=st.booleans(),
    scale=st.sampled_from([None, 1.0, -0.3]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 10**6),
)


@quickly
@given(cases)
def test_attention_is_what_the_reference_says(case: Case) -> None:
    query, key, value, grad_output = case.tensors()
    scale = case.dim**-0.5 if case.scale is None else case.scale
    mask = case.mask()
    options: dict[str, Any] = {"is_causal": case.is_causal, "softcap": case.softcap, "masks": (mask,)}
    call = AttentionCall(query=query, key=key, value=value, scale=scale, **options)
    stats = attention_sums(call, ALL, grad_output=grad_output).finalize(ALL)
    expected = attention_reference(query, key, scale=scale, **options)
    assert_matches(stats, expected, names=sorted(ALL - GRADIENTS - ROUNDED - {"alignment"}))
    # Where products nearly cancel or agree, their rounding is not small beside what is left.
    lengths = [tensor.double().norm(dim=-1).amax() for tensor in (query, key)]
    floor = 1e-6 * (abs(scale) * float(lengths[0] * lengths[1]) + 4)
    for name in ROUNDED:
        found = getattr(stats, name)
        if found is None:
            assert expected[name].isnan().all(), name
        else:
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=floor, equal_nan=True, msg=name)
    gradients = gradient_reference(query, key, value, grad_output, scale=scale, **options)
    if stats.grad_probs_norm is None:
        assert gradients["grad_probs_norm"].eq(0).all()
        return
    assert stats.grad_logits_norm is not None
    for name in ("grad_logits_norm", "grad_probs_norm"):
        found, wanted = getattr(stats, name).nan_to_num(), gradients[name]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)
    public = attention_statistics(
        query, key, attn_mask=mask, is_causal=case.is_causal, scale=scale, softcap=case.softcap, enable_gqa=True
    )
    assert public.logit_std is None or torch.equal(public.logit_std.nan_to_num(), stats.logit_std.nan_to_num())  # type: ignore[union-attr] # both are there or none


@quickly
@given(
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0.0, 1e4, -1e4, 1e6]),
    std=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
    shape=st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 5), st.integers(1, 13)),
    density=st.sampled_from([0.3, 1.0]),
    seed=st.integers(0, 10**6),
)
@example(dtype=torch.float32, offset=1e4, std=1.0, shape=(2, 2, 5, 13), density=1.0, seed=0)
def test_logits_of_any_offset_are_what_the_reference_says(
    dtype: torch.dtype, offset: float, std: float, shape: tuple[int, ...], density: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator, dtype=torch.float64) * std + offset).to(dtype)
    logits = logits.clamp(-60000, 60000) if dtype == torch.float16 else logits
    mask = torch.rand(shape, generator=generator) < density
    stats = softmax_statistics(logits, mask=mask)
    expected = softmax_reference(logits.double(), mask)
    assert_matches(stats, expected, names=sorted(expected.keys() & ALL))
    assert torch.equal(stats.rows, expected["rows"])
    assert torch.equal(stats.masked_rows, expected["masked_rows"])


@quickly
@given(
    parts=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.0, 1e4, -1e4])), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_calls_merge_to_what_they_are_together(parts: list[tuple[int, float]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chunks = [torch.randn(1, 2, rows, 7, generator=generator) + offset for rows, offset in parts]
    merged: AttentionSums | None = None
    for chunk in chunks:
        sums = attention_sums(AttentionCall(logits=chunk, plain=True), ALL)
        merged = sums if merged is None else merged.merge(sums)
    assert merged is not None
    together = torch.cat(chunks, dim=2)
    expected = softmax_reference(together.double(), torch.ones_like(together, dtype=torch.bool))
    assert_matches(merged.finalize(ALL), expected, names=sorted(expected.keys() & ALL))


@pytest.mark.parametrize("gap", [80.0, 95.0, 103.0, 110.0, 1e6])
def test_subnormal_and_vanished_probabilities_in_closed_form(gap: float) -> None:
    stats = softmax_statistics(torch.tensor([[gap, 0.0, 0.0]]))
    rest = 2 * math.exp(-gap)
    assert stats.entropy is not None
    assert stats.jacobian_trace is not None
    # Below the smallest normal float32 a probability has few digits left, and below the smallest of all none.
    relative = 1e-5 if gap < 85 else 0.2
    assert stats.entropy.item() == pytest.approx(rest * (1 + gap), rel=relative, abs=3e-43)
    assert stats.jacobian_trace.item() == pytest.approx(3 * rest, rel=relative, abs=3e-43)
    assert stats.max_probability is not None
    assert stats.max_probability.item() == 1.0


class Half(nn.Module):
    """Attention in float16 whose product overflows before it is scaled, or a fused kernel that sums in float32."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        out: Tensor = scores.softmax(-1) @ key
        return out


@pytest.mark.parametrize(("size", "overflows"), [(1.0, False), (60.0, True)])
def test_a_float16_product_that_overflows_is_told(size: float, overflows: bool) -> None:
    query = torch.full((1, 2, 3, 32), size, dtype=torch.float16)
    query[:, :, :, ::2] *= 0.5
    with AttentionProbe(model := Half()) as probe:
        model(query, query)
    stats = probe.compute()["Half"]
    product = 16 * (size**2 + (size / 2) ** 2)
    assert (product > 65504) == overflows
    assert stats.nonfinite.tolist() == [9.0 * overflows] * 2
    ratio = stats.overflow_ratio
    if overflows:
        assert stats.logit_max is None
        assert ratio is None
    else:
        assert ratio is not None
        assert ratio.tolist() == pytest.approx([product / 65504] * 2, rel=1e-6)

"""The forward statistics against closed forms and the float64 reference."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_monitor import tiles, unseen
from attn_monitor.arguments import softmax_call
from attn_monitor.catalog import ALL, GRADIENTS
from attn_monitor.functional import attention_statistics, softmax_statistics
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.statistics import attention_sums
from tests.reference import (
    PROBABILITIES,
    assert_matches,
    attention_reference,
    dense_logits,
    factor_reference,
    softmax_reference,
)

FORWARD = ALL - GRADIENTS
B, H, Q, K, D = 2, 3, 11, 13, 7  # distinct primes: a swapped axis can't pass

Inputs = Callable[..., tuple[Tensor, Tensor]]


def make_inputs(
    batch: int = B, heads: int = H, queries: int = Q, keys: int = K, groups: int | None = None, std: float = 1.0
) -> tuple[Tensor, Tensor]:
    query, key = torch.randn(batch, heads, queries, D), torch.randn(batch, groups or heads, keys, D)
    return query * std**0.5, key * std**0.5


def make_mask(kind: str, queries: int, keys: int) -> dict[str, Any]:
    """Return the arguments for one kind of mask."""
    padding = torch.arange(keys) < torch.tensor([[keys], [keys - 4]])  # the second item has four padded keys
    match kind:
        case "none":
            return {}
        case "causal":
            return {"is_causal": True}
        case "padding":
            return {"attn_mask": padding[:, None, None, :]}
        case "left padding and causal":
            return {"attn_mask": padding.flip(-1)[:, None, None, :], "is_causal": True}
        case "random bool":
            return {"attn_mask": torch.rand(B, H, queries, keys) > 0.5}
        case "masked rows":
            mask = torch.rand(queries, keys) > 0.4
            mask[::3] = False
            mask[1] = torch.arange(keys) == 2  # a row with one allowed key
            return {"attn_mask": mask}
        case "alibi":
            distance = torch.arange(queries)[:, None] - torch.arange(keys)
            slopes = torch.tensor([0.5, 0.25, 0.125])[:, None, None]
            return {"attn_mask": -slopes * distance.abs(), "is_causal": True}
        case "additive":
            fills = torch.tensor([0.0, -1e4, -1e9, torch.finfo(torch.float32).min, -math.inf, -300.0])
            return {"attn_mask": fills[torch.randint(len(fills), (B, 1, queries, keys))]}
        case "bfloat16 additive":
            return {"attn_mask": torch.where(torch.rand(queries, keys) > 0.3, 0.0, -1e4).bfloat16()}
    raise AssertionError(kind)


MASKS = [
    "none",
    "causal",
    "padding",
    "left padding and causal",
    "random bool",
    "masked rows",
    "alibi",
    "additive",
    "bfloat16 additive",
]


def reference_of(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    return attention_reference(query, key, masks=() if attn_mask is None else (attn_mask,), **options)


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


# -- neutral ---------------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Fails on whatever waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "masked_select", "equal"}, func
        return func(*args, **(kwargs or {}))


@contextmanager
def hostile_surroundings() -> Iterator[None]:
    """Autocast, another default device and dtype, and an error for whatever waits for the device."""
    torch.set_default_dtype(torch.float16)
    try:
        visible = patch.object(unseen, "without_dispatch_modes", nullcontext)
        sync = NoSync()  # type: ignore[no-untyped-call]
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), visible, sync:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def calls() -> dict[str, AttentionCall]:
    query, key = make_inputs(heads=6, groups=2)
    mask = torch.rand(B, 1, Q, K) > 0.3
    return {
        "causal": AttentionCall(query=query, key=key, is_causal=True, scale=torch.tensor(0.3)),
        "masked": AttentionCall(query=query, key=key, masks=(mask, torch.randn(Q, K)), softcap=3.0),
        "sink": AttentionCall(query=query, key=key, sinks=torch.randn(6)),
        "logits": AttentionCall(query=query, key=key, logits=torch.randn(B, 6, Q, K), masks=(mask,)),
    }


@pytest.mark.parametrize("name", ["causal", "masked", "sink", "logits"])
@pytest.mark.parametrize("max_queries", [None, 5])
def test_nothing_waits_for_the_device_and_surroundings_change_nothing(name: str, max_queries: int | None) -> None:
    call = calls()[name]
    expected = attention_sums(call, ALL, max_queries)
    with hostile_surroundings():
        sums = attention_sums(call, ALL, max_queries)
    torch.testing.assert_close(sums.additive, expected.additive, rtol=0, atol=0)
    torch.testing.assert_close(sums.moments, expected.moments, rtol=0, atol=0)
    torch.testing.assert_close(sums.extrema, expected.extrema, rtol=0, atol=0)
    assert not sums.additive.requires_grad


def test_function_modes_of_others_see_nothing() -> None:
    query, key = make_inputs()
    call = AttentionCall(query=query, key=key)
    seen: list[str] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Recorder():
        attention_sums(call, ALL)
        attention_sums(call, ALL, 5)
    assert seen == []


def test_the_random_state_and_the_inputs_stay_as_they_are() -> None:
    query, key = make_inputs()
    mask = torch.randn(Q, K)
    query.requires_grad_()
    before = torch.get_rng_state(), query.detach().clone(), key.clone(), mask.clone()
    attention_statistics(query, key, attn_mask=mask, max_queries=5, is_causal=True)
    softmax_statistics(mask)
    after = torch.get_rng_state(), query.detach(), key, mask
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert query.grad_fn is None


def test_the_matmul_precision_is_restored() -> None:
    query, key = make_inputs()
    expected = attention_sums(AttentionCall(query=query, key=key), FORWARD)
    torch.set_float32_matmul_precision("medium")
    try:
        sums = attention_sums(AttentionCall(query=query, key=key), FORWARD)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(sums.additive, expected.additive, rtol=0, atol=0)


# -- errors ---------------------------------------------------------------

Q4, K4 = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 11, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(5, 7), K4), ValueError, r"`query` expects \[batch, heads.*got of shape \[5, 7\].*unsqueeze"),
        (
            (Q4, K4.mT),
            ValueError,
            r"`key` expects batch 2 and head dim 7.*\[2, 3, 5, 7\].*got of shape \[2, 3, 7, 11\]",
        ),
        ((Q4, K4[:1]), ValueError, r"`key` expects batch 2 .* got of shape \[1, 3, 11, 7\]"),
        ((Q4, K4[:, :1]), ValueError, r"expects 3 heads.*got of shape \[2, 1, 11, 7\].*enable_gqa=True"),
        ((Q4.int(), K4), TypeError, r"`query` expects a floating-point tensor, got torch.int32"),
        ((Q4, 3.0), TypeError, r"`key` expects a tensor, got float"),
        ((Q4, K4, K4[:, :, :4]), ValueError, r"`value` expects.*\[2, 3, 11, 7\], got of shape \[2, 3, 4, 7\]"),
    ],
)
def test_bad_inputs_get_a_clear_error(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_statistics(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"attn_mask": torch.zeros(2, 11)},
            ValueError,
            r"\[B, H, Q, K\] = \[2, 3, 5, 11\], got of shape \[2, 11\].*None",
        ),
        ({"attn_mask": torch.zeros(5, 11).int()}, TypeError, r"expects bool .* or float .*got torch.int32.*mask.bool"),
        ({"scale": torch.zeros(2)}, ValueError, r"one value per head \[3\], got of shape \[2\]"),
        ({"softcap": 0.0}, ValueError, r"`softcap` expects a positive finite number.*got 0.0"),
        ({"max_queries": 0}, ValueError, r"`max_queries` expects a positive integer or None, got 0"),
        ({"statistics": ["entropi"]}, ValueError, r"Unknown statistics \['entropi'\]"),
        ({"statistics": "entropy"}, TypeError, r"Write statistics=\['entropy'\]"),
    ],
)
def test_bad_options_get_a_clear_error(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_statistics(Q4, K4, **options)


def test_key_heads_that_do_not_divide_the_query_heads_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"not a multiple of the heads of key of shape \[2, 2, 11, 7\]"):
        attention_statistics(Q4, K4[:, :2], enable_gqa=True)


@pytest.mark.parametrize(
    ("logits", "options", "error", "message"),
    [
        (torch.tensor(1.0), {}, ValueError, "at least one axis"),
        (torch.zeros(2, 3).long(), {}, TypeError, "floating-point tensor, got torch.int64"),
        (torch.zeros(2, 3), {"dim": 2}, ValueError, r"`dim` expects an axis of logits of shape \[2, 3\], got 2"),
        (torch.zeros(2, 3), {"head_axis": -3}, ValueError, r"`head_axis` expects an axis.*got -3"),
        (torch.zeros(2, 3, 4, 5), {"dim": 1}, ValueError, r"both axis 1.*\[2, 3, 4, 5\].*head_axis=None"),
        (torch.zeros(2, 3), {"mask": torch.zeros(2)}, ValueError, r"broadcasts to the logits = \[2, 3\], got .*\[2\]"),
    ],
)
def test_bad_logits_get_a_clear_error(
    logits: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        softmax_statistics(logits, **options)


def test_without_a_batch_axis_there_is_one_item() -> None:
    query, key = make_inputs(batch=1)
    one: AttentionStatistics = attention_statistics(query[0], key[0], is_causal=True)
    assert_matches(one, attention_reference(query, key, is_causal=True), names=PROBABILITIES)


@pytest.mark.parametrize("std", [1e3, 1e4, 1e5])
def test_near_ties_among_huge_logits_are_as_exact_as_the_logits(std: float) -> None:
    logits = std * torch.randn(2, 3, 50, 16)
    largest = logits.amax(-1, keepdim=True)
    logits[..., :3] = largest - 2 * torch.rand(2, 3, 50, 3)  # several probabilities of the same size
    found = softmax_statistics(logits)
    wanted = softmax_reference(logits.double(), torch.ones_like(logits, dtype=torch.bool))
    assert_matches(found, wanted, relative=1e-6, absolute=1e-7, names=PROBABILITIES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": "a"}, TypeError, r"`scale` expects a number, a tensor or None .*, got 'a'"),
        ({"scale": math.nan}, ValueError, r"`scale` expects a finite number, .* got nan"),
        ({"max_queries": 1.5}, TypeError, r"`max_queries` expects a positive integer or None, got 1.5"),
        ({"softcap": math.inf}, ValueError, r"`softcap` expects a positive finite number"),
    ],
)
def test_numbers_that_are_none_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    query, key = make_inputs()
    with pytest.raises(error, match=message):
        attention_statistics(query, key, **options)


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9 has one setting for all backends"
)
@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
        "torch.set_float32_matmul_precision('high'); torch.backends.mkldnn.matmul.fp32_precision = 'ieee'",
    ],
)
def test_every_setting_of_the_precision_is_left_as_it_was(setting: str) -> None:
    script = f"""
import torch
from attn_monitor.functional import attention_statistics
{setting}
def state():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
before = state()
attention_statistics(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4))
assert state() == before, (before, state())
"""
    subprocess.run([sys.executable, "-c", script], check=True)  # in its own process: these settings are global

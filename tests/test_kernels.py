"""Kernels that are seen as a whole: flex attention, sequences of different lengths, extensions."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from attn_monitor import AttentionProbe, AttentionStatistics
from attn_monitor.capture.kernels.flash import read_varlen
from attn_monitor.capture.kernels.flex import read as read_flex
from attn_monitor.capture.kernels.nested import from_nested
from attn_monitor.capture.kernels.registry import operator_adapter, read_kernel
from attn_monitor.catalog import resolve_statistics
from attn_monitor.metric import AttentionMetric
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from tests.gradient_sums import attention_gradient_sums
from tests.reference import assert_matches, attention_reference, gradient_reference

B, H, G, Q, K, D, V = 2, 6, 3, 7, 11, 5, 4
flex_attention: Callable[..., Any] = flex.flex_attention
GRADIENTS = ("grad_logits_norm", "grad_probs_norm", "gradient_gain")


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def watched(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[AttentionStatistics, Any]:
    """Call a function under a probe that must skip nothing and find one attention."""
    with AttentionProbe(Calls(function), **options) as probe:
        out = probe._model(*args)
        tensor = out[0] if isinstance(out, tuple) else out
        if tensor.requires_grad:
            tensor.square().sum().backward()
    assert not probe.skipped
    (stats,) = probe.compute().values()
    return stats, out


def statistics_of(sums: AttentionSums) -> AttentionStatistics:
    metric = AttentionMetric(statistics=None)
    metric.update({"it": sums})
    return metric.compute()["it"]


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


# -- flex attention ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlex:
    q, k, v = normal(B, H, Q, D), normal(B, G, K, D), normal(B, G, K, V)

    @pytest.mark.parametrize("compiled", [False, True])
    def test_plain_with_grouped_heads_and_a_scale(self, compiled: bool) -> None:
        function = torch.compile(flex_attention, backend="eager") if compiled else flex_attention
        with torch.no_grad():
            stats, _ = watched(lambda *qkv: function(*qkv, scale=0.7, enable_gqa=True), self.q, self.k, self.v)
        assert_matches(stats, attention_reference(self.q, self.k, scale=0.7))
        assert (stats.head_dim, stats.keys, stats.calls) == (D, K, 1)

    def test_block_mask_and_score_mod(self) -> None:
        bias, documents = normal(H, Q, K), torch.randint(0, 2, (B, K))

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 3 * torch.tanh(score / 3) + bias[h, i, j]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (documents[b, i] == documents[b, j]) & (j <= i)

        block_mask = create_block_mask(mask_mod, B, None, Q, K, device="cpu")
        with torch.no_grad():
            stats, _ = watched(
                lambda *qkv: flex_attention(*qkv, score_mod, block_mask, enable_gqa=True), self.q, self.k, self.v
            )
        i, j = torch.arange(Q)[:, None], torch.arange(K)
        allowed = ((documents[:, :Q, None] == documents[:, None]) & (j <= i))[:, None]
        expected = attention_reference(self.q, self.k, masks=[allowed, bias], softcap=3.0)
        assert_matches(stats, expected)

    def test_a_score_mod_that_masks_with_infinity(self) -> None:
        def causal(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(j <= i, score, -math.inf)

        with torch.no_grad():
            stats, _ = watched(lambda *qkv: flex_attention(*qkv, causal, enable_gqa=True), self.q, self.k, self.v)
        assert_matches(stats, attention_reference(self.q, self.k, is_causal=True))

    def test_function_modes_take_no_notice_of_a_score_mod(self) -> None:
        noticed, bias = list[Any](), normal(H, Q, K)

        class Noticing(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                noticed.append(func)
                return func(*args, **(kwargs or {}))

        mask = (torch.zeros(1, 1, 1), lambda b, h, i, j: j <= i)
        with Noticing():
            call = read_flex(self.q, self.k, self.v, lambda s, b, h, i, j: s.tanh() + bias[h, i, j], mask, 0.5).make()
        assert not {Tensor.tanh, Tensor.__getitem__, Tensor.add} & set(noticed)
        keys = self.k.repeat_interleave(H // G, 1)
        torch.testing.assert_close(call.logits, (0.5 * self.q @ keys.mT).tanh() + bias)

    def test_its_gradients_follow_from_the_output(self) -> None:
        """The operator has no backward on the CPU, so its adapter is asked directly."""
        gradient = normal(B, H, Q, V)
        mask = (torch.zeros(1, 1, 1), lambda b, h, i, j: j <= i)
        call = read_flex(self.q, self.k, self.v, lambda s, b, h, i, j: s + 0.3 * j, mask, 0.5).make()
        bias = 0.3 * torch.arange(K).expand(1, 1, Q, K)
        expected = gradient_reference(self.q, self.k, self.v, gradient, is_causal=True, masks=[bias], scale=0.5)
        assert_matches(statistics_of(attention_gradient_sums(call, gradient)), expected, names=GRADIENTS)


# -- sequences of different lengths ------------------------------------------------------------------------------------


def packed_reference(
    qs: Sequence[Tensor], ks: Sequence[Tensor], masks: Sequence[Tensor | None], **options: Any
) -> dict[str, Tensor]:
    """Pool sequences [H, L, D] by a padded dense reference whose padded rows are taken off `masked_rows`."""
    lengths = [q.shape[1] for q in qs], [k.shape[1] for k in ks]
    q, k = (pad(parts) for parts in (qs, ks))
    allowed = torch.zeros(len(qs), 1, q.shape[2], k.shape[2], dtype=torch.bool)
    for n, (rows, columns) in enumerate(zip(*lengths, strict=True)):
        mask = masks[n]
        allowed[n, 0, :rows, :columns] = True if mask is None else mask
    found = attention_reference(q, k, masks=[allowed], **options)
    found["masked_rows"] = found["masked_rows"] - (len(qs) * q.shape[2] - sum(lengths[0]))
    return found


def pad(parts: Sequence[Tensor]) -> Tensor:
    longest = max(part.shape[1] for part in parts)
    return torch.stack([F.pad(part.detach(), (0, 0, 0, longest - part.shape[1])) for part in parts])


LENGTHS = (4, 1, 6), (4, 3, 2)
"""Of queries and keys; the last sequence has rows without a key under a mask aligned at the bottom right."""


def sequences(heads: int, lengths: Sequence[int], dim: int = D) -> list[Tensor]:
    return [torch.randn(heads, length, dim) for length in lengths]


def bottom_right(rows: int, columns: int) -> Tensor:
    return torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:_nested_tensor_from_tensor_list")
def test_jagged_tensors_through_sdpa() -> None:
    qs, ks, vs = (sequences(H, LENGTHS[0]) for _ in range(3))

    def nested(parts: list[Tensor]) -> Tensor:
        flat = [part.transpose(0, 1).contiguous() for part in parts]
        return torch.nested.nested_tensor(flat, layout=torch.jagged, requires_grad=True)

    leaves = [nested(parts) for parts in (qs, ks, vs)]

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

    stats, _ = watched(attend, *leaves)
    assert_matches(stats, packed_reference(qs, ks, [None] * 3))
    out = [F.scaled_dot_product_attention(q, k, v) for q, k, v in zip(qs, ks, vs, strict=True)]
    squares = torch.zeros(H, dtype=torch.float64)
    for q, k, v, o in zip(qs, ks, vs, out, strict=True):
        squares += gradient_reference(q[None], k[None], v[None], 2 * o[None])["grad_logits_norm"] ** 2
    assert_matches(stats, {"grad_logits_norm": squares.sqrt()})
    assert (stats.calls, stats.keys) == (1, max(LENGTHS[0]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_strided_nested_tensors_through_sdpa() -> None:
    qs, ks, vs = (sequences(H, LENGTHS[0]) for _ in range(3))
    with torch.no_grad():
        stats, _ = watched(F.scaled_dot_product_attention, *(torch.nested.nested_tensor(p) for p in (qs, ks, vs)))
    assert_matches(stats, packed_reference(qs, ks, [None] * 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_causal_nested_tensors_which_only_gpus_run() -> None:
    qs = sequences(H, LENGTHS[0])
    nested = torch.nested.nested_tensor(qs)
    masks = [torch.ones(n, n).tril() > 0 for n in LENGTHS[0]]
    sighting = from_nested((nested, nested, nested), {"is_causal": True})
    assert_matches(
        statistics_of(attention_sums(sighting.call, resolve_statistics(None))), packed_reference(qs, qs, masks)
    )


def test_padding_is_left_out_of_sampled_rows_too() -> None:
    qs = sequences(H, (40, 4))
    packed = torch.cat(qs, 1).transpose(0, 1)
    bounds = torch.tensor([0, 40, 44])
    call = read_varlen(packed, packed, packed, bounds, bounds, 40, 40).make()
    stats = statistics_of(attention_sums(call, resolve_statistics(None), max_queries=10))
    assert stats.masked_rows.tolist() == [0] * H
    assert stats.rows.tolist() == [11] * H


# -- extensions, by stand-ins with their signatures --------------------------------------------------------------------


def dense_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float = 0.0) -> Tensor:
    """Attention [B, Q, H, D] in plain torch, differentiable."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else logits + mask
    return (logits.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    left, right = window_size[0], 0 if causal else window_size[1]
    allowed &= distance >= -left if left >= 0 else allowed
    allowed &= distance <= right if right >= 0 else allowed
    bias = torch.where(allowed, 0.0, -math.inf)
    if alibi_slopes is not None:
        bias = bias - alibi_slopes[:, None, None] * distance.abs()
    out = dense_flash(q, k, v, bias, softmax_scale, softcap)
    return (out, torch.zeros(1), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs = []
    for n in range(len(bounds[0]) - 1):
        (a, b), (c, d) = ((bound[n], bound[n + 1]) for bound in bounds)
        outs.append(flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], 0.0, softmax_scale, causal)[0])
    return torch.cat(outs)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Any:
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("flash_attn")
    # Copies, as if imported from there: their code is what gets exchanged.
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func):
        copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        setattr(module, function.__name__, copied)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale and softcap": {"softmax_scale": 0.9, "softcap": 2.0},
    "window": {"window_size": (2, 1)},
    "causal window": {"window_size": (2, 5), "causal": True},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1, H), "causal": True},
}


@pytest.mark.parametrize("name", DENSE)
def test_flash_attention(name: str, flash: types.ModuleType) -> None:
    options = DENSE[name]
    q, k, v = normal(B, Q, H, D, grad=True), normal(B, K, G, D, grad=True), normal(B, K, G, V, grad=True)
    imported = flash.flash_attn_func  # long before the probe is attached
    stats, out = watched(lambda *qkv: imported(*qkv, **options), q, k, v)
    masks = []
    distance = torch.arange(K) - torch.arange(Q)[:, None] - K + Q
    if options.get("causal"):
        masks.append(distance <= 0)
    if "window_size" in options:
        left, right = options["window_size"]
        masks.append((distance >= -left) & (distance <= right))
    if "alibi_slopes" in options:
        masks.append(-options["alibi_slopes"][:, None, None] * distance.abs())
    rest: dict[str, Any] = {"masks": masks, "scale": options.get("softmax_scale"), "softcap": options.get("softcap")}
    q, k, v = (tensor.detach().transpose(1, 2) for tensor in (q, k, v))
    gradients = gradient_reference(q, k, v, 2 * out.detach().transpose(1, 2), **rest)
    assert_matches(stats, {**attention_reference(q, k, **rest), **{n: gradients[n] for n in GRADIENTS}})


def test_flash_attention_of_packed_tensors_that_returns_more(flash: types.ModuleType) -> None:
    qkv = normal(B, Q, 3, H, D)
    stats, _ = watched(lambda x: flash.flash_attn_qkvpacked_func(x, causal=True), qkv)
    q, k, _ = (part.transpose(1, 2) for part in qkv.unbind(2))
    assert_matches(stats, attention_reference(q, k, is_causal=True))
    x = normal(B, Q, H, D, grad=True)
    stats, _ = watched(lambda x: flash.flash_attn_func(x, x, x, return_attn_probs=True), x)
    assert stats.grad_logits_norm is not None


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_of_different_lengths(causal: bool, flash: types.ModuleType) -> None:
    qs, ks, vs = sequences(H, LENGTHS[0]), sequences(G, LENGTHS[1]), sequences(G, LENGTHS[1], V)
    packed = [torch.cat(parts, 1).transpose(0, 1).contiguous().requires_grad_() for parts in (qs, ks, vs)]
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS]
    longest = [max(lengths) for lengths in LENGTHS]
    stats, out = watched(lambda *qkv: flash.flash_attn_varlen_func(*qkv, *bounds, *longest, causal=causal), *packed)
    masks = [bottom_right(*pair) if causal else None for pair in zip(*LENGTHS, strict=True)]
    assert_matches(stats, packed_reference(qs, ks, masks))
    assert stats.masked_rows.tolist() == [4 if causal else 0] * H
    squares = torch.zeros(H, dtype=torch.float64)
    gradients = (2 * out.detach()).transpose(0, 1).split(list(LENGTHS[0]), 1)
    for q, k, v, g, mask in zip(qs, ks, vs, gradients, masks, strict=True):
        given = [] if mask is None else [mask]
        norm = gradient_reference(q[None], k[None], v[None], g[None], masks=given)["grad_logits_norm"]
        squares += norm.nan_to_num() ** 2
    assert_matches(stats, {"grad_logits_norm": squares.sqrt()})


def test_what_flash_attention_is_not_read_with_is_skipped(flash: types.ModuleType) -> None:
    x, bounds = normal(5, H, D), torch.tensor([0, 5])
    model = Calls(lambda: flash.flash_attn_varlen_func(x, x, x, bounds, bounds, 5, 5, block_table=torch.zeros(1)))
    with AttentionProbe(model) as probe:
        model()
    assert "paged keys (block_table=)" in probe.skipped["Calls"]


def test_varlen_attn() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    qs, ks = sequences(H, LENGTHS[0]), sequences(H, LENGTHS[1])
    q, k = (torch.cat(parts, 1).transpose(0, 1) for parts in (qs, ks))
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS]
    operator = torch.ops.torch_attn._varlen_attn
    adapter = operator_adapter(operator)
    assert adapter is not None
    assert varlen.varlen_attn is not None
    # The operator runs on GPUs alone.
    sighting = read_kernel(adapter, operator, (q, k, k, *bounds, 6, 4, False, 0.5, [-1, 0]), {})
    assert sighting is not None
    masks = [bottom_right(*pair) for pair in zip(*LENGTHS, strict=True)]
    stats = statistics_of(attention_sums(sighting.call, resolve_statistics(None)))
    assert_matches(stats, packed_reference(qs, ks, masks, scale=0.5))

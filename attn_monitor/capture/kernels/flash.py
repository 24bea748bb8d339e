"""flash_attn's functions, versions 2 and 3: [B, Q, H, D], causal masks and windows aligned at the bottom right.

Each adapter has the names of the kernel's arguments; `rest` is what does not change the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture.kernels.packed import Packed, padded_call, reach
from attn_monitor.capture.kernels.registry import KernelCall
from attn_monitor.capture.sighting import UnmeasurableError
from attn_monitor.records import AttentionCall

_UNREAD = {
    "qv": "a second query for the values",
    "q_descale": "fp8 scales",
    "k_descale": "fp8 scales",
    "attention_chunk": "attention in chunks",
    "block_table": "paged keys",
    "page_table": "paged keys",
    "leftpad_k": "keys padded on the left",
}


def _refuse(options: dict[str, Any]) -> None:
    for name, what in _UNREAD.items():
        given = options.get(name)
        if given is not None and (isinstance(given, Tensor) or given):
            raise UnmeasurableError(f"{what} ({name}=) inside flash attention is not measured; use observe_attention")


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.detach().transpose(1, 2)


def read_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **rest: Any,
) -> KernelCall:
    """Read `flash_attn_func`."""
    _refuse(rest)
    queries, keys = q.shape[1], k.shape[1]
    left, right = _window(window_size, causal)

    def make() -> AttentionCall:
        plain = (left, right) == (-1, 0) and queries == keys
        seen = None if plain else reach(queries, keys, (queries, keys), left, right, q.device)
        bias = _alibi(alibi_slopes, queries, keys, (queries, keys))
        return AttentionCall(
            query=_heads_first(q),
            key=_heads_first(k),
            value=_heads_first(v),
            masks=tuple(mask for mask in (seen, bias) if mask is not None),
            is_causal=plain,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap or None,
            head_dim=q.shape[-1],
            dropout=dropout_p > 0,
        )

    return KernelCall(make, canonical=lambda out: out.transpose(1, 2))


def read_varlen(
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
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **rest: Any,
) -> KernelCall:
    """Read `flash_attn_varlen_func`: [T, H, D] and cumulative lengths."""
    _refuse(rest)
    queries, keys = Packed.of(cu_seqlens_q, max_seqlen_q), Packed.of(cu_seqlens_k, max_seqlen_k)
    for packed, used in ((queries, rest.get("seqused_q")), (keys, rest.get("seqused_k"))):
        if used is not None:
            packed.lengths.copy_(used)
    left, right = _window(window_size, causal)

    def make() -> AttentionCall:
        longest = (queries.longest, keys.longest)
        bias = _alibi(alibi_slopes, queries.lengths, keys.lengths, longest)
        return padded_call(
            (queries.pad(q), keys.pad(k), keys.pad(v)),
            (queries.present(), keys.present()),
            scale=softmax_scale,
            seen=reach(queries.lengths, keys.lengths, longest, left, right, q.device),
            biases=() if bias is None else (bias,),
            softcap=softcap,
            dropout=dropout_p > 0,
        )

    return KernelCall(make, canonical=queries.pad)


def read_packed_qkv(qkv: Tensor, **options: Any) -> KernelCall:
    """Read `flash_attn_qkvpacked_func`: [B, Q, 3, H, D]."""
    q, k, v = qkv.unbind(-3)
    return read_dense(q, k, v, **options)


def read_packed_kv(q: Tensor, kv: Tensor, **options: Any) -> KernelCall:
    """Read `flash_attn_kvpacked_func`: [B, K, 2, H, D]."""
    k, v = kv.unbind(-3)
    return read_dense(q, k, v, **options)


def read_varlen_packed_qkv(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: Any) -> KernelCall:
    """Read `flash_attn_varlen_qkvpacked_func`: [T, 3, H, D]."""
    q, k, v = qkv.unbind(-3)
    return read_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def read_varlen_packed_kv(q: Tensor, kv: Tensor, **options: Any) -> KernelCall:
    """Read `flash_attn_varlen_kvpacked_func`: [T, 2, H, D]."""
    k, v = kv.unbind(-3)
    return read_varlen(q, k, v, **options)


def read_cached(**_: Any) -> KernelCall:
    """Refuse `flash_attn_with_kvcache`, which changes its arguments."""
    raise UnmeasurableError("flash_attn_with_kvcache is for generating and is not measured")


def _window(window_size: Sequence[int] | None, causal: bool) -> tuple[int, int]:
    left, right = window_size or (-1, -1)
    return left, 0 if causal else right


def _alibi(slopes: Tensor | None, queries: Tensor | int, keys: Tensor | int, longest: tuple[int, int]) -> Tensor | None:
    """Return -slope * |i + K - Q - j|, [N, H, Q, K]; slopes are [H] or [N, H]."""
    if slopes is None:
        return None
    shift = torch.as_tensor(keys - queries, device=slopes.device).reshape(-1, 1, 1, 1)
    row = torch.arange(longest[0], device=slopes.device)[:, None]
    distance = (torch.arange(longest[1], device=slopes.device) - row - shift).abs()
    return -slopes.detach().reshape(-1, slopes.shape[-1], 1, 1).float() * distance

"""flash_attn's functions, versions 2 and 3: [B, Q, H, D], causal masks and windows aligned at the bottom right.

Each adapter has the names of the kernel's arguments; what none of them names does not change the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What all of the functions have in common, by the names it has there."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int] | None = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> _Options:
        """Choose among the arguments, and refuse what changes the attention in a way that is not read."""
        for name, what in _UNREAD.items():
            value = given.get(name)
            if value is not None and (isinstance(value, Tensor) or value):
                raise UnmeasurableError(
                    f"{what} ({name}=) inside flash attention is not measured; use observe_attention"
                )
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    @property
    def window(self) -> tuple[int, int]:
        """How many keys are seen to the left and to the right, negative for all."""
        left, right = self.window_size or (-1, -1)
        return left, 0 if self.causal else right


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.detach().transpose(1, 2)


def read_dense(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> KernelCall:
    """Read `flash_attn_func`."""
    options = _Options.of(given)
    queries, keys = q.shape[1], k.shape[1]

    def make() -> AttentionCall:
        plain = options.window == (-1, 0) and queries == keys
        seen = None if plain else reach(queries, keys, (queries, keys), *options.window, q.device)
        bias = _alibi(options.alibi_slopes, queries, keys, (queries, keys))
        return AttentionCall(
            query=_heads_first(q),
            key=_heads_first(k),
            value=_heads_first(v),
            masks=tuple(mask for mask in (seen, bias) if mask is not None),
            is_causal=plain,
            scale=q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale,
            softcap=options.softcap or None,
            head_dim=q.shape[-1],
            dropout=options.dropout_p > 0,
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
    **given: Any,
) -> KernelCall:
    """Read `flash_attn_varlen_func`: [T, H, D] and cumulative lengths."""
    options = _Options.of(given)
    queries, keys = Packed.of(cu_seqlens_q, max_seqlen_q), Packed.of(cu_seqlens_k, max_seqlen_k)
    for packed, used in ((queries, given.get("seqused_q")), (keys, given.get("seqused_k"))):
        if used is not None:
            packed.lengths.copy_(used)

    def make() -> AttentionCall:
        longest = (queries.longest, keys.longest)
        bias = _alibi(options.alibi_slopes, queries.lengths, keys.lengths, longest)
        return padded_call(
            (queries.pad(q), keys.pad(k), keys.pad(v)),
            (queries.present(), keys.present()),
            scale=options.softmax_scale,
            seen=reach(queries.lengths, keys.lengths, longest, *options.window, q.device),
            biases=() if bias is None else (bias,),
            softcap=options.softcap,
            dropout=options.dropout_p > 0,
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


def _alibi(slopes: Tensor | None, queries: Tensor | int, keys: Tensor | int, longest: tuple[int, int]) -> Tensor | None:
    """Return -slope * |i + K - Q - j|, [N, H, Q, K]; slopes are [H] or [N, H]."""
    if slopes is None:
        return None
    shift = torch.as_tensor(keys - queries, device=slopes.device).reshape(-1, 1, 1, 1)
    row = torch.arange(longest[0], device=slopes.device)[:, None]
    distance = (torch.arange(longest[1], device=slopes.device) - row - shift).abs()
    return -slopes.detach().reshape(-1, slopes.shape[-1], 1, 1).float() * distance

"""torch.nn.attention.varlen.varlen_attn: [T, H, D] and cumulative lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attn_monitor.capture.kernels import flash
from attn_monitor.capture.kernels.registry import KernelCall


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    **rest: Any,
) -> KernelCall:
    """Read the operator behind `varlen_attn`."""
    return flash.read_varlen(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_q if cu_seq_k is None else cu_seq_k,
        max_q,
        max_k,
        softmax_scale=scale,
        causal=is_causal,
        window_size=window_size,
        **rest,
    )

"""The operators below `F.scaled_dot_product_attention`, for who calls them directly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_monitor.arguments import attention_call
from attn_monitor.capture.kernels.registry import KernelCall
from attn_monitor.records import AttentionCall

FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> KernelCall:
    """Read the kernels that `F.scaled_dot_product_attention` chooses among."""
    mask = attn_mask if attn_mask is not None else attn_bias

    def make() -> AttentionCall:
        return attention_call(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True)

    return KernelCall(make)

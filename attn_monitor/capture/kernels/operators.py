"""The operators below `F.scaled_dot_product_attention`, for who calls them directly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_monitor.arguments import attention_call
from attn_monitor.capture.kernels.registry import KernelCall

FUSED = (
    "scaled_dot_product_attention",
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
    """Read `torch.ops.aten.scaled_dot_product_attention` and the kernels it chooses among."""
    mask = attn_mask if attn_mask is not None else attn_bias
    options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": True}
    return KernelCall(lambda: attention_call(query, key, value, **options))  # type: ignore[arg-type]

"""The gradients of one fused kernel alone, as sums."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.gradients import attention_gradient_rows
from attn_monitor.pooling import pooled
from attn_monitor.records import AttentionCall
from attn_monitor.sums import AttentionSums
from attn_monitor.tiles import undisturbed


def attention_gradient_sums(
    call: AttentionCall, grad_output: Tensor, max_queries: int | None = None, generator: torch.Generator | None = None
) -> AttentionSums:
    """Return the sums of what `attention_gradient_rows` finds."""
    rows = attention_gradient_rows(call, grad_output, max_queries, generator)
    with undisturbed(call.query):
        return pooled([rows])[0]

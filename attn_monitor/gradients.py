"""Gradients of the loss at the two sides of the softmax inside a fused kernel, as sums of squares per head.

Axes: B batch, H query heads, Q queries, V value dimension. Only allowed entries of rows with at least two allowed keys,
all of them finite, enter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.passes import Wanted, fill_rows
from attn_monitor.pooling import LayerRows
from attn_monitor.records import AttentionCall
from attn_monitor.rows import RowValues
from attn_monitor.sums import LayerFacts
from attn_monitor.tiles import TiledCall, undisturbed
from attn_monitor.workspace import Workspaces


def attention_gradient_rows(
    call: AttentionCall,
    grad_output: Tensor,
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    spaces: Workspaces | None = None,
) -> LayerRows:
    """Return the rows of the gradients of a fused kernel alone, from the gradient of its output.

    dP = dO V^T and dS = P (dP - rowsum(P dP)), with P recomputed in tiles.

    Args:
        call: A call with `query`, `key` and `value`.
        grad_output: The gradient of the output, [B, H, Q, V].
        max_queries: Look at so many random rows at most; what the others add is estimated.
        generator: For the choice of rows, on the CPU; the same rows each time without one.
        spaces: Memory to compute in, if there is some already.

    Raises:
        ValueError: If the call has no value, or the gradient does not fit the call.
    """
    check_gradient(call, grad_output)
    spaces = spaces or Workspaces()
    with undisturbed(call.query):
        return spaces.fitting(
            lambda shrink: _rows(TiledCall.of(call, shrink).at_most(max_queries, generator), grad_output, spaces)
        )


def check_gradient(call: AttentionCall, grad_output: Tensor) -> None:
    """Raise `ValueError` where the gradient of the output says nothing about the softmax of a call."""
    if call.value is None or call.query is None:
        raise ValueError("The gradients of a fused kernel need query, key and value; this call lacks one.")
    expected = (*call.query.shape[:3], call.value.shape[-1])
    if tuple(grad_output.shape) != expected:
        raise ValueError(f"`grad_output` expects the output's shape {expected}, got {tuple(grad_output.shape)}.")


def _rows(tiled: TiledCall, grad_output: Tensor, spaces: Workspaces) -> LayerRows:
    wanted = Wanted.by(tiled.call, frozenset(), sampled=tiled.index is not None, gradients=True)
    rows = RowValues(wanted.names(), tiled.call.shape, tiled.device, tiled.dtype, tiled.weights)
    fill_rows(rows, tiled, wanted, spaces, grad_output=grad_output)
    no_keys = torch.zeros((2, tiled.call.shape.heads), device=tiled.device, dtype=rows.dtype)
    return LayerRows.of(rows, tiled, wanted, no_keys, LayerFacts())

"""Nested tensors, jagged or strided, through `F.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture import functions as fn
from attn_monitor.capture.kernels.packed import padded_call
from attn_monitor.capture.sighting import Sighting, UnmeasurableError
from attn_monitor.records import AttentionCall


def is_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the query of a call is nested."""
    query = fn.argument(args, kwargs, 0, "query")
    return isinstance(query, Tensor) and query.is_nested


def from_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sighting:
    """Read a call of `F.scaled_dot_product_attention` with nested tensors [N, H, -, D]."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    query, key, value, mask, dropout, causal, scale = (
        fn.argument(args, kwargs, i, name) for i, name in enumerate(names)
    )
    if mask is not None or not (key.is_nested and value.is_nested) or query.dim() != 4:
        raise UnmeasurableError("nested tensors beside dense ones, or of other than four axes, are not measured")

    def make() -> AttentionCall:
        q, queries = padded(query)
        k, keys = padded(key)
        return padded_call(
            (q, k, padded(value)[0]), (queries, keys), scale=scale, is_causal=bool(causal), dropout=bool(dropout)
        )

    given = (query, key, value)
    return Sighting(
        call=make(),
        logits=None,
        canonical=lambda tensor: padded(tensor)[0] if tensor.is_nested else tensor,
        differentiable=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given),
        path="sdpa (nested)",
        make=make,
    )


def padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N, H, L, D] with zeros behind the shorter sequences, and True where there is a token, [N, L]."""
    parts = nested.detach().unbind()
    lengths = [part.shape[1] for part in parts]
    heads, dim = parts[0].shape[0], parts[0].shape[2]
    out = parts[0].new_zeros(len(parts), heads, max(lengths), dim)
    present = torch.zeros(len(parts), max(lengths), dtype=torch.bool, device=out.device)
    for i, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        out[i, :, :length] = part
        present[i, :length] = True
    return out, present

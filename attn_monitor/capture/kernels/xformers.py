"""xformers' memory_efficient_attention: [B, Q, H, D], [B, Q, D] or, grouped, [B, Q, G, H, D], and masks as objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_monitor.capture.kernels.packed import Packed, padded_call, reach
from attn_monitor.capture.kernels.registry import KernelCall
from attn_monitor.capture.sighting import UnmeasurableError
from attn_monitor.records import AttentionCall

_PACKED = {
    "BlockDiagonalMask": (False, False),
    "BlockDiagonalCausalMask": (True, False),
    "BlockDiagonalCausalFromBottomRightMask": (True, True),
}
"""Masks of packed sequences: whether causal, whether aligned at the bottom right."""


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **_: Any,
) -> KernelCall:
    """Read `xformers.ops.memory_efficient_attention`."""
    kind = type(attn_bias).__name__
    if kind in _PACKED:
        return _read_packed(query, key, value, attn_bias, p, scale)

    def make() -> AttentionCall:
        q, k, v = (_canonical(tensor) for tensor in (query, key, value))
        call = AttentionCall(
            query=q,
            key=k,
            value=v,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            head_dim=q.shape[-1],
            dropout=p > 0,
        )
        if attn_bias is None:
            return call
        if kind == "LowerTriangularMask":
            return replace(call, is_causal=True)
        return replace(call, masks=(_mask(attn_bias, tuple(call.shape), q),))

    return KernelCall(make, canonical=_canonical)


def _canonical(tensor: Tensor) -> Tensor:
    """Return [B, H, Q, D], the groups of heads side by side."""
    tensor = tensor.detach()
    if tensor.dim() == 3:
        return tensor[:, None]
    if tensor.dim() == 5:
        tensor = tensor.flatten(2, 3)
    return tensor.transpose(1, 2)


def _mask(bias: Any, shape: tuple[int, ...], query: Tensor) -> Tensor:
    if not isinstance(bias, Tensor):
        if not hasattr(bias, "materialize"):
            raise UnmeasurableError(f"the mask {type(bias).__name__} of xformers can't be read; use observe_attention")
        bias = bias.materialize(shape, dtype=torch.float32, device=query.device)
    mask: Tensor = bias.detach()
    if mask.dim() == 5:
        mask = mask.flatten(1, 2)
    if mask.dim() == 3:  # one for each batch item and head, folded
        mask = mask.unflatten(0, (-1, shape[1])) if len(mask) == shape[0] * shape[1] else mask[:, None]
    return mask


def _read_packed(query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float | None) -> KernelCall:
    """Read sequences one after the other in one batch item."""
    causal, bottom_right = _PACKED[type(bias).__name__]
    queries, keys = (_sequences(info, query.device) for info in (bias.q_seqinfo, bias.k_seqinfo))

    def tokens(tensor: Tensor) -> Tensor:
        return _canonical(tensor)[0].transpose(0, 1)

    def make() -> AttentionCall:
        seen = None
        if causal and bottom_right:
            seen = reach(queries.lengths, keys.lengths, (queries.longest, keys.longest), -1, 0, query.device)
        return padded_call(
            (queries.pad(tokens(query)), keys.pad(tokens(key)), keys.pad(tokens(value))),
            (queries.present(), keys.present()),
            scale=scale,
            seen=seen,
            is_causal=causal and not bottom_right,
            dropout=p > 0,
        )

    return KernelCall(make, canonical=lambda out: queries.pad(tokens(out)))


def _sequences(info: Any, device: torch.device) -> Packed:
    return Packed.of(info.seqstart.to(device, non_blocking=True), info.max_seqlen)

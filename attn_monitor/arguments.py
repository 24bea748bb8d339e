"""From the arguments of the public functions to an `AttentionCall`, with errors that name the shapes.

Axes: B batch, H query heads, G key heads (H is a multiple of G), Q queries, K keys, D head dimension, V value
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from types import EllipsisType

import torch
from torch import Tensor

from attn_monitor.records import AttentionCall


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> AttentionCall:
    """Return the checked call that `attention_statistics` measures; same arguments, same errors.

    Args:
        query: [B, H, Q, D]; without B for a single batch item, in key and value alike.
        key: [B, H, K, D], or [B, G, K, D] with `enable_gqa`.
        value: [B, H, K, V], or [B, G, K, V] with `enable_gqa`.
        attn_mask: Broadcastable to [B, H, Q, K]. Of a bool mask True is allowed; a float mask is added to the logits.
        is_causal: Query i sees the keys 0..i.
        scale: A number, a 0-dim tensor or one value per head [H]; D^(-1/2) for `None`.
        enable_gqa: Let several query heads share a key head.
        softcap: The limit c of c * tanh(x / c).

    Source: Vaswani et al. 2017, arXiv 1706.03762; for the softcap Gemma 2 2024, arXiv 2408.00118.

    Returns:
        The call, with tensors that are detached and not copied.

    Raises:
        TypeError: If an input is not a floating-point tensor, the mask neither bool nor float, or the scale no number.
        ValueError: If shapes or devices do not fit, a number is out of range, or a tensor holds none that can be read.

    Example:
        >>> import torch
        >>> from attn_monitor.arguments import attention_call
        >>> call = attention_call(torch.ones(2, 6, 5, 16), torch.ones(2, 3, 7, 16), enable_gqa=True)
        >>> call.shape, call.scale
        (CallShape(batch=2, heads=6, queries=5, keys=7), 0.25)
    """
    query, key = _readable("query", query), _readable("key", key)
    value = None if value is None else _readable("value", value)
    if query.ndim == key.ndim == 3 and (value is None or value.ndim == 3):
        query, key, value = query[None], key[None], None if value is None else value[None]
    _check_qkv(query, key, value, enable_gqa)
    batch, heads, queries, dim = query.shape
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask, (batch, heads, queries, key.shape[2]), "[B, H, Q, K]")
    _check_scale(scale, heads)
    _check_softcap(softcap)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        masks=() if attn_mask is None else (attn_mask.detach(),),
        is_causal=is_causal,
        scale=max(dim, 1) ** -0.5 if scale is None else scale,
        softcap=softcap,
    )


def check_output(output: Tensor, call: AttentionCall, value: Tensor | None) -> None:
    """Raise `ValueError` where a kernel's output does not fit what it was given."""
    check_tensor("output", output)
    if value is None:
        raise ValueError("`output` needs `value` beside it: the gradients at the softmax follow from both.")
    batch, heads, queries, _ = call.shape
    expected = (batch, heads, queries, value.shape[-1])[4 - value.ndim :]
    if tuple(output.shape) != expected:
        raise ValueError(f"`output` expects the shape {list(expected)}, got {_of(output)}. Transpose it as the query.")


def softmax_call(
    logits: Tensor,
    *,
    dim: int = -1,
    head_axis: int | EllipsisType | None = ...,
    head_dim: int | None = None,
    mask: Tensor | None = None,
) -> tuple[AttentionCall, Callable[[Tensor], Tensor]]:
    """Return the checked call that `softmax_statistics` measures, and what moves a tensor like the logits to its axes.

    Same arguments, same errors.
    """
    logits = _readable("logits", logits)
    if not logits.ndim:
        raise ValueError("`logits` expects at least one axis, got a 0-dim tensor.")
    keys = _axis("dim", dim, logits)
    if head_axis is ...:
        head_axis = 1 if logits.ndim == 4 else None
    heads = None if head_axis is None else _axis("head_axis", head_axis, logits)
    if heads == keys:
        raise ValueError(f"`dim` and `head_axis` are both axis {keys} of logits {_of(logits)}. Pass head_axis=None.")
    masks: tuple[Tensor, ...] = ()
    if mask is not None:
        _check_mask("mask", mask, tuple(logits.shape), "the logits")
        masks = (_canonical(mask.detach().reshape((1,) * (logits.ndim - mask.ndim) + mask.shape), keys, heads),)
    head_dim = _checked_head_dim(head_dim)
    call = AttentionCall(logits=_canonical(logits, keys, heads), masks=masks, scale=None, head_dim=head_dim)
    return call, partial(_canonical, keys=keys, heads=heads)


def _canonical(tensor: Tensor, keys: int, heads: int | None) -> Tensor:
    """Move the axes to [B, H, Q, K]: the last of the other axes holds the queries, all before it are batch."""
    others = [axis for axis in range(tensor.ndim) if axis not in {keys, heads}]
    batch, queries = others[:-1], others[-1:]
    moved = tensor.permute(*batch, *([] if heads is None else [heads]), *queries, keys)
    if not queries:
        moved = moved.unsqueeze(-2)
    if heads is None:
        moved = moved.unsqueeze(-3)
    return moved.flatten(0, -4) if batch else moved[None]


def _of(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)}"


def check_tensor(name: str, tensor: object) -> None:
    """Raise `TypeError` for what is no tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` expects a tensor, got {type(tensor).__name__}. Pass the tensor itself.")


def _readable(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of numbers that can be read, detached."""
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"`{name}` expects a floating-point tensor, got {tensor.dtype}. Convert it first.")
    _check_layout(name, tensor)
    return tensor.detach()


def _check_layout(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise ValueError(f"`{name}` expects a dense tensor, got a nested one. Pass it padded, with a mask.")
    if tensor.layout != torch.strided:
        raise ValueError(f"`{name}` expects a dense tensor, got one of layout {tensor.layout}. Pass to_dense() of it.")
    if tensor.device.type == "meta":
        raise ValueError(
            f"`{name}` expects numbers, got a tensor on the meta device, which holds none. Materialise it."
        )


def _check_qkv(query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool) -> None:
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if tensor is not None and tensor.ndim != 4:
            raise ValueError(
                f"`{name}` expects [batch, heads, length, head dim], or all without batch, got {_of(tensor)}. "
                "Use unsqueeze(1) for a single head, or unflatten the axis that holds the heads."
            )
    batch, heads, _, dim = query.shape
    groups = key.shape[1]
    if (key.shape[0], key.shape[3]) != (batch, dim):
        raise ValueError(
            f"`key` expects batch {batch} and head dim {dim}, as query {_of(query)}, got {_of(key)}. "
            "The shape is [batch, heads, keys, head dim], not transposed."
        )
    if heads != groups and not enable_gqa:
        raise ValueError(
            f"`key` expects {heads} heads, as query {_of(query)}, got {_of(key)}. "
            "Pass enable_gqa=True if query heads share key heads."
        )
    if heads != groups and (not groups or heads % groups):
        raise ValueError(f"The heads of query {_of(query)} are not a multiple of the heads of key {_of(key)}.")
    if value is not None and value.shape[:3] != key.shape[:3]:
        raise ValueError(f"`value` expects the batch, heads and keys of key {_of(key)}, got {_of(value)}.")
    if query.device != key.device:
        raise ValueError(f"`key` expects the device of query, {query.device}, got {key.device}.")


def _check_scale(scale: object, heads: int) -> None:
    if isinstance(scale, Tensor):
        if scale.dtype == torch.bool or scale.is_complex():
            raise TypeError(f"`scale` expects real numbers, got {scale.dtype}. Convert it first.")
        _check_layout("scale", scale)
        if tuple(scale.shape) not in {(), (1,), (heads,)}:
            raise ValueError(
                f"`scale` expects a number, a 0-dim tensor or one value per head [{heads}], got {_of(scale)}."
            )
    elif scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"`scale` expects a number, a tensor or None for 1 / sqrt(D), got {scale!r}.")
    elif scale is not None and not math.isfinite(scale):
        raise ValueError(f"`scale` expects a finite number, or None for 1 / sqrt(D), got {scale!r}.")


def _check_softcap(softcap: object) -> None:
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, Real):
        raise TypeError(f"`softcap` expects a number, or None for no cap, got {_told(softcap)}.")
    if not 0 < float(softcap) < math.inf:
        raise ValueError(f"`softcap` expects a positive finite number, or None for no cap, got {softcap!r}.")


def _checked_head_dim(head_dim: object) -> int | None:
    if head_dim is None:
        return None
    expected = (
        "`head_dim` expects the length of the vectors whose products the logits are, a whole number of at least 1"
    )
    if isinstance(head_dim, bool) or not isinstance(head_dim, Integral):
        raise TypeError(f"{expected}, or None where there are none, got {_told(head_dim)}.")
    if int(head_dim) < 1:
        raise ValueError(f"{expected}, or None where there are none, got {head_dim}.")
    return int(head_dim)


def _told(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _check_mask(name: str, mask: Tensor, shape: tuple[int, ...], what: str) -> None:
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"`{name}` expects bool (True is allowed) or float (added), got {mask.dtype}. Convert it with mask.bool()."
        )
    _check_layout(name, mask)
    fits = len(mask.shape) <= len(shape) and all(
        size in {1, full} for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"`{name}` expects a shape that broadcasts to {what} = {list(shape)}, got {_of(mask)}. "
            "A mask of padded keys [B, K] becomes mask[:, None, None, :]."
        )


def _axis(name: str, axis: object, logits: Tensor) -> int:
    if isinstance(axis, bool) or not isinstance(axis, Integral):
        raise TypeError(f"`{name}` expects the number of an axis of logits {_of(logits)}, got {_told(axis)}.")
    if not -logits.ndim <= int(axis) < logits.ndim:
        raise ValueError(f"`{name}` expects an axis of logits {_of(logits)}, got {axis}.")
    return int(axis) % logits.ndim

"""Statistics of one attention, as pure functions.

Axes: B batch, H query heads, G key heads (H is a multiple of G), Q queries, K keys, D head dimension, V value
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from attn_monitor.catalog import resolve_statistics
from attn_monitor.records import AttentionCall, AttentionStatistics
from attn_monitor.statistics import attention_sums

__all__ = ["attention_statistics", "softmax_statistics"]


def attention_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    max_queries: int | None = None,
    statistics: Iterable[str] | None = None,
) -> AttentionStatistics:
    r"""Return the statistics of `F.scaled_dot_product_attention` with the same arguments, per head.

    The logits are `scale * query @ key.mT`, capped by `softcap * tanh(logits / softcap)`, plus a float mask; the
    probabilities are their softmax. Both are computed exactly, in float32 or better whatever the dtype of the inputs,
    a few rows at a time, without touching the inputs, the RNG or autograd. Entropies are in nats, 0..ln K;
    `jacobian_trace` and `entropy_normalized` run from 0 (one-hot) to 1 (uniform). `attn_monitor.catalog.STATISTICS`
    defines each name.

    Args:
        query: [B, H, Q, D]; without B for a single batch item, in key and value alike.
        key: [B, H, K, D], or [B, G, K, D] with `enable_gqa`.
        value: [B, H, K, V], or [B, G, K, V] with `enable_gqa`. Only checked: no forward statistic needs it.
        attn_mask: Broadcastable to [B, H, Q, K]. Of a bool mask True is allowed; a float mask is added to the logits,
            and its entries <= -9000 are blocked.
        is_causal: Query i sees the keys 0..i (aligned top-left, as in SDPA). Unlike there, a mask may be given too.
        scale: A number, a 0-dim tensor or one value per head [H]; D^(-1/2) for `None`.
        enable_gqa: Let several query heads share a key head.
        softcap: The limit c of c * tanh(x / c).
        max_queries: Look at so many random rows at most, the same ones each time. `approximate` then names the
            estimates, and `logit_max` and `logit_min` are `None`.
        statistics: The names that are wanted, `None` for all. Statistics of gradients are `None` in any case.

    Returns:
        The statistics, each a tensor [H] on the CPU.

    Raises:
        TypeError: If an input is not a floating-point tensor, or the mask neither bool nor float.
        ValueError: If shapes do not fit, a number is out of range, or a statistic is unknown.

    Example:
        >>> import torch
        >>> from attn_monitor.functional import attention_statistics
        >>> query, key = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 4, 8)  # all logits equal
        >>> stats = attention_statistics(query, key)
        >>> [f"{value:.4f}" for value in stats.entropy.tolist()]  # ln 4
        ['1.3863', '1.3863']
        >>> stats.jacobian_trace.tolist()
        [1.0, 1.0]
    """
    if max_queries is not None and max_queries < 1:
        raise ValueError(f"`max_queries` expects at least 1, or None for all rows, got {max_queries!r}.")
    call = attention_call(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
    )
    chosen = resolve_statistics(statistics)
    return attention_sums(call, chosen, max_queries).finalize(chosen)


def softmax_statistics(
    logits: Tensor,
    *,
    dim: int = -1,
    head_axis: int | EllipsisType | None = ...,
    head_dim: int | None = None,
    mask: Tensor | None = None,
    statistics: Iterable[str] | None = None,
) -> AttentionStatistics:
    r"""Return the statistics of `logits.softmax(dim)`, per head.

    For attention that is written by hand, and for any other softmax: contrastive, router, pointer. Entropies are in
    nats. Entries that are -inf, finfo.min or <= -9.9e8 count as blocked; pass `mask` for other fills. `scale`, `q_rms`,
    `k_rms`, `qk_std` and `alignment` are `None`, for a softmax does not know where its logits come from.

    Args:
        logits: What the softmax receives, any number of axes from 1.
        dim: The axis of the softmax, K.
        head_axis: The axis of the heads H; `None` if there are none (H is 1). By default 1 of four axes, else none.
        head_dim: The head dimension D, which the saturation ratio needs.
        mask: Broadcastable to `logits`, in their order of axes. Of a bool mask True is allowed; of a float mask only
            the entries <= -9000 count, as blocked: the logits contain the rest.
        statistics: The names that are wanted, `None` for all.

    Returns:
        The statistics, each a tensor [H] on the CPU.

    Raises:
        TypeError: If `logits` is not a floating-point tensor, or the mask neither bool nor float.
        ValueError: If an axis does not exist or is used twice, the mask does not fit, or a statistic is unknown.

    Example:
        >>> import torch
        >>> from attn_monitor.functional import softmax_statistics
        >>> stats = softmax_statistics(torch.tensor([[0.0, 0.0], [0.0, 1000.0]]))  # two rows, uniform and one-hot
        >>> stats.max_probability.tolist(), stats.jacobian_trace.tolist()
        ([0.75], [0.5])
    """
    call, _ = softmax_call(logits, dim=dim, head_axis=head_axis, head_dim=head_dim, mask=mask)
    chosen = resolve_statistics(statistics)
    return attention_sums(call, chosen).finalize(chosen)


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
    """Return the checked call that `attention_statistics` measures; same arguments, same errors."""
    _check_floating(query=query, key=key)
    if query.ndim == key.ndim == 3 and (value is None or value.ndim == 3):
        query, key, value = query[None], key[None], None if value is None else value[None]
    _check_qkv(query, key, value, enable_gqa)
    batch, heads, queries, dim = query.shape
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask, (batch, heads, queries, key.shape[2]), "[B, H, Q, K]")
    if isinstance(scale, Tensor) and tuple(scale.shape) not in {(), (1,), (heads,)}:
        raise ValueError(f"`scale` expects a number, a 0-dim tensor or one value per head [{heads}], got {_of(scale)}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"`softcap` expects a positive number, or None for no cap, got {softcap!r}.")
    return AttentionCall(
        query=query.detach(),
        key=key.detach(),
        value=None if value is None else value.detach(),
        masks=() if attn_mask is None else (attn_mask.detach(),),
        is_causal=is_causal,
        scale=max(dim, 1) ** -0.5 if scale is None else scale,
        softcap=softcap,
    )


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
    _check_floating(logits=logits)
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
    call = AttentionCall(logits=_canonical(logits.detach(), keys, heads), masks=masks, scale=None, head_dim=head_dim)
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


def _check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` expects a tensor, got {type(tensor).__name__}.")
        if not tensor.is_floating_point():
            raise TypeError(f"`{name}` expects a floating-point tensor, got {tensor.dtype}. Convert it first.")


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


def _check_mask(name: str, mask: Tensor, shape: tuple[int, ...], what: str) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"`{name}` expects bool (True is allowed) or float (added), got {mask.dtype}. Convert it with mask.bool()."
        )
    fits = len(mask.shape) <= len(shape) and all(
        size in {1, full} for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"`{name}` expects a shape that broadcasts to {what} = {list(shape)}, got {_of(mask)}. "
            "A mask of padded keys [B, K] becomes mask[:, None, None, :]."
        )


def _axis(name: str, axis: int, logits: Tensor) -> int:
    if not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"`{name}` expects an axis of logits {_of(logits)}, got {axis}.")
    return axis % logits.ndim

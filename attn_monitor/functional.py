"""Statistics of one attention, as pure functions.

Axes: B batch, H query heads, G key heads (H is a multiple of G), Q queries, K keys, D head dimension, V value
dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType

from torch import Tensor

from attn_monitor.arguments import attention_call, softmax_call
from attn_monitor.catalog import GRADIENTS, STATISTICS, resolve_statistics
from attn_monitor.records import AttentionStatistics
from attn_monitor.settings import check_max_queries
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
        max_queries: Look at so many random rows at most, one from each of as many stretches, the same ones each time.
            `standard_error` then says how far off the estimates may be, `approximate` names the
            estimates, and `logit_max` and `logit_min` are `None`.
        statistics: The names that are wanted, `None` for all. Statistics of gradients are `None` in any case.

    Source: Vaswani et al. 2017, arXiv 1706.03762; for the softcap Gemma 2 2024, arXiv 2408.00118; for each statistic
    its page in docs/statistics.

    Returns:
        The statistics, each a tensor [H] on the CPU, in nats where `STATISTICS` names that unit and a pure number else.

    Raises:
        TypeError: If an input is not a floating-point tensor, the mask neither bool nor float, or a number none.
        ValueError: If shapes do not fit, a number is out of range, a tensor holds none that can be read, or a statistic
            is unknown.

    Example:
        >>> import torch
        >>> from attn_monitor.functional import attention_statistics
        >>> query, key = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 4, 8)  # all logits equal
        >>> stats = attention_statistics(query, key)
        >>> [f"{value:.4f}" for value in stats.entropy.tolist()]  # ln 4
        ['1.3863', '1.3863']
        >>> [f"{value:.4f}" for value in stats.jacobian_trace.tolist()]  # uniform
        ['1.0000', '1.0000']
    """
    check_max_queries(max_queries)
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
        statistics: The names that are wanted, `None` for all that logits give.

    Returns:
        The statistics, each a tensor [H] on the CPU, in nats where `STATISTICS` names that unit and a pure number else.

    Raises:
        TypeError: If `logits` is not a floating-point tensor, the mask neither bool nor float, or a number none.
        ValueError: If an axis does not exist or is used twice, `head_dim` is below 1, the mask does not fit, a tensor
            holds no numbers that can be read, or a statistic is unknown or needs more than logits.

    Example:
        >>> import torch
        >>> from attn_monitor.functional import softmax_statistics
        >>> stats = softmax_statistics(torch.tensor([[0.0, 0.0], [0.0, 1000.0]]))  # two rows, uniform and one-hot
        >>> stats.max_probability.tolist(), stats.jacobian_trace.tolist()
        ([0.75], [0.5])
    """
    call, _ = softmax_call(logits, dim=dim, head_axis=head_axis, head_dim=head_dim, mask=mask)
    chosen = resolve_statistics(statistics)
    if statistics is not None:
        _check_from_logits(chosen)
    return attention_sums(call, chosen).finalize(chosen)


def _check_from_logits(chosen: frozenset[str]) -> None:
    """Raise where a name is asked for that no logits give."""
    factors = sorted(name for name in chosen if STATISTICS[name].family == "factors")
    advice = {
        "attention_statistics(query, key) measures": factors,
        "AttentionProbe, around a forward and a backward pass, measures": sorted(chosen & GRADIENTS),
    }
    if lacking := [f"{who} {names}" for who, names in advice.items() if names]:
        raise ValueError(f"`statistics` expects what logits alone give, got others: {'; '.join(lacking)}.")

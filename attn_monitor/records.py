"""The two records everything else speaks in: a seen attention call, and the statistics of a layer.

Axes: B batch, H query heads, G key heads (H is a multiple of G), Q queries, K keys, D head dimension of query and
key, V head dimension of the value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_monitor.catalog import STATISTICS

FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """One softmax attention as it was seen: all that passes from capture to the numerics. Tensors are detached.

    Either `query` and `key` are given and the logits are made from them, or `logits` holds what the softmax received
    (then `query` and `key`, where known, only serve the factors). The shapes are canonical: capture has moved the
    axes already.
    """

    query: Tensor | None = None
    """[B, H, Q, D], as it enters the product."""
    key: Tensor | None = None
    """[B, G, K, D], as it enters the product; query head h meets key head h // (H / G)."""
    value: Tensor | None = None
    """[B, G, K, V], only needed for gradients without `logits`."""
    logits: Tensor | None = None
    """[B, H, Q, K], exactly what the softmax received: scaled, biased, capped, masked entries filled."""
    masks: tuple[Tensor, ...] = ()
    """Masks with the semantics of SDPA, each broadcastable to [B, H, Q, K]: of a bool mask True is kept, of a float
    mask entries <= -9000 are blocked. Without `logits` the other float entries are added to the logits; with
    `logits` they are in there already."""
    is_causal: bool = False
    """Top-left aligned: query i sees key j if j <= i."""
    scale: float | Tensor | None = 1.0
    """Multiplies query . key as they are given: a number, a 0-dim tensor or one value per query head [H]. `None`
    where only logits are known."""
    query_scale: float | Tensor = 1.0
    """The part of the scale that `query` contains already; number, 0-dim or [H]."""
    key_scale: float | Tensor = 1.0
    """The part of the scale that `key` contains already; number, 0-dim or [H]."""
    softcap: float | None = None
    """Without `logits`: scale * q.k becomes softcap * tanh(scale * q.k / softcap), before any float mask is added."""
    plain: bool = False
    """With `logits`: they are scale * q.k with nothing added or capped, so that `qk_std` equals `logit_std`."""
    sinks: Tensor | None = None
    """[H], one learned logit per head that joins the denominator."""
    head_dim: int | None = None
    """D where it is known (always with `query`)."""
    padding: Tensor | None = None
    """[B, 1, Q, 1], True where a query is none: its row, which the masks must block, is not counted as masked."""
    layers: tuple[int, ...] = ()
    """How many heads each of several calls has that lie side by side, empty for a single one."""
    dropout: bool = False
    """Dropout on the probabilities inside a fused kernel: gradients are then approximate."""

    @property
    def shape(self) -> CallShape:
        """The sizes of the call."""
        if self.logits is not None:
            return CallShape(*self.logits.shape)
        if self.query is None or self.key is None:
            raise ValueError("An AttentionCall needs either logits, or query and key.")
        batch, heads, queries, _ = self.query.shape
        return CallShape(batch, heads, queries, self.key.shape[2])


class CallShape(NamedTuple):
    """Sizes of an attention call."""

    batch: int
    heads: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionStatistics:
    """Statistics of one attention layer, per head, pooled over all its calls.

    Each statistic of the catalog is a float tensor of shape [H] on the CPU, or `None` where it was not measured: a
    missing number is never 0. A head without a qualifying row is nan in an otherwise measured tensor.

    Attributes:
        scale: The effective scale that multiplies q.k, wherever the model applies it, [H].
        scale_ratio: scale * sqrt(D), 1 for textbook attention, [H].
        rows: Rows with at least one allowed key, [H].
        masked_rows: Rows without any allowed key, [H].
        nonfinite: Unmasked logits that are nan or inf, [H].
        head_dim: D of query and key, `None` if unknown.
        keys: The largest number of keys.
        calls: How many attention calls are pooled.
        approximate: Names of statistics that are estimates.
        standard_error: How far the estimates from sampled rows are off, one standard deviation each, [H], by name;
            from this sample alone, so rough where it is small. Empty where all rows were looked at.

    Source: Vaswani et al. 2017, arXiv 1706.03762, for the scale; for each statistic its page in docs/statistics.

    Example:
        >>> import torch
        >>> from attn_monitor.functional import attention_statistics
        >>> stats = attention_statistics(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 7, 16))
        >>> stats.heads, stats.keys, stats.scale.tolist(), stats.scale_ratio.tolist()
        (2, 7, [0.25, 0.25], [1.0, 1.0])
        >>> stats.logit_max.tolist(), stats.grad_logits_norm  # no backward pass: not measured
        ([4.0, 4.0], None)
    """

    logit_mean: Tensor | None = None
    logit_std: Tensor | None = None
    logit_row_std: Tensor | None = None
    critical_ratio: Tensor | None = None
    logit_max: Tensor | None = None
    logit_min: Tensor | None = None
    entropy: Tensor | None = None
    entropy_normalized: Tensor | None = None
    max_probability: Tensor | None = None
    sink_mass: Tensor | None = None
    jacobian_trace: Tensor | None = None
    jacobian_norm: Tensor | None = None
    grad_logits_norm: Tensor | None = None
    grad_probs_norm: Tensor | None = None
    gradient_gain: Tensor | None = None
    q_rms: Tensor | None = None
    k_rms: Tensor | None = None
    qk_std: Tensor | None = None
    alignment: Tensor | None = None
    scale: Tensor | None = None
    scale_ratio: Tensor | None = None
    rows: Tensor
    masked_rows: Tensor
    nonfinite: Tensor
    head_dim: int | None
    keys: int
    calls: int
    approximate: frozenset[str] = frozenset()
    standard_error: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """The number of query heads H."""
        return len(self.rows)

    @property
    def overflow_ratio(self) -> Tensor | None:
        """The largest logit by magnitude, of those measured, relative to 65504, the largest number in float16, [H].

        At 1 the logits themselves overflow in float16. A product that the model scales only afterwards overflows
        earlier, at `scale`. `None` where neither `logit_max` nor `logit_min` was measured.

        Example:
            >>> import torch
            >>> from attn_monitor.functional import softmax_statistics
            >>> stats = softmax_statistics(torch.tensor([[0.0, -32752.0]]), statistics=["logit_max", "logit_min"])
            >>> stats.overflow_ratio.tolist()
            [0.5]
        """
        known = [extremum.abs() for extremum in (self.logit_max, self.logit_min) if extremum is not None]
        return torch.stack(known).amax(0) / FLOAT16_MAX if known else None

    def only(self, names: Collection[str]) -> AttentionStatistics:
        """Return the record without the statistics that are not named.

        Args:
            names: The statistics that stay.

        Returns:
            The record, whose other statistics are `None`; those that stay are the same tensors [H], in the same units.
        """
        others = (name for name in STATISTICS if name not in names)
        gone: dict[str, Any] = {name: None for name in others if getattr(self, name) is not None}
        errors = {name: error for name, error in self.standard_error.items() if name in names}
        return replace(self, **gone, standard_error=errors) if gone else self

    def measured(self) -> dict[str, Tensor]:
        """Return the tensors that were measured, [H] each and in the units of `catalog.STATISTICS`, by field name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

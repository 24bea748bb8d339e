"""The headline statistics in float64, straight from their definitions: nothing of the package is used.

Axes: B batch, T queries and keys, D head dimension; t rows of a tile and k keys that some of them sees.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

TILE = 2**19
"""Entries of a tile: 4 MiB, which a cache holds."""


def exact_statistics(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, causal: bool
) -> dict[str, Tensor]:
    """Return the headline statistics and the factors of [B, H, T, D] inputs, one value per head.

    Args:
        query: The query.
        key: The key.
        value: The value.
        grad_output: The gradient of the output.
        causal: Whether query i sees keys up to i only.
    """
    inputs = torch.stack([query, key, value, grad_output]).double()
    heads = [_head(inputs[:, :, head], causal) for head in range(query.shape[1])]
    return {name: torch.stack([found[name] for found in heads]) for name in heads[0]}


def _head(inputs: Tensor, causal: bool) -> dict[str, Tensor]:
    """Return the statistics of one head; the inputs are query, key, value and gradient, [4, B, T, D]."""
    query, key, value, grad_output = inputs
    total: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    total["largest"] -= torch.inf
    length = query.shape[1]
    step = max(1, TILE // length)
    for item in range(len(query)):
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            seen = slice(0, rows.stop if causal else length)
            found = _tile(query[item, rows], key[item, seen], value[item, seen], grad_output[item, rows], causal, start)
            largest = torch.maximum(total["largest"], found.pop("largest"))
            for name, part in found.items():
                total[name] = total[name] + part
            total["largest"] = largest
    return _combined(total, query, key)


def _tile(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, causal: bool, start: int
) -> dict[str, Tensor]:
    """Return the sums over the rows of a tile, and its largest logit."""
    logits = query @ key.T * query.shape[-1] ** -0.5
    count = torch.full((len(query),), len(key), dtype=torch.float64)
    hidden = torch.zeros((), dtype=torch.bool)
    if causal:
        position = torch.arange(start, start + len(query))
        hidden, count = torch.arange(len(key)) > position[:, None], position.double() + 1
    mean = logits.masked_fill(hidden, 0).sum(-1) / count
    variance = (logits - mean[:, None]).masked_fill_(hidden, 0).square_().sum(-1) / count
    logits.masked_fill_(hidden, -torch.inf)
    probs = logits.softmax(-1)
    grad_probs = grad_output @ value.T
    grad_logits = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))
    many = count >= 2  # a row with one key has no distribution
    rows = {
        "row_variance": variance,
        "entropy": torch.special.entr(probs).sum(-1) / count.log(),
        "trace": (1 - probs.square().sum(-1)) / (1 - 1 / count),
        "grad": grad_logits.square_().sum(-1),
        "rows": torch.ones_like(count),
    }
    return {
        "largest": logits.amax(),
        "count": count.sum(),
        "sum": (count * mean).sum(),
        "squares": (count * (variance + mean.square())).sum(),
        **{name: values[many].sum() for name, values in rows.items()},
    }


def _combined(total: dict[str, Tensor], query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """Return the statistics of a head; every query and every key of it is seen by someone."""
    logit_std = (total["squares"] / total["count"] - (total["sum"] / total["count"]).square()).sqrt()
    q_rms, k_rms = query.square().mean().sqrt(), key.square().mean().sqrt()
    return {
        "logit_std": logit_std,
        "logit_row_std": (total["row_variance"] / total["rows"]).sqrt(),
        "logit_max": total["largest"],
        "entropy_normalized": total["entropy"] / total["rows"],
        "jacobian_trace": total["trace"] / total["rows"],
        "grad_logits_norm": total["grad"].sqrt(),
        "q_rms": q_rms,
        "k_rms": k_rms,
        "qk_std": logit_std,
        "alignment": logit_std / (q_rms * k_rms),  # the scale is 1 / sqrt(D)
    }

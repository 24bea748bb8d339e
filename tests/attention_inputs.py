"""Queries, keys and masks for the functions, and their float64 reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_monitor.catalog import ALL, GRADIENTS
from tests.reference import (
    attention_reference,
)

FORWARD = ALL - GRADIENTS
B, H, Q, K, D = 2, 3, 11, 13, 7  # distinct primes: a swapped axis can't pass


def make_inputs(
    batch: int = B, heads: int = H, queries: int = Q, keys: int = K, groups: int | None = None, std: float = 1.0
) -> tuple[Tensor, Tensor]:
    query, key = torch.randn(batch, heads, queries, D), torch.randn(batch, groups or heads, keys, D)
    return query * std**0.5, key * std**0.5


def make_mask(kind: str, queries: int, keys: int) -> dict[str, Any]:
    """Return the arguments for one kind of mask."""
    padding = torch.arange(keys) < torch.tensor([[keys], [keys - 4]])  # the second item has four padded keys
    match kind:
        case "none":
            return {}
        case "causal":
            return {"is_causal": True}
        case "padding":
            return {"attn_mask": padding[:, None, None, :]}
        case "left padding and causal":
            return {"attn_mask": padding.flip(-1)[:, None, None, :], "is_causal": True}
        case "random bool":
            return {"attn_mask": torch.rand(B, H, queries, keys) > 0.5}
        case "masked rows":
            mask = torch.rand(queries, keys) > 0.4
            mask[::3] = False
            mask[1] = torch.arange(keys) == 2  # a row with one allowed key
            return {"attn_mask": mask}
        case "alibi":
            distance = torch.arange(queries)[:, None] - torch.arange(keys)
            slopes = torch.tensor([0.5, 0.25, 0.125])[:, None, None]
            return {"attn_mask": -slopes * distance.abs(), "is_causal": True}
        case "additive":
            fills = torch.tensor([0.0, -1e4, -1e9, torch.finfo(torch.float32).min, -math.inf, -300.0])
            return {"attn_mask": fills[torch.randint(len(fills), (B, 1, queries, keys))]}
        case "bfloat16 additive":
            return {"attn_mask": torch.where(torch.rand(queries, keys) > 0.3, 0.0, -1e4).bfloat16()}
    raise AssertionError(kind)


MASKS = [
    "none",
    "causal",
    "padding",
    "left padding and causal",
    "random bool",
    "masked rows",
    "alibi",
    "additive",
    "bfloat16 additive",
]


def reference_of(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    return attention_reference(query, key, masks=() if attn_mask is None else (attn_mask,), **options)

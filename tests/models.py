"""What several tests share: records made by hand and tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_monitor.records import AttentionStatistics


def make_record(
    heads: int = 2, *, head_dim: int | None = 64, nonfinite: Sequence[int] | None = None, **values: Sequence[float]
) -> AttentionStatistics:
    """Return a record that holds just the given per-head values."""
    tensors: dict[str, Any] = {name: torch.tensor(value) for name, value in values.items()}
    return AttentionStatistics(
        **tensors,
        rows=torch.full((heads,), 14),
        masked_rows=torch.zeros(heads, dtype=torch.long),
        nonfinite=torch.tensor(nonfinite if nonfinite is not None else [0] * heads),
        head_dim=head_dim,
        keys=7,
        calls=1,
    )

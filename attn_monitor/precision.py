"""Arithmetic that holds for tiny, huge and broken numbers, and looks at a value only where nothing waits for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_monitor.sums import state_dtype

_TINY, _HUGE = 1e-15, 1e15
"""Beyond these the squares that make up a norm may leave the range of float32."""


def known_finite(sums: Tensor) -> bool:
    """Tell whether sums, and so all their terms, are known to be finite without waiting for a device.

    On the CPU there is nothing to wait for; elsewhere the answer is that it is not known.
    """
    if sums.device.type != "cpu":
        return False
    (total,) = sums.sum().reshape(1).tolist()
    return math.isfinite(total)


def row_norms(values_bHtk: Tensor, out_bHt: Tensor) -> None:
    """Write the norm of each row, right also where its squares are not: 1e-25 squared is 0 in float32."""
    if values_bHtk.device.type == "cpu":
        torch.linalg.vector_norm(values_bHtk, dim=-1, out=out_bHt)
        if not out_bHt.numel():
            return
        least, most = torch.stack(out_bHt.aminmax()).tolist()
        if least >= _TINY and most <= _HUGE:
            return
    out_bHt.copy_(torch.linalg.vector_norm(values_bHtk, dim=-1, dtype=state_dtype(values_bHtk.device)))

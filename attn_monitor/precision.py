"""Arithmetic that holds for tiny, huge and broken numbers, and looks at a value only where nothing waits for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def known_below(values: Tensor, limit: float) -> bool:
    """Tell whether all values are known to be below a limit without waiting for a device."""
    if values.device.type != "cpu" or not values.numel():
        return False
    (largest,) = values.amax().reshape(1).tolist()
    return bool(largest < limit)


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


class _Shared:
    """How many threads compute in full precision now, and what brings the settings back when the last one leaves."""

    lock = threading.Lock()
    users = 0
    restore: Callable[[], None]


@contextmanager
def full_matmul_precision() -> Iterator[None]:
    """Multiply in true float32, and leave every setting as it was.

    The settings belong to the process. So the first of several threads saves them, and the last one brings them back.
    """
    with _Shared.lock:
        if not _Shared.users:
            _Shared.restore = _raise_precision()
        _Shared.users += 1
    try:
        yield
    finally:
        with _Shared.lock:
            _Shared.users -= 1
            if not _Shared.users:
                _Shared.restore()


def _raise_precision() -> Callable[[], None]:
    """Choose true float32 and return what undoes it."""
    # torch has no hints for these attributes.
    backends: list[Any] = [torch.backends.cuda, torch.backends.mkldnn]
    if not all(hasattr(backend.matmul, "fp32_precision") for backend in backends):  # torch before 2.9 has one setting
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        return lambda: torch.set_float32_matmul_precision(before)
    changed: list[tuple[Any, str]] = []
    for backend in backends:
        precision = backend.matmul.fp32_precision
        if precision in {"ieee", "none"}:
            continue
        backend.matmul.fp32_precision = "none"  # if this changes nothing, it is inherited, and stays so
        inherited = backend.matmul.fp32_precision == precision
        changed.append((backend.matmul, "none" if inherited else precision))
        backend.matmul.fp32_precision = "ieee"

    def restore() -> None:
        for matmul, precision in changed:
            matmul.fp32_precision = precision

    return restore

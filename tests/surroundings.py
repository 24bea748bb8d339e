"""Settings of a user under which a computation of ours must neither wait nor change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_monitor import unseen


class NoSync(TorchDispatchMode):
    """Fails on whatever waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "masked_select", "equal"}, func
        return func(*args, **(kwargs or {}))


@contextmanager
def hostile_surroundings() -> Iterator[None]:
    """Autocast, another default device and dtype, and an error for whatever waits for the device."""
    torch.set_default_dtype(torch.float16)
    try:
        visible = patch.object(unseen, "without_dispatch_modes", nullcontext)
        sync = NoSync()  # type: ignore[no-untyped-call] # torch has no hints for it
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), visible, sync:
            yield
    finally:
        torch.set_default_dtype(torch.float32)

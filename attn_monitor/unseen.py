"""Our own operations, out of sight of every mode: the user's, autocast's, and those of selective checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Switch dispatch modes off: one that saves or counts operations must not find ours among the model's."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _disable_current_modes()


@contextmanager
def unseen() -> Iterator[None]:
    """Run operations that no function mode, no dispatch mode and no tensor subclass takes notice of."""
    with torch._C.DisableTorchFunction(), without_dispatch_modes():
        yield

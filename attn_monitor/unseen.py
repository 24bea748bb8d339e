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


def unseen() -> AbstractContextManager[object]:
    """Run operations that no function mode, no dispatch mode and no tensor subclass takes notice of."""
    # Entered for every tensor that is followed, so not in Python where that can be avoided.
    return _unseen_by_dispatch() if torch._C._len_torch_dispatch_stack() else torch._C.DisableTorchFunction()


@contextmanager
def _unseen_by_dispatch() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), without_dispatch_modes():
        yield

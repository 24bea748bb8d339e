"""Compiled code runs eagerly while it is watched: hooks do not reach inside a compiled graph."""

from __future__ import annotations

import sys
from typing import Any

import torch

_holders: set[object] = set()
_stances: list[Any] = []


def hold_eager(holder: object) -> None:
    """Run compiled code eagerly until every holder has let go; nothing is compiled again afterwards."""
    # Without dynamo nothing can be compiled, and importing it takes seconds.
    if not _holders and "torch._dynamo" in sys.modules:
        _stances.append(torch.compiler.set_stance("force_eager"))
    _holders.add(holder)


def hold_eager_now() -> None:
    """Do so even though nothing was compiled so far, right before something is; without a holder do nothing."""
    if _holders and not _stances:
        _stances.append(torch.compiler.set_stance("force_eager"))


def release_eager(holder: object) -> None:
    """Let go; the last holder brings back the stance there was before, which may be the user's own."""
    _holders.discard(holder)
    if not _holders and _stances:
        _stances.pop().__exit__(None, None, None)

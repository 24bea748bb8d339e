"""Modules that call themselves attention and in which none was seen."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn

from attn_monitor.capture.naming import is_helper

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_PART = re.compile(r"output|mask|bias|norm|dropout|embed|pool|layer|block|encoder|decoder|model|head$", re.IGNORECASE)
"""What only stands beside an attention, or holds one among other things."""
NOTHING_SEEN = (
    "no softmax seen in it: an attention without one, or inside a kernel nobody can see into; "
    "call observe_attention or observe_logits there"
)


def unseen_attention(
    names: Mapping[nn.Module, str], called: Collection[nn.Module], seen: Collection[str]
) -> dict[str, str]:
    """Return the modules that are named like attention, have run, and in which nothing was seen, with the reason.

    Args:
        names: The names of all modules.
        called: The modules that have run.
        seen: The names under which something was seen, measured or not.

    Example:
        >>> class LinearAttention(nn.Linear): ...
        >>> model = nn.Sequential(LinearAttention(2, 2), nn.Linear(2, 2))
        >>> names = {module: name for name, module in model.named_modules()}
        >>> list(unseen_attention(names, list(names), seen=[]))
        ['0']
    """
    found: dict[str, str] = {}
    for module, name in names.items():
        kind = type(module).__name__
        if module not in called or not _ATTENTION.search(kind) or _PART.search(kind) or is_helper(module):
            continue
        if next(module.parameters(), None) is None and next(module.children(), None) is None:
            continue  # a function in the shape of a module, part of its parent
        related = (*seen, *found)
        if not any(_within(other, name) or _within(name, other) for other in related):
            found[name or kind] = NOTHING_SEEN
    return found


def _within(inner: str, outer: str) -> bool:
    return inner == outer or not outer or inner.startswith(f"{outer}.")

"""Modules that call themselves attention and in which none was seen."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn

from attn_monitor.capture.naming import is_helper

_KIND = re.compile(r"attention|attn", re.IGNORECASE)
_PLACE = re.compile(r"((self|cross|enc|dec|encoder|decoder)_?)?(attn|attention)_?\d*", re.IGNORECASE)
"""What an attribute is called that holds a whole attention, not a part of one."""
_PART = re.compile(r"output|mask|bias|norm|dropout|embed", re.IGNORECASE)
"""What only stands beside an attention."""
_PLAIN = re.compile(r"layer$|linear|project|bottleneck|conv|sequential|list$|dict$", re.IGNORECASE)
"""What may be called attention for what it is used for, and is none by its class."""
NOTHING_SEEN = (
    "no softmax of queries times keys was seen in it: linear or additive attention, or a kernel or "
    "compiled code nobody can look into; call observe_attention or observe_logits there"
)


def unseen_attention(
    names: Mapping[nn.Module, str], called: Collection[nn.Module], seen: Collection[str]
) -> dict[str, str]:
    """Return the modules that are named like attention, have run, and in which nothing was seen, with the reason.

    Of several that hold each other the innermost is named. What was seen in a module speaks for all around it, and for
    what is inside it if that is a part of it: directly below, or below a module that is itself named like attention.

    Args:
        names: The names of all modules, those of the inner ones after those of the outer ones.
        called: The modules that have run.
        seen: The names under which something was seen, measured or not; that of the root is empty.

    Example:
        >>> class LinearAttention(nn.Linear): ...
        >>> model = nn.Sequential(LinearAttention(2, 2), nn.Linear(2, 2))
        >>> names = {module: name for name, module in model.named_modules()}
        >>> list(unseen_attention(names, list(names), seen=[]))
        ['0']
    """
    holders = {name for module, name in names.items() if name in seen and _named_attention(module, name)}
    found: dict[str, str] = {}
    for module, name in reversed(list(names.items())):
        if module not in called or not _named_attention(module, name):
            continue
        around = any(inner != name and is_within(inner, name) for inner in found)
        below = name.rpartition(".")[0] in seen or any(is_within(name, holder) for holder in holders)
        if not around and not below and not any(is_within(inner, name) for inner in seen):
            found[name or type(module).__name__] = NOTHING_SEEN
    return dict(reversed(list(found.items())))


def is_within(inner: str, outer: str) -> bool:
    """Tell whether a module is another or inside it, by their names."""
    return inner == outer or not outer or inner.startswith(f"{outer}.")


def _named_attention(module: nn.Module, name: str) -> bool:
    kind = type(module).__name__
    if _PART.search(kind) or is_helper(module):
        return False
    if _KIND.search(kind):
        return True
    return not _PLAIN.search(kind) and _PLACE.fullmatch(name.rpartition(".")[2]) is not None

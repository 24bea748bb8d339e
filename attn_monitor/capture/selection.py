"""Which modules the user chooses: by name, glob, type or predicate."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from torch import nn

from attn_monitor.capture.naming import Selection, Selector
from attn_monitor.settings import describe, takes

_LISTED = 20
"""How many module names an error lists at most: the largest models have tens of thousands."""


def checked_selection(modules: Selection | Iterable[Selector]) -> Selection:
    """Return `modules` in a form that can be read several times and in the same order in every process.

    Raises:
        TypeError: If it is neither a name, a glob, a module type, a predicate, nor a list of these.
        ValueError: If it is an empty list or an empty name.
    """
    if isinstance(modules, Iterable) and not isinstance(modules, (str, Sequence, nn.Module, type)):
        modules = sorted(modules, key=describe) if isinstance(modules, (set, frozenset)) else list(modules)
    selectors = _selectors(modules)
    if modules is not None and not selectors:
        raise ValueError("`modules` is an empty list and selects nothing. Pass None to discover all attention.")
    for selector in selectors:
        _check_selector(selector)
    return modules


def _check_selector(selector: Any) -> None:
    if isinstance(selector, nn.Module):
        raise TypeError("`modules` got a module itself. Pass its name, its type or a predicate.")
    if isinstance(selector, type) and not issubclass(selector, nn.Module):
        raise TypeError(f"`modules` got the type {selector.__name__}, which is not a torch.nn.Module.")
    if isinstance(selector, str) and not selector:
        raise ValueError("`modules` has an empty name. Pass None to discover all attention, or a name or glob.")
    if callable(selector) and not isinstance(selector, type) and not takes(selector, 2):
        raise TypeError(
            "`modules` expects a predicate (name, module) -> bool, got "
            f"{describe(selector)}, which cannot be called with two arguments."
        )
    if not isinstance(selector, str) and not callable(selector):
        raise TypeError(
            "`modules` expects a module name or glob, a module type, a predicate (name, module) -> bool, or a list "
            f"of these, got {selector!r} of type {type(selector).__name__}."
        )


def _selectors(modules: Any) -> list[Selector]:
    if modules is None:
        return []
    return list(modules) if isinstance(modules, Sequence) and not isinstance(modules, str) else [modules]


def select_modules(modules: Selection, names: Mapping[nn.Module, str]) -> frozenset[str] | None:
    """Return the names of the modules that match, `None` for no restriction.

    Raises:
        ValueError: If nothing matches; the message lists module names, those most like the choice first.
    """
    selectors = _selectors(modules)
    if not selectors:
        return None
    matching: set[str] = set()
    for selector in selectors:
        found = {name for module, name in names.items() if _matches(selector, name, module)}
        # A name is meant for this model, and wrong here; a list of types may be meant for several.
        if not found and isinstance(selector, str) and len(selectors) > 1:
            raise ValueError(_no_match(f"{selector!r} in `modules`", [selector], names))
        matching |= found
    if not matching:
        raise ValueError(_no_match(f"modules={modules!r}", selectors, names))
    return frozenset(matching)


def _no_match(which: str, selectors: Sequence[Selector], names: Mapping[nn.Module, str]) -> str:
    return (
        f"{which} matches no module. Expected a name, a glob, a module type or a predicate that fits at least one of: "
        f"{_listing(selectors, names.values())}."
    )


def _matches(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return name == selector or fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(module, selector)
    return bool(selector(name, module))


def _listing(selectors: Sequence[Selector], names: Iterable[str]) -> str:
    """Return the names most like the choice, and how many others there are."""
    listed = list(filter(None, dict.fromkeys(names)))
    if len(listed) <= _LISTED:
        return ", ".join(listed) or "(the model has no submodules)"
    wanted = [re.sub(r"[*?\[\]]+", "", selector).strip(".") for selector in selectors if isinstance(selector, str)]
    listed.sort(key=lambda name: -_likeness(name, wanted))
    return f"{', '.join(listed[:_LISTED])}, ... and {len(listed) - _LISTED} more"


def _likeness(name: str, wanted: Sequence[str]) -> float:
    """Return how like a name is to what was wanted, in all or in its last parts: 1 is equal."""
    best = 0.0
    for want in wanted:
        tail = ".".join(name.split(".")[-1 - want.count(".") :])
        best = max(best, *(SequenceMatcher(None, some, want, autojunk=False).ratio() for some in {name, tail}))
    return best

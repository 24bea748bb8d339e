"""Module names as the user knows them, the choice of modules, and the call sites inside a module."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TypeAlias

import torch
from torch import nn

Selector: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool]"
Selection: TypeAlias = "Selector | Sequence[Selector] | None"
CallSite: TypeAlias = tuple[tuple[str, int], ...]

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DATA_PARALLEL = re.compile(r"data_?parallel|ddp", re.IGNORECASE)
_HELPER = re.compile(r"softmax|softmin|dropout|identity", re.IGNORECASE)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def canonical_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return each module's name without the parts that wrappers add; the root is named ``""``.

    Two modules never share a name: where dropping the wrappers would make them equal the full name stays.
    """
    names: dict[nn.Module, str] = {}
    taken: set[str] = set()
    modules = dict(root.named_modules())
    for raw, module in modules.items():
        name = _without_wrappers(raw, modules)
        # A wrapper and what it wraps have one name in common; the outer one, which is met first, carries it.
        if name in taken and not _is_wrapped(raw):
            name = raw
        taken.add(name)
        names[module] = name
    return names


def _is_wrapped(raw: str) -> bool:
    return raw.rpartition(".")[2] in _WRAPPER_PARTS | {"module", "model", "base_model", "base_layer"}


def _without_wrappers(raw: str, modules: dict[str, nn.Module]) -> str:
    kept: list[str] = []
    path = ""
    parts = raw.split(".") if raw else []
    peft = False
    for part in parts:
        parent = modules[path]
        path = f"{path}.{part}" if path else part
        kind = type(parent).__name__
        if part in _WRAPPER_PARTS or part == "base_layer":
            continue
        if part == "module" and (
            isinstance(parent, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or _DATA_PARALLEL.search(kind)
        ):
            continue
        if part == "base_model" and kind.startswith("Peft"):
            peft = True
            continue
        if part == "model" and peft:
            peft = False
            continue
        peft = False
        kept.append(part)
    return ".".join(kept)


def check_selection(modules: Selection) -> None:
    """Raise where `modules` is not something that can select.

    Raises:
        TypeError: If it is neither a name, a glob, a module type, a predicate, nor a list of these.
        ValueError: If it is an empty list.
    """
    for selector in _selectors(modules):
        if isinstance(selector, type) and not issubclass(selector, nn.Module):
            raise TypeError(f"`modules` got the type {selector.__name__}, which is not a torch.nn.Module.")
        if not isinstance(selector, str) and not callable(selector):
            raise TypeError(
                "`modules` expects a module name or glob, a module type, a predicate (name, module) -> bool, or a list "
                f"of these, got {selector!r} of type {type(selector).__name__}."
            )
        if isinstance(selector, nn.Module):
            raise TypeError("`modules` got a module itself. Pass its name, its type or a predicate.")


def _selectors(modules: Selection) -> list[Selector]:
    if modules is None:
        return []
    if isinstance(modules, str) or not isinstance(modules, Iterable):
        return [modules]
    if not (selectors := list(modules)):
        raise ValueError("`modules` is an empty list and selects nothing. Pass None to discover all attention.")
    return selectors


def select_modules(modules: Selection, names: dict[nn.Module, str]) -> frozenset[str] | None:
    """Return the names of the modules that match, `None` for no restriction.

    Raises:
        ValueError: If nothing matches; the message lists the module names.
    """
    selectors = _selectors(modules)
    if not selectors:
        return None
    matching = {name for module, name in names.items() if any(_matches(s, name, module) for s in selectors)}
    if not matching:
        listed = [name for name in names.values() if name]
        shown = ", ".join(listed[:60]) + (f", ... ({len(listed)} in all)" if len(listed) > 60 else "")
        raise ValueError(
            f"modules={modules!r} matches no module. Expected a name, a glob, a module type or a predicate that fits "
            f"at least one of: {shown or '(the model has no submodules)'}."
        )
    return frozenset(matching)


def _matches(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return name == selector or fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(module, selector)
    return bool(selector(name, module))


def is_selected(name: str, selected: frozenset[str] | None) -> bool:
    """Tell whether an owner is one of the selected modules or inside one."""
    if selected is None or "" in selected:
        return True
    return any(name == outer or name.startswith(f"{outer}.") for outer in selected)


def is_helper(module: nn.Module) -> bool:
    """Tell whether a module only applies a softmax or dropout for its parent, and so owns no attention."""
    bare = next(module.parameters(), None) is None and next(module.children(), None) is None
    name = type(module).__name__
    return bare and _HELPER.search(name) is not None and "att" not in name.lower()


def call_site(owner: nn.Module | None) -> CallSite:
    """Return the source lines that lead from the forward of `owner` to the function being called, innermost first.

    Lines inside torch and this package are left out, so that a torch module has one call site.
    """
    lines: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_TORCH):
            if code.co_name == "_call_impl" and frame.f_locals.get("self") is owner:
                break
        elif code.co_filename.startswith(_HERE):
            if code.co_name == "call_entry_point":  # the wrapper around a method such as training_step
                break
        else:
            lines.append((code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)

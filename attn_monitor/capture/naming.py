"""Module names as the user knows them, and the call sites inside a module."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Sequence
from types import FrameType
from typing import TypeAlias

import torch
from torch import nn

Selector: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool]"
Selection: TypeAlias = "Selector | Sequence[Selector] | None"
CallSite: TypeAlias = tuple[tuple[str, int], ...]

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
_DATA_PARALLEL = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
"""Classes whose only child is called `module`, torch's own and those of the same name elsewhere."""
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
    begun: list[str] = []
    for piece in parts:
        begun.append(piece)
        inner = ".".join([path, *begun] if path else begun)
        if inner not in modules:  # torch takes names with dots in them, too
            continue
        parent, part = modules[path], ".".join(begun)
        path, begun = inner, []
        kind = type(parent).__name__
        if part in _WRAPPER_PARTS or part == "base_layer":
            continue
        if part == "module" and any(base.__name__ in _DATA_PARALLEL for base in type(parent).__mro__):
            continue
        if part == "base_model" and kind.startswith("Peft"):
            peft = True
            continue
        if part == "model" and peft and type(parent).__module__.partition(".")[0] == "peft":
            peft = False  # of an adapter; prompts are put before the model itself, which may have a `model` of its own
            continue
        peft = False
        kept.append(part)
    return ".".join(kept)


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


def module_called_by_forward(owner: nn.Module | None, known: Container[nn.Module]) -> nn.Module | None:
    """Return the innermost known module whose `forward` is running inside that of `owner`, called without its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and frame.f_locals.get("self") is owner:
            return None
        if code.co_name == "forward" and code.co_varnames:
            module = frame.f_locals.get(code.co_varnames[0])
            if module is owner:
                return None
            if isinstance(module, nn.Module) and module in known and not is_helper(module):
                return module
        frame = frame.f_back
    return None


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

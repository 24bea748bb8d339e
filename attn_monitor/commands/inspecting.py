"""`attn-monitor inspect`: finding what the user names, running it once, and the table of what was seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from attn_monitor.commands.errors import FAILED, OK, USAGE, CommandError
from attn_monitor.phrases import error_line
from attn_monitor.reports.terminal import say


def inspect_target(target: str) -> int:
    """Print the attention of the model that `target` returns.

    Args:
        target: `module:callable`; the callable returns `model, inputs`.

    Returns:
        The exit status: 1 if no attention would be measured.

    Raises:
        CommandError: If there is no such target, or it or the model failed.
    """
    build = _resolve(target)
    from attn_monitor.inspection import inspect_attention, inspection_table

    model, args, kwargs = _sample(target, _run(f"{target}()", build))
    found = _run("the model", inspect_attention, model, *args, **kwargs)
    say(inspection_table(found) or "no attention found")
    if any(not one.skipped for one in found):
        return OK
    say(
        "attn-monitor: nothing here is a softmax over a product of two activations; kernels and softmaxes that cannot "
        "be seen can be shown with observe_attention and observe_logits, see docs/limitations.md",
        error=True,
    )
    return FAILED


def _resolve(target: str) -> Any:
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise CommandError(f"TARGET expects module:callable, for example train:sample, got {target!r}", USAGE)
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        dotted = ".".join(part for part in Path(module_name).with_suffix("").parts if part not in (".", "..", os.sep))
        raise CommandError(
            f"TARGET expects the name of a module, not of a file: write {dotted}:{path} in place of {target}, "
            "in the directory from which it can be imported",
            USAGE,
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, which the installed command does not
    found = _imported(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{module_name!r} has no {path!r}{_hint(found, part)}", USAGE)
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{target} is not callable, it is of type {type(found).__name__}", USAGE)
    return found


def _imported(module_name: str) -> Any:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise CommandError(f"no module named {missing!r} here or among the installed ones", USAGE) from error
        raise CommandError(f"importing {module_name} failed: {error_line(error)}", FAILED) from error
    except SystemExit as error:
        raise CommandError(
            f"importing {module_name} ended the program ({error_line(error)}): "
            'put what it does as a script below `if __name__ == "__main__":`',
            FAILED,
        ) from error
    except Exception as error:
        raise CommandError(f"importing {module_name} failed: {error_line(error)}", FAILED) from error


def _hint(place: Any, wanted: str) -> str:
    """Return what could have been meant: names like it, else those the place defines itself."""
    names = [name for name in vars(place) if not name.startswith("_") and callable(getattr(place, name, None))]
    if near := get_close_matches(wanted, names):
        return f"; did you mean {' or '.join(near)}?"
    home = getattr(place, "__name__", None)
    own = [name for name in names if getattr(getattr(place, name), "__module__", None) == home]
    return f"; it has {', '.join(own)}" if own else "; it defines nothing that can be called"


def _run(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise CommandError(f"{what} failed: {error_line(error)}", FAILED) from error


def _sample(target: str, returned: Any) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    from torch import nn

    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        kind = type(returned).__name__
        raise CommandError(f"{target} must return `model, inputs`, a torch module first; it returned {kind}", USAGE)
    model, inputs = returned
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, inputs if isinstance(inputs, tuple) else (inputs,), {}

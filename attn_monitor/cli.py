"""The command `attn-monitor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from attn_monitor import __version__

FAILED, USAGE = 1, 2
_TARGET = """\
TARGET is module:callable, for example train:sample. The callable takes no arguments and returns the model and what to
call it with: `model, inputs`, where inputs is a tensor, a tuple of positional arguments or a dict of keyword ones.

  # train.py
  def sample():
      return MyModel(), torch.zeros(2, 16, dtype=torch.long)

exit status: 0 if attention was found, 1 if none was or the model failed, 2 for a wrong command line
"""


class _CommandError(Exception):
    """What the user reads instead of a traceback."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows its name; that of the process by default.

    Returns:
        The exit status: 0, 1 where the model failed or has no attention, 2 for a wrong command line.

    Example:
        >>> main(["version"])
        0.1.0
        0
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return int(stop.code or 0)
    try:
        if options.command == "version":
            print(__version__)
            return 0
        if options.command == "inspect":
            return _inspect(options.target)
    except _CommandError as error:
        print(f"attn-monitor: {error}", file=sys.stderr)
        return error.status
    parser.print_help(sys.stderr)
    return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attn-monitor", description="Training diagnostics for attention.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("version", help="print the version")
    inspect = commands.add_parser(
        "inspect",
        help="list the attention of a model that will be watched, and what will not be and why",
        description="Run a model once, without gradients, and list the attention in it.",
        epilog=_TARGET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("target", metavar="TARGET", help="module:callable that returns the model and its inputs")
    return parser


def _inspect(target: str) -> int:
    build = _resolve(target)
    from attn_monitor.inspection import inspect_attention, inspection_table

    model, args, kwargs = _sample(target, _run(f"{target}()", build))
    found = _run("the model", inspect_attention, model, *args, **kwargs)
    print(inspection_table(found) or "no attention found")
    return 0 if any(not one.skipped for one in found) else FAILED


def _resolve(target: str) -> Any:
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise _CommandError(f"TARGET expects module:callable, for example train:sample, got {target!r}", USAGE)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, which the installed command does not
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise _CommandError(f"no module named {missing!r} here or among the installed ones", USAGE) from error
        raise _CommandError(f"importing {module_name} failed: {_told(error)}", FAILED) from error
    except Exception as error:
        raise _CommandError(f"importing {module_name} failed: {_told(error)}", FAILED) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise _CommandError(f"{module_name!r} has no {path!r}", USAGE)
        found = getattr(found, part)
    if not callable(found):
        raise _CommandError(f"{target} is not callable, it is of type {type(found).__name__}", USAGE)
    return found


def _run(what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise _CommandError(f"{what} failed: {_told(error)}", FAILED) from error


def _sample(target: str, returned: Any) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    from torch import nn

    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        kind = type(returned).__name__
        raise _CommandError(f"{target} must return `model, inputs`, a torch module first; it returned {kind}", USAGE)
    model, inputs = returned
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, inputs if isinstance(inputs, tuple) else (inputs,), {}


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

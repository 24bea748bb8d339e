"""The command `attn-monitor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_monitor import __version__
from attn_monitor.reports.terminal import progress_bar, say

if TYPE_CHECKING:
    from attn_monitor.reports.runs import Findings

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_REPORT_NAME = "attention_report.html"
_TARGET = """\
TARGET is module:callable, for example train:sample. The callable takes no arguments and returns the model and what to
call it with: `model, inputs`, where inputs is a tensor, a tuple of positional arguments or a dict of keyword ones.

  # train.py
  def sample():
      return MyModel(), torch.zeros(2, 16, dtype=torch.long)

exit status: 0 if attention was found, 1 if none was or the model failed, 2 for a wrong command line
"""
_RUN_DIR = """\
RUN_DIR is where the event files of a run are, lightning_logs/version_0 for example, or a directory with several runs,
whatever has become of them: finished, still running, crashed or resumed.

exit status: 0 if there was something to report, 1 if not or a file could not be written, 2 for a wrong command line
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
        The exit status: 0, 1 where the model failed or there is nothing to show, 2 for a wrong command line.

    Example:
        >>> main(["--version"])
        attn-monitor 0.1.0
        0
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return int(stop.code or 0)
    try:
        if options.command == "version":
            say(__version__)
            return 0
        if options.command == "inspect":
            return _inspect(options.target)
        if options.command == "report":
            output = None if options.summary_only else options.output or options.run_dir / _REPORT_NAME
            return _report(options.run_dir, output, options.max_megabytes)
    except _CommandError as error:
        say(f"attn-monitor: {error}", error=True)
        return error.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough; nothing more may be flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    parser.print_help(sys.stderr)
    return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attn-monitor", description="Training diagnostics for attention.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
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
    report = commands.add_parser(
        "report",
        help="summarise training runs here, and write one HTML file with every head",
        description="Summarise what training runs recorded, and write the Attention tab as one HTML file.",
        epilog=_RUN_DIR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a run, or of several")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help=f"the HTML file (default: RUN_DIR/{_REPORT_NAME})"
    )
    report.add_argument("--summary-only", "--no-html", action="store_true", help="print the summary and write no file")
    report.add_argument(
        "--max-megabytes",
        metavar="N",
        type=_positive,
        default=20.0,
        help="leave out steps of larger runs so that the file stays below about N MB (default: %(default)g)",
    )
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expects a positive number of megabytes, got {text!r}")
    return number


# -- inspect -----------------------------------------------------------------------------------------------------------


def _inspect(target: str) -> int:
    build = _resolve(target)
    from attn_monitor.inspection import inspect_attention, inspection_table

    model, args, kwargs = _sample(target, _run(f"{target}()", build))
    found = _run("the model", inspect_attention, model, *args, **kwargs)
    say(inspection_table(found) or "no attention found")
    if any(not one.skipped for one in found):
        return 0
    say(
        "attn-monitor: nothing here is a softmax over a product of two activations; kernels and softmaxes that cannot "
        "be seen can be shown with observe_attention and observe_logits, see docs/limitations.md",
        error=True,
    )
    return FAILED


def _resolve(target: str) -> Any:
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise _CommandError(f"TARGET expects module:callable, for example train:sample, got {target!r}", USAGE)
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        dotted = ".".join(part for part in Path(module_name).with_suffix("").parts if part not in (".", "..", os.sep))
        raise _CommandError(
            f"TARGET expects the name of a module, not of a file: write {dotted}:{path} in place of {target}, "
            "in the directory from which it can be imported",
            USAGE,
        )
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
            raise _CommandError(f"{module_name!r} has no {path!r}{_hint(found, part)}", USAGE)
        found = getattr(found, part)
    if not callable(found):
        raise _CommandError(f"{target} is not callable, it is of type {type(found).__name__}", USAGE)
    return found


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


# -- report ------------------------------------------------------------------------------------------------------------


def _report(run_dir: Path, output: Path | None, megabytes: float) -> int:
    from attn_monitor.reports.flight import as_run, newest_flights, summarize_flights
    from attn_monitor.reports.report import check_output, write_report
    from attn_monitor.reports.scalar_summary import summarize_scalars
    from attn_monitor.reports.summary import summarize

    try:
        if run_dir.is_dir() and output is not None:
            check_output(output)  # before minutes of reading
        findings = _read(run_dir)
    except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        raise _CommandError(str(error), USAGE) from error
    except OSError as error:
        raise _CommandError(f"{run_dir} cannot be read: {error.strerror or error}", FAILED) from error
    for note in findings.notes:
        say(f"attn-monitor: {note}", error=True)
    flights = summarize_flights(findings.flights)
    summaries = [*map(summarize, findings.runs), *map(summarize_scalars, findings.scalar_runs), *flights]
    if not summaries:
        raise _CommandError(_nothing(run_dir, findings), FAILED)
    say("\n\n".join(summaries))
    if findings.foreign:
        say(f"attn-monitor: nothing of attn_monitor in {', '.join(findings.foreign)}", error=True)
    if output is None:
        return 0
    pictured = [*findings.runs, *map(as_run, newest_flights(findings.flights))]
    if not pictured:
        say("attn-monitor: no HTML file: these runs stored no single heads, and a page shows heads", error=True)
        return 0
    try:
        left_out = write_report(output, pictured, "\n\n".join(summaries), flights, megabytes=megabytes)
    except OSError as error:
        raise _CommandError(
            f"{output} cannot be written ({error.strerror or error}); choose another with --output", FAILED
        ) from error
    for note in left_out:
        say(f"attn-monitor: {note}", error=True)
    say(f"\nwrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def _read(run_dir: Path) -> Findings:
    from attn_monitor.reports.runs import find_runs, read_runs

    found = find_runs(run_dir)
    with progress_bar("reading", sum(files.size for files in found)) as progress:
        return read_runs(found, progress)


def _nothing(run_dir: Path, findings: Findings) -> str:
    advice = "train with callbacks=[AttentionMonitor()] and a TensorBoardLogger, and give the directory it logs to"
    if findings.foreign:
        names = ", ".join(findings.foreign[:5]) + (", ..." if len(findings.foreign) > 5 else "")
        return f"{run_dir} holds runs ({names}), but nothing that attn_monitor wrote: {advice}"
    return f"no event files and no metrics.csv in {run_dir} or below: {advice}"

"""The command `attn-monitor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from attn_monitor import __version__
from attn_monitor.commands.errors import INTERRUPTED, OK, USAGE, CommandError
from attn_monitor.commands.inspecting import inspect_target
from attn_monitor.commands.reporting import REPORT_NAME, report_runs
from attn_monitor.reports.terminal import say

_MAIN = """\
examples:
  attn-monitor demo                              train a small model that collapses, and see its heads flagged
  attn-monitor inspect train:sample              what of your model will be watched, before any training
  attn-monitor report lightning_logs/version_0   what a run recorded, here and as one HTML file

`attn-monitor COMMAND --help` says more. `python -m attn_monitor` is the same command.
exit status: 0 if all went well, 1 if something failed or nothing was found, 2 for a wrong command line, 130 for Ctrl-C
"""
_TARGET = """\
TARGET is module:callable, for example train:sample. The callable takes no arguments and returns the model and what to
call it with: `model, inputs`, where inputs is a tensor, a tuple of positional arguments or a dict of keyword ones.

  # train.py
  def sample():
      return MyModel(), torch.zeros(2, 16, dtype=torch.long)

example: attn-monitor inspect train:sample
exit status: 0 if attention was found, 1 if none was or the model failed, 2 for a wrong command line
"""
_RUN_DIR = """\
RUN_DIR is where the event files of a run are, lightning_logs/version_0 for example, or a directory with several runs,
whatever has become of them: finished, still running, crashed or resumed.

examples:
  attn-monitor report lightning_logs                                      every run in there
  attn-monitor report lightning_logs/version_0 --summary-only             no file
  attn-monitor report lightning_logs/version_0 --output collapse.html     the page, to be mailed

exit status: 0 if there was something to report, 1 if not or a file could not be written, 2 for a wrong command line
"""
_DEMO = """\
Two layers learn to continue the source code of Python's standard library, so nothing is downloaded. It takes
about ten seconds on an idle CPU.

examples:
  attn-monitor demo              the scale 1/sqrt(d_k) is missing and the learning rate high: heads collapse
  attn-monitor demo --healthy    with the scale and QK-norm: none does; TensorBoard shows both runs side by side

exit status: 0 if the heads did what was said, 1 if not or the run could not be written, 2 for a wrong command line
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows its name; that of the process by default.

    Returns:
        The exit status: 0, 1 where something failed or there is nothing to show, 2 for a wrong command line, 130 after
        Ctrl-C.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        attn-monitor ...
        0
    """
    parser = build_parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return int(stop.code or 0)
    try:
        return _run(parser, options)
    except CommandError as error:
        say(f"attn-monitor: {error}", error=True)
        return error.status
    except KeyboardInterrupt:
        say("attn-monitor: interrupted", error=True)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough; nothing more may be flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    match options.command:
        case "version":
            say(__version__)
            return OK
        case "inspect":
            return inspect_target(options.target)
        case "report":
            output = None if options.summary_only else options.output or options.run_dir / REPORT_NAME
            return report_runs(options.run_dir, output, options.max_megabytes)
        case "demo":
            from attn_monitor.commands.demo import run_demo

            return run_demo(options.logdir, steps=options.steps, seed=options.seed, healthy=options.healthy)
    parser.print_help(sys.stderr)
    return USAGE


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="attn-monitor", description="Training diagnostics for attention.", epilog=_MAIN, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small model whose attention collapses, and see its heads flagged",
        description="Train a small model whose attention collapses, under the monitor.",
        epilog=_DEMO,
        formatter_class=raw,
    )
    demo.add_argument(
        "--logdir",
        metavar="DIR",
        type=Path,
        default=Path("attn_monitor_demo"),
        help="where the run is written (default: %(default)s)",
    )
    demo.add_argument("--healthy", action="store_true", help="the same model with scale and QK-norm")
    demo.add_argument(
        "--steps", metavar="N", type=_count, default=100, help="how many steps to train (default: %(default)d)"
    )
    demo.add_argument(
        "--seed", metavar="N", type=_seed, default=0, help="of weights and batches (default: %(default)d)"
    )
    inspect = commands.add_parser(
        "inspect",
        help="list the attention of a model that will be watched, and what will not be and why",
        description="Run a model once, without gradients, and list the attention in it.",
        epilog=_TARGET,
        formatter_class=raw,
    )
    inspect.add_argument("target", metavar="TARGET", help="module:callable that returns the model and its inputs")
    report = commands.add_parser(
        "report",
        help="summarise training runs here, and write one HTML file with every head",
        description="Summarise what training runs recorded, and write the Attention tab as one HTML file.",
        epilog=_RUN_DIR,
        formatter_class=raw,
    )
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a run, or of several")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help=f"the HTML file (default: RUN_DIR/{REPORT_NAME})"
    )
    report.add_argument("--summary-only", "--no-html", action="store_true", help="print the summary and write no file")
    report.add_argument(
        "--max-megabytes",
        metavar="N",
        type=_positive,
        default=20.0,
        help="leave out steps of larger runs so that the file stays below about N MB (default: %(default)g)",
    )
    commands.add_parser("version", help="print the version")
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expects a positive number of megabytes, got {text!r}")
    return number


def _count(text: str) -> int:
    return _whole(text, 1, 100_000)


def _seed(text: str) -> int:
    return _whole(text, 0, 2**32 - 1)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expects a whole number from {least} to {most}, got {text!r}")
    return int(text)

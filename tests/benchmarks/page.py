"""The page: what stands around the tables, and how a table and its numbers are written."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from attn_monitor import __version__
from tests.benchmarks.sizes import SEED
from tests.benchmarks.turns import Spread

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
CPUINFO = Path("/proc/cpuinfo")
NOT_MEASURED = "not measured"
NONE = "-"

INTRODUCTION = """# Cost

Written by `make bench`: what an observed step costs, what its statistics cost alone, and how that grows. All that is
compared takes turns, in an order that changes every round, and each time is divided by that of the base in the same
round: what slows the machine down for a while hits both. A number is the median over the rounds; the middle half of
them, from the first quartile to the third, stands beside it.
"""


def processor() -> str:
    """Return the name of the CPU."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def environment() -> str:
    """Return what was measured with and on."""
    versions = [f"attn_monitor {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {version(name)}" for name in ("pytorch-lightning", "tensorboard", "transformers")]
    waiting = os.environ.get("OMP_WAIT_POLICY", "not set")
    return paragraph(
        f"""Measured with {", ".join(versions)}, on {processor()} ({platform.machine()}, {platform.system()}) with
        {torch.get_num_threads()} threads on {os.cpu_count()} cores, `OMP_WAIT_POLICY` {waiting.lower()}, seed {SEED},
        all in float32."""
    )


def page(sections: Sequence[str]) -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, environment(), *sections])


def paragraph(text: str) -> str:
    """Return some text as one wrapped paragraph, whatever its numbers made of its lines."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all but the first column are aligned right."""
    rules = ["---", *["--:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rules, *rows))


def halves(spread: Spread, digits: int = 3) -> str:
    """Return the middle half of some values."""
    return f"{spread.low:.{digits}f} to {spread.high:.{digits}f}"


def with_halves(spread: Spread) -> str:
    """Return the middle of some values with their middle half."""
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def mebibytes(size: float | None) -> str:
    """Return a size in MiB."""
    return NOT_MEASURED if size is None else f"{round(size, 1) + 0.0:.1f}"  # never -0.0

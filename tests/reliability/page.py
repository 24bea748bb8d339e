"""The page: what goes wrong, what the user sees, what is lost; and what a long training showed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from attn_monitor import __version__
from tests.benchmarks.page import paragraph, table
from tests.reliability.registry import FAULTS, Verdict, Whose

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
SOAK = "## A long training"
INTRODUCTION = """# Reliability

Every row below is a test that makes something fail on purpose, in a real Lightning training of a small model with three
kinds of attention and dropout, and asserts what is left standing: the error that ends the training or none, at most a
few warnings, no hook, mode, setting or tensor of the monitor left behind, and right numbers in the records before and
after. Wherever it makes sense, the training is compared with one that nobody watches: every loss, every weight and the
state of the random numbers are the same to the bit.

Any function of ours that an observed step runs may raise. The guards themselves are the exception, a dozen functions of
some hundreds: what they catch, they can't catch of themselves. Two rows are samples: about 40 of these functions,
evenly over all that a step runs, are made to raise, and Ctrl-C comes at 60 of its lines.

Faults, table and figures are written by `python -m tests.reliability`.
"""
TITLES: Mapping[Whose, str] = {
    "the monitor's": "When the monitor fails",
    "the user's": "When the user's code fails, or the user interrupts it",
    "the system's": "When what is around fails",
}


def fault_table(whose: Whose) -> str:
    """Return the table of the faults of one origin."""
    rows = [[fault.name, fault.sees, fault.lost] for fault in FAULTS.values() if fault.whose == whose]
    return table(["fault", "what the user sees", "what is lost"], rows).replace("--:", "---")  # words, not numbers


def figures(verdicts: Mapping[str, Verdict]) -> str:
    """Return how often something was made to fail, and what came of it."""
    injected = sum(verdict.injected for verdict in verdicts.values())
    compared = sum(verdict.compared for verdict in verdicts.values())
    return paragraph(
        f"{len(verdicts)} kinds of faults, {injected} injected, all survived as the tables say; {compared} trainings "
        f"compared with one that nobody watches, {compared} the same to the bit. With attn_monitor {__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}."
    )


def page(verdicts: Mapping[str, Verdict], soak: str) -> str:
    """Return the whole page.

    Args:
        verdicts: What came of each fault.
        soak: The section about the long training, as it is.
    """
    parts = [INTRODUCTION, "## Figures\n", figures(verdicts).rstrip("\n")]
    for whose, title in TITLES.items():
        parts += [f"\n## {title}\n", fault_table(whose)]
    return "\n".join(part.rstrip("\n") if part.startswith("|") else part for part in parts) + "\n\n" + soak


def soak_section(text: str) -> str:
    """Return the section about the long training from a page."""
    _, heading, rest = text.partition(SOAK)
    return heading + rest


def named_faults(text: str) -> list[str]:
    """Return the names of faults that the tables of a page have."""
    head, _, _ = text.partition(SOAK)
    cells = [line.split(" | ")[0].removeprefix("| ") for line in head.splitlines() if line.startswith("| ")]
    return [cell for cell in cells if cell not in ("fault", "---")]

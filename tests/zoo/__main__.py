"""Examine every entry of the zoo and write what was found into docs/coverage.md."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tests.zoo.compare import TOLERANCE, Findings
from tests.zoo.entry import Entry
from tests.zoo.registry import ENTRIES, GROUPS, available, findings

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
INTRODUCTION = f"""# Coverage

Written by `make zoo` with torch {{torch}} and transformers {{transformers}}; the models and checks are in `tests/zoo`.

Each model is built from a tiny random config with enlarged weights, run forward and backward with and without a probe,
and compared with the attention probabilities it reports itself (`output_attentions=True`), or where it reports none
with the result of every softmax in it. One line is one model under one implementation of attention; what fused kernels
do not report is compared with the eager implementation of the same weights.

- **attentions**: how many attentions the model has, by what it reports. Measured beyond them: see the remark.
- **measured**: how many of them have a record whose entropy per head agrees to {TOLERANCE:g} nats.
- **named**: how many are named in `probe.skipped` with a reason instead. What has no softmax (linear attention, a
  recurrence) is named there too, and counts as an attention only where the model reports it as one.
- **largest difference** of the entropies of any head, in nats.

Unless the remark says otherwise: head dimension and scale are those of the config, no router or classifier is found,
and outputs, gradients and random numbers are the same to the bit with and without a probe. Where a model has both
implementations, all statistics agree between them.

The summary counts the models listed here, and what they report or put through a softmax. A kernel nobody can look into,
in a module whose name says nothing of attention, would be in no such list ([limitations](limitations.md)).
"""


@dataclass
class Totals:
    """Counts over a table."""

    lines: int = 0
    attentions: int = 0
    measured: int = 0
    named: int = 0
    false: int = 0

    def add(self, other: Totals) -> None:
        """Add the counts of another table."""
        self.lines += other.lines
        self.attentions += other.attentions
        self.measured += other.measured
        self.named += other.named
        self.false += other.false


def counted(entry: Entry, found: Findings) -> Totals:
    """Count what a model has and what was seen of it; what has no softmax is no attention here."""
    pairs = found.pairs
    own = len(pairs.reported) + len(pairs.returned) + len(pairs.further)
    # Blank words stand for what has no softmax, and so for no attention; beyond those that are known, any miss counts.
    missed = sum(1 for words in entry.unseen if words) + max(0, len(pairs.missed) - len(entry.unseen))
    reasons = list(found.skipped.values())
    named = sum(1 for words in entry.unseen if words and any(words in reason for reason in reasons))
    return Totals(1, own + missed, own, min(named, missed), len(pairs.extra))


def line(entry: Entry, implementation: str, found: Findings) -> str:
    """Return a line of the table."""
    totals = counted(entry, found)
    difference = f"{found.pairs.difference:.0e}" if totals.measured else ""
    remarks = [
        entry.note,
        *sorted(set(entry.extra.values())) * bool(found.pairs.further),
        *sorted(set(found.skipped.values())),
    ]
    remark = "; ".join(filter(None, remarks)).replace("|", "\\|")
    cells = (entry.name, implementation, totals.attentions, totals.measured, totals.named, difference, remark)
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(entries: tuple[Entry, ...]) -> tuple[list[str], Totals]:
    """Return the lines of a table and their totals."""
    lines = [
        "| model | implementation | attentions | measured | named | largest difference | remark |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    totals = Totals()
    for entry in entries:
        if not available(entry):
            raise SystemExit(f"{entry.name} needs {entry.library}, which is not installed")
        for implementation in entry.implementations:
            found = findings(entry.name, implementation)
            lines.append(line(entry, implementation, found))
            totals.add(counted(entry, found))
            print(lines[-1], file=sys.stderr)
    return lines, totals


def page() -> Iterator[str]:
    """Return the page piece by piece."""
    yield INTRODUCTION.format(torch=torch.__version__.partition("+")[0], transformers=version("transformers"))
    tables = {title: table(entries) for title, entries in GROUPS.items()}
    totals = Totals()
    for _, own in tables.values():
        totals.add(own)
    known = totals.measured + totals.named
    yield (
        f"**{len(ENTRIES)} models, {totals.lines} lines: {totals.attentions} attentions, "
        f"{100 * known / totals.attentions:.1f} % of them measured or named in `skipped`. "
        f"Measured: {totals.measured} ({100 * totals.measured / totals.attentions:.1f} %). Named: {totals.named}. "
        f"Missed in silence: {totals.attentions - known}. Found where there is none: {totals.false}.**\n"
    )
    for title, (lines, _) in tables.items():
        yield f"## {title}\n"
        yield "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    PAGE.write_text("\n".join(page()), encoding="utf-8")

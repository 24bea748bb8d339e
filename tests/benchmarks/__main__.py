"""Measure what the monitor costs, print the page, and write it to docs/benchmarks.md.

    python -m tests.benchmarks [--rounds N] [--only steps|profile|first|alone|growth|writing|ranks] [--quick]

A part of the page or a quick look is printed only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.benchmarks import alone, first, growth, profile, ranks, steps, writing
from tests.benchmarks.page import PAGE, page
from tests.benchmarks.sizes import FULL, QUICK
from tests.benchmarks.turns import progress

SECTIONS = {
    "steps": steps.section,
    "profile": profile.section,
    "first": first.section,
    "alone": alone.section,
    "growth": growth.section,
    "writing": writing.section,
    "ranks": ranks.section,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the page if it is all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="rounds of the training; the rest is scaled with it")
    parser.add_argument("--only", choices=list(SECTIONS), help="print one section")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    given = parser.parse_args(arguments)
    sizes = QUICK if given.quick else FULL
    rounds = sizes.rounds if given.rounds is None else given.rounds
    if rounds < 1:
        parser.error(f"--rounds expects at least 1, got {rounds}")
    chosen = [given.only] if given.only else list(SECTIONS)
    text = page([SECTIONS[name](sizes, rounds, quick=given.quick) for name in chosen])
    progress("done")
    print(text)
    if not (given.only or given.quick):
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Train what is missing in the cache, replay every criterion, and write the page to docs/alarms.md.

    python -m tests.alarms [--workers N] [--cache FOLDER] [--quick]

A quick look trains a few tiny models, and its page is printed only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from attn_monitor import SaturationRule
from tests.alarms.cache import FOLDER, records
from tests.alarms.criteria import OTHERS, TRACE, Criterion, events, spike
from tests.alarms.grids import FULL, QUICK
from tests.alarms.margins import Pilot, pilot_recipes
from tests.alarms.page import PAGE, Study, page
from tests.alarms.recipes import Grid, Part
from tests.alarms.scores import tuned
from tests.alarms.truth import Outcome, outcomes

WARNING = events("warning or critical event", frozenset({"warning", "critical"}), SaturationRule())
CRITICAL = events("critical event", frozenset({"critical"}), SaturationRule())


def study(grids: Sequence[Grid], folder: Path, workers: int, *, pilot: bool) -> Study:
    """Train what is missing, and return what there is to say."""
    recipes = [recipe for grid in grids for recipe in grid.recipes()]
    vit = grids[-1]
    prior = Pilot.of(records(pilot_recipes(vit), folder, workers)) if pilot else None
    judged = outcomes(records(recipes, folder, workers))
    part = {recipe.key: grid.part(recipe) for grid in grids for recipe in grid.recipes()}
    parts: dict[Part, list[Outcome]] = {"tuning": [], "reported": [], "fresh": []}
    for outcome in judged:
        parts[part[outcome.recipe.key]].append(outcome)
    return Study(grids, prior, parts, criteria(parts["tuning"]), CRITICAL)


def criteria(tuning: Sequence[Outcome]) -> list[Criterion]:
    """Return what is compared: the monitor, what others use, and that with limits tuned on some trainings."""
    found = [WARNING, CRITICAL, TRACE.criterion(), *(limit.criterion() for limit in OTHERS), spike()]
    for limit in OTHERS:
        if limit.candidates:
            best = tuned(limit, tuning)
            found.append(Criterion(f"{best.name}, tuned", best.alarm))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write the page if it is all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="trainings side by side, one thread each")
    parser.add_argument("--cache", type=Path, default=FOLDER, help="where records are kept")
    parser.add_argument("--quick", action="store_true", help="tiny trainings, to see that everything runs")
    given = parser.parse_args(arguments)
    if given.workers < 1:
        parser.error(f"--workers expects at least 1, got {given.workers}")
    text = page(study(QUICK if given.quick else FULL, given.cache, given.workers, pilot=not given.quick))
    print(text)
    if not given.quick:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

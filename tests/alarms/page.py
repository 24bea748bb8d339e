"""The page: what was trained, what counts as bad, the table, and what the monitor missed or called in vain."""

from __future__ import annotations

import math
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attn_monitor import __version__
from tests.alarms.criteria import Criterion
from tests.alarms.forecasts import fulfilment
from tests.alarms.margins import Pilot
from tests.alarms.recipes import VARIANTS, Grid, Part
from tests.alarms.scores import Score, score
from tests.alarms.truth import MARGINS, WINDOW, Outcome
from tests.benchmarks.page import NONE, paragraph, table

PAGE = Path(__file__).parents[2] / "docs" / "alarms.md"
INTRODUCTION = """# Alarms

Written by `make alarms`: how well the events of the monitor, and what others look at, tell a training that ends badly
from one that ends well, and how much earlier than its loss.
"""
BENT = "`qk_std / logit_std`, last"
HISTORY = """Sizes and learning rates were settled after a look at some trainings. Those of the first seed had been seen
at all rates when some three hundred definitions of critical events were compared by their scores on the tuning half;
twenty-one of them were then scored on the other half. The part about softcaps was added after that, because of what was
missed there, so that its score on the reported half proves nothing. The fresh seeds were trained when all was
decided."""
READING = """How to read it: of what is called in vain, many have a trace as low as that of bad trainings and a loss
inside the margin; these trainings may be too short for it to cost more. Where a softcap is far exceeded, which the last
column shows, all logits lie at the cap and alike, so that the trace is high, although no gradient gets through the
cap; `jacobian_trace` is that of the softmax alone."""
FORECASTS = """A healthy head that grows towards its limit is told of once, with the step at which it will be there and
an interval. Both were chosen with the trainings of the first three seeds at hand; the fresh seeds are the test. Never
means that the head was still below its limit at the end of its interval."""
TITLES = {"gpt": "character GPT", "vit": "ViT on digits"}
"""How the models are called on the page."""


@dataclass(frozen=True)
class Study:
    """All that the page says.

    Attributes:
        grids: What was trained.
        pilot: What the margin of the ViT was chosen by, if that was trained.
        parts: The outcomes by what they are used for.
        criteria: What is compared, those of the monitor first.
        critical: The one of the criteria whose errors are listed.
    """

    grids: Sequence[Grid]
    pilot: Pilot | None
    parts: dict[Part, list[Outcome]]
    criteria: Sequence[Criterion]
    critical: Criterion

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all trainings."""
        return [outcome for outcomes in self.parts.values() for outcome in outcomes]


def page(study: Study) -> str:
    """Return the whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            environment(),
            trainings(study),
            ground_truth(study),
            comparison(study),
            verdict(study),
            errors(study),
            foretold(study),
            WAYS,
        ]
    )


def environment() -> str:
    """Return what was measured with."""
    return paragraph(
        f"""Measured with attn_monitor {__version__}, torch {torch.__version__}, Python {platform.python_version()}, on
        CPU in float32, one thread a training."""
    )


# -- what was trained --------------------------------------------------------------------------------------------------


def trainings(study: Study) -> str:
    """Return the section about the trainings."""
    header = (
        "model",
        "size",
        "learning rates (tuning)",
        "learning rates (reported)",
        "variants",
        "seeds",
        "fresh",
        "trainings",
    )
    rows = [
        (
            TITLES[grid.task],
            str(grid.setting),
            *(", ".join(f"{lr:g}" for lr in grid.rates[first::2]) for first in (0, 1)),
            str(len(grid.variants)),
            str(len(grid.seeds)),
            str(len(grid.fresh_seeds)),
            str(len(grid.recipes())),
        )
        for grid in study.grids
    ]
    total = sum(len(grid.recipes()) for grid in study.grids)
    return "\n".join(
        [
            "## What was trained\n",
            paragraph(
                f"""{total} short trainings of two models: a character GPT on the sources of Python's standard library,
                and a small ViT on the handwritten digits of scikit-learn (8 x 8 pixels, patches of 2 x 2 and a class
                token). AdamW with betas 0.9 and 0.95 and without weight decay, no clipping, a warm-up of
                {study.grids[0].setting.warmup} steps and then a constant learning rate. Queries and keys start with
                unit variance, as the textbook's 1/sqrt(d_k) assumes. The variants of attention are
                {", ".join(VARIANTS)}; all of a seed see the same batches and start from the same weights."""
            ),
            table(header, rows),
        ]
    )


# -- ground truth ------------------------------------------------------------------------------------------------------


def ground_truth(study: Study) -> str:
    """Return the section about what is bad."""
    header = ("model", "learning rate", *VARIANTS)
    rows = []
    for grid in study.grids:
        for lr in grid.rates:
            own = [outcome for outcome in study.outcomes if (outcome.recipe.task, outcome.recipe.lr) == (grid.task, lr)]
            bad = Counter(outcome.recipe.variant for outcome in own if outcome.bad)
            seen = Counter(outcome.recipe.variant for outcome in own)
            cells = (f"{bad[name]} of {seen[name]}" if seen[name] else NONE for name in VARIANTS)
            rows.append((TITLES[grid.task], f"{lr:g}", *cells))
    margins = " and ".join(f"{margin:g} nats for the {TITLES[task]}" for task, margin in MARGINS.items())
    chosen = f" {study.pilot.sentence()}" if study.pilot else ""
    return "\n".join(
        [
            "## What counts as bad\n",
            paragraph(
                f"""The outcome alone decides, by a rule fixed before these trainings. A family is a model, a learning
                rate and a seed; its variants compete. A training is bad if its final loss, the mean of the last
                {WINDOW} steps, is above the best of its family by more than a margin, or not finite. The margin is
                {margins}. {chosen}"""
            ),
            paragraph(
                f"""The loss shows it from the first step on from which its mean over {WINDOW} steps stays above the
                lowest of the family at the same step by more than the margin. The lead of an alarm is the number of
                steps from the alarm to that step, and negative where the loss was earlier."""
            ),
            "Bad trainings:\n",
            table(header, rows),
        ]
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def comparison(study: Study) -> str:
    """Return the section with the table."""
    columns = [f"{name}, {part}" for part in study.parts for name in ("precision", "recall", "lead")]
    rows = []
    for criterion in study.criteria:
        cells = [criterion.name]
        for outcomes in study.parts.values():
            cells.extend(score_cells(score(criterion, outcomes)))
        rows.append(tuple(cells))
    sizes = " and ".join(
        f"{len(outcomes)} for *{part}*, {sum(outcome.bad for outcome in outcomes)} of them bad"
        for part, outcomes in study.parts.items()
    )
    return "\n".join(
        [
            "## How well they tell\n",
            paragraph(
                f"""Every criterion reads the same records, one every {study.grids[0].setting.every} steps; the loss is
                read at every step. Families are divided by learning rate, in turns, and some
                seeds are kept apart: {sizes}. Limits that say *tuned*
                were chosen for the highest F1 on the tuning half; the others are the ones in use.
                {HISTORY} Precision is the share of the called trainings that are bad, recall the share of the
                bad ones that are called, lead the median over those, in steps and as a share of the training."""
            ),
            table(("criterion", *columns), rows),
        ]
    )


def score_cells(found: Score) -> tuple[str, str, str]:
    """Return precision, recall and lead, the first two with their counts."""
    called, bad = found.found + found.false, found.found + found.missed
    return (
        NONE if math.isnan(found.precision) else f"{found.precision:.2f} ({found.found}/{called})",
        NONE if math.isnan(found.recall) else f"{found.recall:.2f} ({found.found}/{bad})",
        NONE if math.isnan(found.lead) else f"{found.lead:.0f} ({round(found.share, 2) + 0.0:.0%})",
    )


GOAL_PRECISION, GOAL_RECALL, GOAL_SHARE = 0.9, 0.95, 0.25


def verdict(study: Study) -> str:
    """Say whether critical events are what was wanted of them."""
    said = [judgement(study, part) for part in study.parts if part != "tuning"]
    return "\n".join(["## What was wanted, and what came of it\n", *(text for text in said if text)])


def judgement(study: Study, part: Part) -> str:
    """Say what came of it in some of the trainings; nothing if none of them is bad."""
    outcomes = study.parts[part]
    own = score(study.critical, outcomes)
    onsets = [found.onset / found.recipe.setting.steps for found in outcomes if found.onset is not None]
    if not onsets:
        return ""
    others = [one for one in study.criteria if one.name != study.critical.name]
    better = [f"{one.name} (F1 {found:.2f})" for one in others if (found := score(one, outcomes).f1) > own.f1]
    goals = (
        ("precision", own.precision, GOAL_PRECISION),
        ("recall", own.recall, GOAL_RECALL),
        ("lead as a share of the training", own.share, GOAL_SHARE),
    )
    met = "; ".join(
        f"{name} {value:.3f}, wanted {wanted:g}: {'reached' if value >= wanted else 'not reached'}"
        for name, value, wanted in goals
    )
    return paragraph(
        f"""Critical events, {part}: {met}. Half of the bad trainings show it within {statistics.median(onsets):.0%} of
        their length, which is the median lead of an alarm at the very first step of each. Higher F1 than that of
        critical events ({own.f1:.2f}): {", ".join(better) or "none of the others"}."""
    )


# -- what went wrong ---------------------------------------------------------------------------------------------------


def errors(study: Study) -> str:
    """Return the section about the trainings that critical events got wrong."""
    header = (
        "training",
        "part",
        "error",
        "final loss above the best",
        "mean `jacobian_trace`: first, lowest, last",
        BENT,
    )
    rows = []
    for part, outcomes in study.parts.items():
        for outcome in outcomes:
            alarm = study.critical.alarm(outcome.record)
            if (alarm is not None) == outcome.bad:
                continue
            traces = np.nanmean(outcome.record.statistics["jacobian_trace"], axis=(1, 2))
            moved = ", ".join(f"{value:.2f}" for value in (traces[0], traces.min(), traces[-1]))
            error = "missed" if alarm is None else f"called in vain at step {alarm}"
            rows.append((str(outcome.recipe), part, error, f"{outcome.excess:.3f}", moved, f"{bent(outcome):.1f}"))
    told = "Every training was told right by critical events.\n" if not rows else table(header, rows)
    return "\n".join(["## What critical events got wrong\n", told, paragraph(READING)])


def bent(outcome: Outcome) -> float:
    """Return by how much the products spread more than the logits at the end, the median over heads."""
    seen = outcome.record.statistics
    return float(np.median(seen["qk_std"][-1] / np.maximum(seen["logit_std"][-1], 1e-9)))


def foretold(study: Study) -> str:
    """Return how well forecasts come true."""
    header = (
        "part",
        "forecasts",
        "in the interval",
        "before",
        "after",
        "never",
        "too late to tell",
        "median lead, steps",
    )
    rows = []
    for part, outcomes in study.parts.items():
        found = fulfilment(outcomes)
        share = f"{found.within} ({found.within / found.told:.0%})" if found.told else "0"
        lead = f"{statistics.median(found.leads):.0f}" if found.leads else NONE
        others = (found.before, found.after, found.never, found.unknown)
        rows.append((part, str(found.told), share, *map(str, others), lead))
    return "\n".join(["## Forecasts\n", paragraph(FORECASTS), table(header, rows)])


WAYS = """## Reproduce

`make alarms` trains what `.alarms/` does not hold (about half an hour of one core) and writes this page; it takes
about a minute where all is there. `python -m tests.alarms --quick` trains a few tiny models and prints what it found. A
record in `.alarms/` is named by a hash of its recipe; the losses of the trainings are the same with and without the
monitor.
The recipes are in `tests/alarms/grids.py` and `tests/alarms/recipes.py`, the criteria in `tests/alarms/criteria.py`.
"""

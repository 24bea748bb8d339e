"""Which trainings ended badly, and when their loss showed it: by outcome alone, without a look at attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.alarms.recipes import Family, Recipe, Task
from tests.alarms.training import Array, Record

WINDOW = 20
"""Steps over which a loss is averaged."""
MARGINS: Mapping[Task, float] = {"gpt": 0.03, "vit": 0.1}
"""In nats: a run that ends this much above the best of its family is bad."""


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
        record: What is known of it.
        final: Its loss over the last steps, inf if it is not finite.
        excess: By how much that is above the best of the family, inf if it is not finite.
        bad: Whether the excess is above the margin.
        onset: The step from which the smoothed loss stayed too high, `None` if it is good.
    """

    record: Record
    final: float
    excess: float
    bad: bool
    onset: int | None

    @property
    def recipe(self) -> Recipe:
        """What was trained."""
        return self.record.recipe


def smoothed(loss: Array, steps: int) -> Array:
    """Return the mean of the last 20 losses at each step, of all there are before that; inf where one is not finite."""
    padded = np.full(steps, np.inf)
    padded[: len(loss)] = np.where(np.isfinite(loss), loss, np.inf)
    return np.array([padded[max(0, step - WINDOW + 1) : step + 1].mean() for step in range(steps)])


def judged(family: Sequence[Record], margin: float) -> list[Outcome]:
    """Return the outcomes of the trainings that compete with each other."""
    steps = family[0].recipe.setting.steps
    curves = [smoothed(record.loss, steps) for record in family]
    best = np.min(curves, axis=0)
    outcomes = []
    for record, curve in zip(family, curves, strict=True):
        with np.errstate(invalid="ignore"):  # all of a family can be inf: then none is above the best
            high = ~(curve <= best + margin) | np.isinf(curve)
        bad = bool(high[-1])
        low = np.flatnonzero(~high)
        onset = (int(low[-1]) + 1 if len(low) else 0) if bad else None
        excess = float(curve[-1] - best[-1]) if np.isfinite(curve[-1]) else np.inf
        outcomes.append(Outcome(record, float(curve[-1]), excess, bad, onset))
    return outcomes


def outcomes(records: Iterable[Record]) -> list[Outcome]:
    """Return the outcomes of all trainings, family by family."""
    families: defaultdict[Family, list[Record]] = defaultdict(list)
    for record in records:
        families[record.recipe.family].append(record)
    return [outcome for family, members in families.items() for outcome in judged(members, MARGINS[family.task])]

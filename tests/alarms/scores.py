"""How well a criterion tells the trainings that end badly, and how early."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.alarms.criteria import Criterion, Limit
from tests.alarms.truth import Outcome


@dataclass(frozen=True)
class Score:
    """What a criterion made of some trainings.

    Attributes:
        found: Bad ones that it called.
        missed: Bad ones that it did not call.
        false: Good ones that it called.
        leads: Of those found, by how many steps it was earlier than the loss.
        shares: The same as shares of the training's length.
    """

    found: int
    missed: int
    false: int
    leads: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def precision(self) -> float:
        """The share of the called that are bad, nan if none is called."""
        called = self.found + self.false
        return self.found / called if called else math.nan

    @property
    def recall(self) -> float:
        """The share of the bad that are called, nan if none is bad."""
        bad = self.found + self.missed
        return self.found / bad if bad else math.nan

    @property
    def f1(self) -> float:
        """The harmonic mean of both, 0 if nothing is found."""
        return 2 * self.found / (2 * self.found + self.missed + self.false) if self.found else 0.0

    @property
    def lead(self) -> float:
        """The median lead in steps, nan if nothing is found."""
        return statistics.median(self.leads) if self.leads else math.nan

    @property
    def share(self) -> float:
        """The median lead as a share of the training."""
        return statistics.median(self.shares) if self.shares else math.nan


def score(criterion: Criterion, outcomes: Sequence[Outcome]) -> Score:
    """Judge a criterion by the outcomes of some trainings."""
    found = missed = false = 0
    leads, shares = [], []
    for outcome in outcomes:
        alarm = criterion.alarm(outcome.record)
        if outcome.onset is None:
            false += alarm is not None
        elif alarm is None:
            missed += 1
        else:
            found += 1
            leads.append(outcome.onset - alarm)
            shares.append(leads[-1] / outcome.recipe.setting.steps)
    return Score(found, missed, false, tuple(leads), tuple(shares))


def tuned(limit: Limit, outcomes: Sequence[Outcome]) -> Criterion:
    """Return a criterion with the limit of the highest F1 on some trainings, of the longest lead among equals."""

    def worth(candidate: float) -> tuple[float, float]:
        found = score(limit.criterion(candidate), outcomes)
        return found.f1, -math.inf if math.isnan(found.lead) else found.lead

    return limit.criterion(max(limit.candidates, key=worth))

"""How the margin of the ViT was chosen: by what chance alone makes of the loss of healthy trainings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.alarms.recipes import Grid, Recipe
from tests.alarms.training import Record
from tests.alarms.truth import WINDOW

RATE = 3e-3
SEEDS = tuple(range(100, 105))
HEALTHY = ("1/sqrt(d_k)", "QK-norm")
MULTIPLE = 3.0


@dataclass(frozen=True)
class Pilot:
    """Trainings outside the grid, healthy by their recipe.

    Attributes:
        spread: The standard deviation of the final loss between seeds, pooled over the recipes.
        trainings: How many there were.
    """

    spread: float
    trainings: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> Pilot:
        """Return what some trainings say."""
        finals: defaultdict[str, list[float]] = defaultdict(list)
        for record in records:
            finals[record.recipe.variant].append(float(record.loss[-WINDOW:].mean()))
        variance = np.mean([np.var(values, ddof=1) for values in finals.values()])
        return cls(float(np.sqrt(variance)), len(records))

    @property
    def margin(self) -> float:
        """What chance alone hardly reaches."""
        return MULTIPLE * self.spread

    def sentence(self) -> str:
        """Say how the margin was chosen."""
        return (
            f"That of the ViT is {MULTIPLE:g} times the standard deviation of the final loss between seeds, "
            f"{self.spread:.3f} nats, in {self.trainings} healthy trainings outside the grid (learning rate {RATE:g}, "
            f"{' and '.join(HEALTHY)}, seeds {SEEDS[0]} to {SEEDS[-1]}), rounded. That of the GPT was fixed in advance."
        )


def pilot_recipes(grid: Grid) -> list[Recipe]:
    """Return the trainings of the pilot of a model."""
    return [Recipe(grid.task, grid.setting, RATE, variant, seed) for seed in SEEDS for variant in HEALTHY]

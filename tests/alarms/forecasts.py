"""How well forecasts come true: each is compared with the step at which its head passes the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attn_monitor import SaturationRule
from attn_monitor.forecast import Forecast, Forecaster
from tests.alarms.criteria import replayed
from tests.alarms.training import Record
from tests.alarms.truth import Outcome


@dataclass(frozen=True)
class Fulfilment:
    """What became of the forecasts of some trainings.

    Attributes:
        within: Heads that passed their limit within the interval.
        before: Heads that did so earlier.
        after: Heads that did so later.
        never: Heads that had not when the interval was over.
        unknown: Heads whose training ended before that, and before their interval.
        leads: Steps from the forecast to the limit.
    """

    within: int
    before: int
    after: int
    never: int
    unknown: int
    leads: Sequence[int]

    @property
    def told(self) -> int:
        """How many forecasts can be judged."""
        return self.within + self.before + self.after + self.never


def fulfilment(outcomes: Sequence[Outcome]) -> Fulfilment:
    """Return what became of the forecasts."""
    found: list[tuple[str, int | None]] = []
    for outcome in outcomes:
        for forecast in forecasts(outcome.record):
            passed = passing(outcome.record, forecast)
            found.append((verdict(forecast, passed, outcome.record), passed and passed - forecast.step))
    counts = {
        name: sum(given == name for given, _ in found) for name in ("within", "before", "after", "never", "unknown")
    }
    return Fulfilment(**counts, leads=[lead for _, lead in found if lead is not None])


def forecasts(record: Record) -> list[Forecast]:
    """Return what the monitor foretells in a training."""
    forecaster = Forecaster(SaturationRule())
    return [
        forecast
        for index, step in enumerate(record.steps.tolist())
        for forecast in forecaster.update(step, replayed(record, index))
    ]


def passing(record: Record, forecast: Forecast) -> int | None:
    """Return the first observation after a forecast that has its head above the limit."""
    layer = int(forecast.layer.split(".")[1])
    spread = record.statistics["logit_row_std"][:, layer, forecast.head]
    above = (spread / np.sqrt(record.recipe.setting.head_dim) > forecast.threshold) & (record.steps > forecast.step)
    return int(record.steps[above][0]) if above.any() else None


def verdict(forecast: Forecast, passed: int | None, record: Record) -> str:
    """Tell whether a head was first seen above its limit when it was foretold."""
    last = int(record.steps[-1])
    if passed is None:
        return "never" if last >= forecast.latest else "unknown"
    if passed < forecast.earliest:
        return "before"
    return "within" if passed <= forecast.latest else "after"

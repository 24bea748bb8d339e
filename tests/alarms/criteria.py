"""What calls a training, and at which step: the monitor's events, and what others look at. All replay a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attn_monitor import AttentionStatistics, SaturationRule
from attn_monitor.events import Severity
from attn_monitor.severity import COLLAPSED
from attn_monitor.tracking import SaturationTracker
from tests.alarms.training import SHARP_ROWS, Array, Record

SPIKE_WINDOW = 50


@dataclass(frozen=True)
class Criterion:
    """Something that may call a training.

    Attributes:
        name: What it looks at.
        alarm: Returns the first step at which it calls a training, `None` if it never does.
    """

    name: str
    alarm: Callable[[Record], int | None]


@dataclass(frozen=True)
class Limit:
    """Calls a training when one number an observation passes a limit.

    Attributes:
        name: What the number is, with `{}` for the limit.
        series: Returns the number of each observation.
        limit: Beyond it there is an alarm.
        above: Whether that means above it.
        candidates: Which limits are tried where it is tuned.
    """

    name: str
    series: Callable[[Record], Array]
    limit: float
    above: bool
    candidates: tuple[float, ...]

    def criterion(self, limit: float | None = None) -> Criterion:
        """Return the criterion, with a limit other than its own if given."""
        used = self.limit if limit is None else limit

        def alarm(record: Record) -> int | None:
            series = self.series(record)
            return first(record, series > used if self.above else series < used)

        return Criterion(self.name.format(f"{used:g}"), alarm)


def first(record: Record, called: Any) -> int | None:
    """Return the step of the first observation that is called."""
    found = np.flatnonzero(called)
    return int(record.steps[found[0]]) if len(found) else None


def largest(name: str) -> Callable[[Record], Array]:
    """Return the largest value of any head; of values that are no numbers none."""
    return lambda record: np.fmax.reduce(record.statistics[name], axis=(1, 2))


def smallest(name: str) -> Callable[[Record], Array]:
    """Return the smallest value of any head."""
    return lambda record: np.fmin.reduce(record.statistics[name], axis=(1, 2))


def sharp_rows(record: Record) -> Array:
    """Return the share of the rows of all heads whose largest probability exceeds 0.95."""
    means: Array = record.statistics[SHARP_ROWS].mean((1, 2))
    return means


def mean_trace(record: Record) -> Array:
    """Return the mean `jacobian_trace` of all heads."""
    means: Array = np.nanmean(record.statistics["jacobian_trace"], axis=(1, 2))
    return means


def spikes(record: Record) -> Array:
    """Return, of each step, by how many standard deviations the loss is above the mean of the 50 before it."""
    scores = np.full(len(record.loss), -np.inf)
    for step in range(SPIKE_WINDOW, len(record.loss)):
        before = record.loss[step - SPIKE_WINDOW : step]
        scores[step] = (record.loss[step] - before.mean()) / max(before.std(), 1e-12)
    return scores


def spike(limit: float = 6.0) -> Criterion:
    """Return the criterion that looks at the loss alone, at every step."""

    def alarm(record: Record) -> int | None:
        found = np.flatnonzero((spikes(record) > limit) | ~np.isfinite(record.loss))
        return int(found[0]) if len(found) else None

    return Criterion(f"loss spike by {limit:g} standard deviations", alarm)


TRACE = Limit(
    "critical event without the part about softcaps: mean `jacobian_trace` < {}", mean_trace, COLLAPSED, False, ()
)
OTHERS: tuple[Limit, ...] = (
    Limit("largest logit > {}", largest("logit_max"), 100.0, True, (10.0, 20.0, 30.0, 50.0, 70.0, 100.0, 200.0)),
    Limit("largest logit > {}", largest("logit_max"), 1e4, True, ()),
    Limit(
        "lowest `entropy_normalized` < {}",
        smallest("entropy_normalized"),
        0.1,
        False,
        (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    ),
    Limit("highest `logit_std` > {}", largest("logit_std"), 10.0, True, (2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0)),
    Limit(
        "share of rows with a probability above 0.95 > {}",
        sharp_rows,
        0.3,
        True,
        (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    ),
)


# -- the monitor itself ------------------------------------------------------------------------------------------------


def replayed(record: Record, index: int) -> dict[str, AttentionStatistics]:
    """Return an observation as the probe made it."""
    known = {name: values[index] for name, values in record.statistics.items() if name != SHARP_ROWS}
    counts = {"rows", "masked_rows", "nonfinite"}

    def tensor(name: str, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(torch.long if name in counts else torch.float32)

    layers = len(known["rows"])
    return {
        f"blocks.{layer}.attention": AttentionStatistics(
            **{name: tensor(name, values[layer]) for name, values in known.items()},  # type: ignore[arg-type] # by name
            head_dim=record.recipe.setting.head_dim,
            keys=record.keys,
            calls=1,
        )
        for layer in range(layers)
    }


def events(name: str, severities: frozenset[Severity], rule: SaturationRule) -> Criterion:
    """Return the criterion that the monitor itself is: its first event of some severity."""

    def alarm(record: Record) -> int | None:
        tracker = SaturationTracker(rule)
        for index, step in enumerate(record.steps.tolist()):
            changes = tracker.update(step, replayed(record, index))
            if any(event.severity in severities for event in (*changes.opened, *changes.escalated)):
                return int(step)
        return None

    return Criterion(name, alarm)

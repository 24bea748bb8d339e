"""Ways that take turns: each is compared with what stood next to it, so that a slow moment of the machine hits both."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Meter(Protocol):
    """Measures what lies between its start and its stop."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> float:
        """Return what was measured since the start."""
        ...


class Clock:
    """Measures seconds."""

    def __init__(self) -> None:
        self._started = 0.0

    def start(self) -> None:
        """Begin."""
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._started


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and their middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the quartiles of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def whose(step: int, names: Sequence[str]) -> str:
    """Return whose turn a step is: in each round everyone's once.

    A step may leave something to the next one, such as a warm cache or a writer that is still at work. So the order
    zigzags (0, 1, -1, 2, -2, ...) and moves on by one each round: over as many rounds as there are ways, each has each
    place once, and, of an even number, each other one before it once (Williams, 1949).
    """
    rounds, place = divmod(step, len(names))
    zigzag = (place + 1) // 2 * (1 if place % 2 else -1)
    return names[(zigzag + rounds) % len(names)]


def interleaved(
    ways: Mapping[str, Callable[[], object]], rounds: int, *, meters: Sequence[Meter], warmup: int = 1
) -> list[dict[str, list[float]]]:
    """Return what each meter measured of each way, one value per round.

    Args:
        ways: What to do, by name.
        rounds: How often each is measured.
        meters: What measures.
        warmup: How many rounds go before and are not counted.
    """
    names = list(ways)
    measured: list[dict[str, list[float]]] = [{name: [] for name in names} for _ in meters]
    for step in range((warmup + rounds) * len(names)):
        name = whose(step, names)
        for meter in meters:
            meter.start()
        ways[name]()
        for meter, values in zip(meters, measured, strict=True):
            values[name].append(meter.stop())
    return [{name: values[warmup:] for name, values in found.items()} for found in measured]


def ratios(measured: Mapping[str, Sequence[float]], base: str) -> dict[str, Spread]:
    """Return each way's values divided by those of another in the same round."""
    return {
        name: Spread.of([own / other for own, other in zip(values, measured[base], strict=True)])
        for name, values in measured.items()
    }


def excess(measured: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """Return by how much each way lies above another in the same round, the median."""
    return {
        name: statistics.median(own - other for own, other in zip(values, measured[base], strict=True))
        for name, values in measured.items()
    }


def progress(text: str) -> None:
    """Say on the terminal, beside the page, what is being measured."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

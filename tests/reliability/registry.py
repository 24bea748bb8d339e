"""The faults: what goes wrong, whose doing it is, what the user sees of it, and what is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Whose = Literal["the user's", "the monitor's", "the system's"]


@dataclass(frozen=True)
class Verdict:
    """What came of a fault that was survived as it should be; anything else is an assertion that fails.

    Attributes:
        injected: How many times something was made to fail.
        compared: How many trainings were compared with one that is not watched, and were the same to the bit.
    """

    injected: int = 1
    compared: int = 1


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: What goes wrong.
        whose: Whose doing it is.
        sees: What the user sees of it.
        lost: What is lost of the record or the training.
        run: Injects it, asserts what must be left standing, and tells how often that was tried; takes an empty folder.
        quick: Whether it belongs to the tests that are run all the time.
    """

    name: str
    whose: Whose
    sees: str
    lost: str
    run: Callable[[Path], Verdict]
    quick: bool


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, *, whose: Whose, sees: str, lost: str = "nothing", quick: bool = False
) -> Callable[[Callable[[Path], Verdict]], Callable[[Path], Verdict]]:
    """Register a function as a fault."""

    def register(run: Callable[[Path], Verdict]) -> Callable[[Path], Verdict]:
        assert name not in FAULTS, f"two faults are called {name!r}"
        FAULTS[name] = Fault(name, whose, sees, lost, run, quick)
        return run

    return register

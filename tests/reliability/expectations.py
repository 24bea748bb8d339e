"""What most faults are held to: a twin that nobody watches, and the records of a training in which nothing fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_monitor import AttentionMonitor
from tests.reliability.trials import (
    STEPS,
    Records,
    Script,
    Subject,
    Trial,
    attempt,
    clean,
    in_steps,
    records,
    same_records,
)

FAULTY = 2
"""The step in which things go wrong; steps before and behind it are observed, too."""


@cache
def _weights(gain: float) -> Mapping[str, Tensor]:
    torch.manual_seed(1)
    return copy.deepcopy(Subject(gain=gain).state_dict())


def subject(script: Script | None = None, gain: float = 1.0) -> Subject:
    """Return a model that starts from the same weights as every other of the gain."""
    model = Subject(script, gain)
    model.load_state_dict(_weights(gain))
    return model


def watching(**options: Any) -> AttentionMonitor:
    """Return a monitor that observes every step."""
    return AttentionMonitor(**{"every_n_steps": 1, **options})


@cache
def alone() -> Trial:
    """Return the training that nobody watches."""
    return attempt(subject(), [])


@cache
def undisturbed() -> Records:
    """Return the records of the training in which nothing goes wrong."""
    monitor = watching()
    attempt(subject(), [monitor])
    assert sorted(records(monitor)) == list(range(STEPS))
    return records(monitor)


def right(monitor: AttentionMonitor, *, but: Collection[int] = (), first: int = 0, last: int = STEPS) -> None:
    """Assert that all records but those of some steps hold the numbers of the training without a fault."""
    wanted = {step: record for step, record in undisturbed().items() if step not in but and first <= step < last}
    found = {step: record for step, record in records(monitor).items() if step not in but}
    assert same_records(found, wanted), f"{sorted(found)} and {sorted(wanted)}, or their numbers differ"


def survives(
    context: AbstractContextManager[Any] | None,
    *monitors: AttentionMonitor,
    steps: Collection[int] = (FAULTY,),
    around: Callable[[list[Any]], list[Any]] = list,
    **settings: Any,
) -> Trial:
    """Train with something broken in some steps, and assert that the training is that without the monitor.

    Args:
        context: Breaks something.
        monitors: The monitors.
        steps: The steps during which it is broken.
        around: Puts other callbacks around them.
        settings: Of the trainer.
    """
    callbacks = in_steps(context, steps, *monitors) if context is not None else list(monitors)
    trial = attempt(subject(), around(callbacks), **settings)
    assert trial.error == "", trial.error
    clean(trial)
    assert trial.same_as(alone()), "the training is not the same"
    return trial


def goes_on(monitor: AttentionMonitor) -> None:
    """Assert that a monitor that was interrupted measures the next training as if nothing had been."""
    monitor.history.clear()
    trial = attempt(subject(), [monitor])
    assert trial.error == ""
    clean(trial)
    assert trial.same_as(alone())
    right(monitor)

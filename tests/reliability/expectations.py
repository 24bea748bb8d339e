"""What most faults are held to: a twin that nobody watches, and the records of a training in which nothing fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor.flight_records import Observation
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


def _numbers(one: Observation) -> dict[str, Any]:
    """Return what was observed; where a gradient lies in memory shows in the last digit of its norm."""
    rates = {f"rate {index}": rate for index, group in enumerate(one.learning_rates) for rate in group}
    return {"loss": one.loss, "norm": one.grad_norm, **rates, **one.layer_grad_norms}


@cache
def _undisturbed() -> AttentionMonitor:
    monitor = watching()
    attempt(subject(), [monitor])
    assert sorted(records(monitor)) == list(range(STEPS))
    return monitor


def undisturbed() -> Records:
    """Return the records of the training in which nothing goes wrong."""
    return records(_undisturbed())


def undisturbed_flight() -> Sequence[Observation]:
    """Return what the flight recorder keeps of it."""
    return list(_undisturbed().flight_recorder.memory.observations)


def right(monitor: AttentionMonitor, *, but: Collection[int] = (), first: int = 0, last: int = STEPS) -> None:
    """Assert that all records but those of some steps hold the numbers of the training without a fault."""
    wanted = {step: record for step, record in undisturbed().items() if step not in but and first <= step < last}
    found = {step: record for step, record in records(monitor).items() if step not in but}
    assert same_records(found, wanted), f"{sorted(found)} and {sorted(wanted)}, or their numbers differ"
    flight = {one.step: one for one in undisturbed_flight()}
    for one in monitor.flight_recorder.memory.observations:
        if one.step in wanted:
            assert _numbers(one) == pytest.approx(_numbers(flight[one.step]), rel=1e-6)


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

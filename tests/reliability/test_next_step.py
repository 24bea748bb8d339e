"""What a failed step leaves half done is not counted in the next one."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from pytorch_lightning.callbacks import Callback, EarlyStopping

from attn_monitor import AttentionMonitor
from attn_monitor.flight_recorder import FlightRecorder
from tests.models import LIGHTNING_ADVICE
from tests.reliability.expectations import FAULTY, right, subject, survives, watching
from tests.reliability.faults_outside import Alarmed
from tests.reliability.sweeps import Sweep
from tests.reliability.trials import attempt, in_steps, records

pytestmark = LIGHTNING_ADVICE


@pytest.mark.parametrize(
    "name", ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_numbers_after_a_step_whose_hook_raised(name: str) -> None:
    hook: Any = getattr(AttentionMonitor, name)
    sweep, monitor = Sweep(lambda: ValueError("on purpose"), function=hook.__wrapped__.__code__), watching()
    trial = survives(sweep, monitor)
    assert sweep.raised
    [text] = trial.said
    assert f"{name} failed: ValueError: on purpose" in text
    assert FAULTY not in records(monitor)
    right(monitor, but=[FAULTY])


def test_a_part_of_a_step_is_no_record() -> None:
    batches: list[int] = []

    class Counting(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batches.append(batch_idx)

    real = AttentionMonitor._end_batch

    def fails(monitor: AttentionMonitor, *args: Any) -> None:
        if batches[-1] == 2:  # the first of the two batches of step 1
            raise ValueError("on purpose")
        real(monitor, *args)

    monitor = watching()
    with patch.object(AttentionMonitor, "_end_batch", fails):
        trial = attempt(subject(), [Counting(), monitor], steps=6, accumulate_grad_batches=2)
    assert trial.error == ""
    assert [step for step, _ in monitor.history] == [0, 2]
    assert {statistics.calls for _, record in monitor.history for statistics in record.values()} == {2}


@pytest.mark.parametrize("name", ["on_before_backward", "on_after_backward", "on_train_batch_end"])
def test_other_callbacks_find_the_tags_after_a_step_that_was_given_up(name: str) -> None:
    hook: Any = getattr(AttentionMonitor, name)
    monitor = AttentionMonitor(every_n_steps=99)  # observes step 0 only, of these five
    sweep = Sweep(lambda: ValueError("on purpose"), function=hook.__wrapped__.__code__)
    stopping = EarlyStopping("attn_monitor/saturated_heads", patience=9, check_on_train_epoch_end=True)
    trial = attempt(subject(), [*in_steps(sweep, [0], monitor), stopping])
    assert sweep.raised
    assert trial.error == ""
    assert trial.metrics["attn_monitor/saturated_heads"] == 0.0
    assert list(monitor.history) == []


def test_events_act_though_showing_them_fails() -> None:
    monitor = watching(on_saturation="raise")
    with patch("attn_monitor.publishing.Publisher.publish", side_effect=OSError("gone")):
        trial = attempt(subject(), [Alarmed(2), monitor])
    assert trial.error.startswith("AttentionSaturationError: ")
    assert {event.latest for event in monitor.events} == {2}


def test_a_step_nobody_observes_costs_no_record() -> None:
    monitor, real, calls = watching(every_n_steps=3), FlightRecorder.keep_loss, list[int]()

    def once(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("on purpose")
        real(*args, **options)

    with patch.object(FlightRecorder, "keep_loss", once):
        trial = attempt(subject(), [monitor])
    assert trial.error == ""
    assert [step for step, _ in monitor.history] == [0, 2]

"""What a failed step leaves half done is not counted in the next one."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from pytorch_lightning.callbacks import Callback

from attn_monitor import AttentionMonitor
from tests.models import LIGHTNING_ADVICE
from tests.reliability.expectations import FAULTY, right, subject, survives, watching
from tests.reliability.sweeps import Sweep
from tests.reliability.trials import attempt, records

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

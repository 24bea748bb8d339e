"""What a failed step leaves half done is not counted in the next one."""

from __future__ import annotations

from typing import Any

import pytest

from attn_monitor import AttentionMonitor
from tests.models import LIGHTNING_ADVICE
from tests.reliability.expectations import FAULTY, right, survives, watching
from tests.reliability.sweeps import Sweep
from tests.reliability.trials import records

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

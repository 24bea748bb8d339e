"""What the flight recorder tells of nan and inf where losses are known late, or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attn_monitor.flight_recorder import FlightRecorder
from attn_monitor.flight_records import Beginning
from attn_monitor.nonfinite import Turn, where_it_began
from attn_monitor.saturation import SaturationRule
from tests.models import make_record

BROKEN = {"a": make_record(2, nonfinite=[0, 0]), "b": make_record(2, nonfinite=[0, 3])}
HEALTHY = {"a": make_record(2), "b": make_record(2)}
BEGAN = "logits turned nan or inf by step 25; in the order of the forward pass it begins in head 1 of b"
FILE = "; what led to it is in attn_monitor_flight_25.json"


class Training:
    """A training whose steps are those that the recorder is told of."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.recorder = FlightRecorder(report=self.said.append)
        self.recorder.start()
        self.folder = folder

    def observe(self, step: int, record: Any) -> None:
        loop: Any = SimpleNamespace(
            step=step,
            loggers=[],
            root_directory=str(self.folder),
            writes_nothing=False,
            is_global_zero=True,
            optimizers=[],
        )
        self.recorder.record(loop, nn.Identity(), record, SaturationRule())

    def log(self, step: int, loss: float) -> None:
        self.recorder.keep_loss(step, torch.tensor(loss))


def test_logits_alone_are_told_of_where_the_loss_of_their_step_is_not_known(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.observe(20, HEALTHY)
    training.log(20, 0.0)  # what the Trainer of transformers prints in place of nan
    training.observe(25, BROKEN)
    training.log(25, 0.0)
    training.observe(30, BROKEN)
    assert training.said == [f"{BEGAN}{FILE}"]


def test_logits_alone_are_the_events_to_tell_where_the_loss_is_known(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.log(25, 2.5)
    training.observe(25, BROKEN)
    assert training.said == []


def test_a_loss_of_the_same_step_that_is_known_later_is_told_without_a_contradiction(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.observe(25, BROKEN)
    training.log(25, math.nan)
    training.observe(30, BROKEN)
    training.log(30, math.nan)
    training.observe(35, BROKEN)
    assert [text.split("; what led")[0] for text in training.said] == [
        BEGAN,
        f"the loss turned nan at step 25; {BEGAN}",
    ]


@pytest.mark.parametrize(("step", "between"), [(27, "before that, "), (25, ""), (23, "")])
def test_logits_are_said_to_be_earlier_only_where_they_were(step: int, between: str) -> None:
    earlier = Beginning(step=25, basis="logits", layer="b", head=1, text=BEGAN)
    began = where_it_began(Turn(step, math.nan, exact=True), 30, BROKEN, None, earlier=earlier)
    assert began.text == f"the loss turned nan at step {step}; {between}{BEGAN}"

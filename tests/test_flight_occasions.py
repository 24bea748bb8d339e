"""When the last steps of a training are written: at errors, at critical events, at a loss that is no number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor import flight_recorder as recorder_module
from attn_monitor.events import SaturationEvent
from tests.flights import Overflowing, Planted, disk_full, written
from tests.models import LIGHTNING_ADVICE, Lit, fit, loader, quiet

pytestmark = LIGHTNING_ADVICE


def test_a_critical_event_writes_it(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=2)
    fit(Lit("hand", "sdpa", gain=50.0), monitor, 4, logger=logger)
    critical = [event for event in monitor.events if event.severity == "critical"]
    assert critical
    first = written(logger.log_dir)[0]
    assert (first.step, first.reasons, first.exception, first.began) == (critical[0].step, ["critical event"], "", None)
    assert f"step {critical[0].latest}: {critical[0].finding}" in first.diagnosis
    assert f"  critical: {critical[0].critical_reason}" in first.diagnosis
    assert list(first.heads.items()) == [("net.blocks.0", 2), ("net.blocks.1", 2)]
    assert first.observations[-1].step == first.step
    assert monitor.flight_recorder.paths[0].parent == Path(logger.log_dir)


def test_a_healthy_run_writes_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Lit("hand"), AttentionMonitor(), 3, logger=logger)
    assert written(logger.log_dir) == []


def test_an_exception_writes_it_and_reaches_the_user(tmp_path: Path) -> None:
    class Failing(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx == 4:
                raise error
            return super().training_step(batch, batch_idx)

    error = ZeroDivisionError("mine <b>")
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=3)
    with pytest.raises(ZeroDivisionError) as raised:
        fit(Failing("hand"), monitor, 6, logger=logger)
    assert raised.value is error
    [record] = written(logger.log_dir)
    assert (record.step, record.reasons, record.exception) == (4, ["exception"], "ZeroDivisionError: mine <b>")
    assert [one.step for one in record.observations] == [0, 2]
    assert [step for step, _ in record.losses] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error::attn_monitor.events.AttentionWarning")
def test_an_exception_reaches_the_user_even_if_writing_fails_and_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx == 1:
                raise ZeroDivisionError("mine")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(recorder_module, "write_flight", disk_full)
    with pytest.raises(ZeroDivisionError, match="mine"):
        quiet(callbacks=[AttentionMonitor()], logger=CSVLogger(tmp_path)).fit(Failing("hand"), loader(2))


def test_an_error_before_the_first_step_writes_nothing(tmp_path: Path) -> None:
    class Early(Callback):
        def on_train_start(self, *_: Any) -> None:
            raise ZeroDivisionError

    logger = CSVLogger(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(Lit("hand"), AttentionMonitor(), 2, logger=logger, callbacks=[Early()])
    assert written(logger.log_dir) == []


def test_a_loss_that_turns_nan_on_an_unobserved_step_is_known_to_the_step_and_the_head(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    _, said = fit(Planted(layer=1, head=1, step=5, value=math.nan), monitor, 9, logger=logger)
    assert [step for step, _ in monitor.history] == [0, 3, 7]
    record = written(logger.log_dir)[0]
    assert record.step == 7
    assert {"critical event", "loss not finite", "logits not finite"} == set(record.reasons)
    began = record.began
    assert began is not None
    assert (began.step, began.loss, began.seen_at) == (5, "nan", 7)
    assert (began.basis, began.layer, began.head) == ("logits", "net.blocks.1", 1)
    assert began.text == (
        "the loss turned nan at step 5; in the order of the forward pass it begins in head 1 of net.blocks.1 "
        "(seen at step 7; updates since may have moved it)"
    )
    assert any(text.endswith(f"{began.text}; what led to it is in attn_monitor_flight_7.json") for text in said)
    assert [math.isfinite(loss) for _, loss in record.losses] == [True] * 5 + [False] * 3


def test_after_an_update_with_nan_a_guess_is_called_a_guess(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    fit(Planted(step=5, skipping=False, value=math.nan), monitor, 9, logger=logger)
    began = written(logger.log_dir)[0].began
    assert began is not None
    logits = {
        (name, head): float(value)
        for name, stats in monitor.history[1][1].items()
        for head, value in enumerate(stats.logit_max if stats.logit_max is not None else [])
    }
    largest = max(logits, key=lambda place: abs(logits[place]))
    assert (began.step, began.basis, (began.layer, began.head)) == (5, "largest", largest)
    assert began.text == (
        "the loss turned nan at step 5; by step 7 all 4 heads have nan or inf logits, so that the first one cannot be "
        f"told; the largest logit in the last finite record, {logits[largest]:.3g} at step 3, was that of head "
        f"{largest[1]} of {largest[0]}"
    )


def test_a_loss_that_turns_nan_after_the_last_observation_is_found_at_the_end(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    _, said = fit(Planted(step=5, skipping=False, value=math.nan), monitor, 7, logger=logger)
    [record] = written(logger.log_dir)
    assert (record.step, record.reasons) == (6, ["loss not finite"])
    assert record.began is not None
    assert (record.began.step, record.began.seen_at, record.began.basis) == (5, None, "largest")
    assert any("the loss turned nan at step 5; no later step was observed" in text for text in said)


def test_a_loss_that_is_inf_by_itself_has_the_next_step_observed(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=4, adaptive_steps=0)
    fit(Overflowing(3), monitor, 12, logger=logger)
    assert [step for step, _ in monitor.history] == [0, 3, 4, 7, 11]
    [record] = written(logger.log_dir)
    assert record.began is not None
    assert (record.step, record.began.step, record.began.loss, record.began.basis) == (3, 3, "inf", "largest")
    assert "all logits of step 3 are finite: it began outside of them; the largest" in record.began.text
    assert monitor.flight_recorder.wants_next is False


@pytest.mark.slow
def test_a_loss_that_turns_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor()
    _, said = fit(Overflowing(*range(1, 30, 2)), monitor, 30, logger=logger)
    assert [record.step for record in written(logger.log_dir)] == [1, 3, 5, 7, 9, 11, 13, 29]
    assert sum("the loss turned" in text for text in said) == 1


def test_a_critical_event_at_every_step_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = recorder_module.FlightRecorder.record
    event = SaturationEvent(
        step=0,
        layer="a",
        head=0,
        statistic="logit_row_std",
        value=1.0,
        head_dim=4,
        ratio=1.0,
        threshold=0.5,
        severity="critical",
    )

    def always(self: Any, trainer: Any, module: Any, record: Any, rule: Any, changed: Any, events: Any) -> None:
        original(self, trainer, module, record, rule, [event], [event] * 23)

    monkeypatch.setattr(recorder_module.FlightRecorder, "record", always)
    logger = CSVLogger(tmp_path)
    fit(Lit("hand"), AttentionMonitor(), 9, logger=logger)
    records = written(logger.log_dir)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert len(records[0].diagnosis) == 21
    assert records[0].diagnosis[-1] == "and 3 more, all in attn_monitor_events.jsonl"


def test_raising_at_a_critical_event_leaves_one_file_with_both_reasons(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.raises(RuntimeError, match="critically saturated"):
        fit(Lit("hand", gain=50.0), AttentionMonitor(on_saturation="raise"), 5, logger=logger)
    record = written(logger.log_dir)[-1]
    assert record.reasons == ["critical event", "exception"]
    assert record.exception.startswith("AttentionSaturationError: attention is critically saturated")

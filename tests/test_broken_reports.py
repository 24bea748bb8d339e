"""Runs that turn nan: one file for one nan, nothing said twice, and no growth of heads that did not grow."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor.cli import main
from attn_monitor.dashboards.texts import event_page
from attn_monitor.reports.flight import Flight, summarize_flight
from attn_monitor.reports.summary import summarize
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import SaturationTracker
from attn_monitor.views import Table
from tests.event_data import make_event
from tests.flights import Planted, written
from tests.models import LIGHTNING_ADVICE, Lit, fit, make_record
from tests.stored_flights import make_flight
from tests.summarized import collapsing, make_table

pytestmark = LIGHTNING_ADVICE


def test_one_nan_leaves_one_file_though_the_update_carries_it_to_every_head(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=1)
    fit(Planted(step=5, skipping=False, value=math.nan), monitor, 8, logger=logger)
    assert [(event.step, event.kind) for event in monitor.events] == [(5, "nonfinite"), *[(6, "nonfinite")] * 3]
    [record] = written(logger.log_dir)
    assert (record.step, record.began and record.began.head) == (5, 1)


def test_a_nan_loss_leaves_one_file_though_the_update_makes_every_logit_nan(tmp_path: Path) -> None:
    class BrokenLoss(Lit):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (math.nan if self.global_step >= 4 else 1.0)

    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=1)
    fit(BrokenLoss("hand", "hand"), monitor, 8, logger=logger)
    assert {event.step for event in monitor.events} == {5}
    [record] = written(logger.log_dir)
    assert (record.step, record.reasons) == (4, ["loss not finite"])
    assert record.began is not None
    assert "it began outside of them" in record.began.text


def test_a_second_nan_after_a_healthy_step_has_its_own_file(tmp_path: Path) -> None:
    class Twice(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.step = 5 if self.global_step > 3 else 2
            with torch.no_grad():
                for block in self.net.blocks:
                    block.qkv.weight.nan_to_num_(0.1)
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    fit(Twice(value=math.nan), AttentionMonitor(every_n_steps=1), 8, logger=logger)
    assert [record.step for record in written(logger.log_dir)] == [2, 5]


def test_a_report_says_what_broke_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(Planted(step=5, skipping=False, value=math.nan), AttentionMonitor(every_n_steps=1), 8, logger=logger)
    assert main(["report", str(tmp_path), "--summary-only"]) == 0
    text = capsys.readouterr().out
    assert "flight record of step 5" in text
    assert text.count("unmasked logits that are nan or inf") == 1
    assert text.count("what helps:") == 1


def test_a_flight_record_lists_little_and_not_what_was_said() -> None:
    diagnosis = [f"step 40: head {head} of a is saturated" for head in range(23)]
    record = make_flight(diagnosis=diagnosis)
    lines = summarize_flight(Flight("run", record)).splitlines()
    assert lines[2:7] == [*(f"  {line}" for line in diagnosis[:4]), "  and 19 lines more in the file"]
    told = [f"  first event: {line}; likely cause" for line in diagnosis]
    lines = summarize_flight(Flight("run", record), said="\n".join(told)).splitlines()
    assert lines[2:4] == ["  what was found stands above", ""]
    # The worst head is the first event of the run, and opens the section all the same.
    lines = summarize_flight(Flight("run", record), said="\n".join(told[:21])).splitlines()
    assert lines[2:6] == [f"  {line}" for line in diagnosis[:4]]


def test_a_head_that_only_turned_nan_did_not_grow() -> None:
    run = collapsing()
    tables = {name: Table(table.steps, table.values.copy()) for name, table in run.tables.items()}
    for name, values in {"logit_row_std": [1.2, 1.3], "saturation_ratio": [0.15, 0.16], "q_rms": [1.0, 1.1]}.items():
        tables[name].values[:, 1, 2] = [*values, np.nan, np.nan]
    tables["nonfinite"] = make_table(0.0, [0, 0, 9, 9])
    event = make_event(20, "decoder.0", 2, statistic="nonfinite", kind="nonfinite", severity="critical", ratio=None)
    text = summarize(replace(run, tables=tables, events=[event]))
    assert "  head 2 of decoder.0  0.16           10       20          " in text
    assert "what grew" not in text
    tables["logit_row_std"].values[1, 1, 2] = 2.4
    text = summarize(replace(run, tables=tables, events=[event]))
    assert "    head 2 of decoder.0: until nan or inf at step 20: logit_row_std 1.2 to 2.4, 2x" in text


def test_the_page_of_events_has_the_ratio_of_nan_logits_as_the_curve_has_it() -> None:
    record = make_record(3, logit_row_std=[math.nan, 1.0, 6.0], nonfinite=[7, 0, 0])
    changes = SaturationTracker(SaturationRule()).update(3, {"a": record})
    page = event_page(3, changes)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| a |")]
    assert rows == [["a", "0", "nan", "0.5"], ["a", "2", "0.75", "0.5"]]
    assert "inf |" not in page

"""Runs of which only CSV files or scalars are left, and the events beside them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from attn_monitor.reports.runs import ScalarRun
from attn_monitor.reports.scalar_summary import summarize_scalars
from tests.event_data import make_event, make_run
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet
from tests.run_directories import only, ratios, read, write_events

pytestmark = LIGHTNING_ADVICE


def scalar_run(directory: Path) -> ScalarRun:
    findings = read(directory)
    [run] = findings.scalar_runs
    assert (findings.runs, findings.foreign, findings.notes) == ([], [], [])
    return run


def test_a_run_with_only_csv_gives_its_scalars(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = AttentionMonitor(statistics=["entropy", "logit_row_std"])
    quiet(logger=logger, callbacks=[monitor], max_steps=3).fit(Lit("hand", "sdpa"), loader(3))
    run = scalar_run(tmp_path)
    assert (run.name, run.source) == ("lightning_logs/version_0", "metrics.csv")
    for row, layer in enumerate(["net.blocks.0", "net.blocks.1"]):
        records = [list(layers.values())[row] for _, layers in monitor.history]
        means = [float(stats.measured()["entropy"].double().mean()) for stats in records]
        np.testing.assert_allclose(run.scalars[f"attn_entropy/{layer}"].values, means, rtol=1e-6)
    assert set(run.others) == {"train_loss"}
    assert run.others["train_loss"].steps.tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::attn_monitor.events.AttentionWarning")
def test_a_run_with_only_csv_gives_its_events_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = AttentionMonitor()
    quiet(logger=logger, callbacks=[monitor], max_steps=3).fit(Lit("hand", "sdpa", gain=9.0), loader(3))
    opened = [event for event in scalar_run(tmp_path).events if event["state"] == "opened"]
    assert len(opened) == len(monitor.events) > 1
    told = {(event["step"], event["layer"], event["head"], event["ratio"], event["cause"]) for event in opened}
    assert told == {(one.step, one.layer, one.head, one.ratio, one.cause) for one in monitor.events}
    first = [float(str(event["ratio"])) for event in opened if event["step"] == opened[0]["step"]]
    assert first == sorted(first, reverse=True)


def test_a_second_monitor_has_a_run_of_its_own_in_csv_and_event_files(tmp_path: Path) -> None:
    one, two = (AttentionMonitor(modules=f"net.blocks.{index}", statistics=["entropy"]) for index in (0, 1))
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        trainer = quiet(logger=loggers, callbacks=[one, two], max_steps=3)
        trainer.fit(Lit("hand", "sdpa", gain=9.0), loader(3))
    findings = read(tmp_path)
    named = {run.name.partition("version_0")[2]: run for run in findings.scalar_runs}
    assert list(named) == ["", " (monitor 2)"]
    for monitor, layer, run in zip((one, two), ("net.blocks.0", "net.blocks.1"), named.values(), strict=True):
        opened = [event for event in run.events if event["state"] == "opened"]
        assert {(event["layer"], event["head"]) for event in opened} == {(layer, 0), (layer, 1)}
        assert f"attn_entropy/{layer}" in run.scalars
        assert f"version_0{' (monitor 2)' * (monitor is two)}: 1 layer, 3 observations" in summarize_scalars(run)
    tabled = {run.name.partition("version_0")[2]: run for run in findings.runs}
    assert list(tabled) == ["", " (monitor 2)"]
    assert [list(run.layers) for run in tabled.values()] == [["net.blocks.0"], ["net.blocks.1"]]
    assert all(set(run.scalars) == {"train_loss", "epoch"} for run in tabled.values())
    assert all(len(run.events) >= 2 for run in tabled.values())


def test_events_in_a_file_of_a_resumed_run_follow_those_before(tmp_path: Path) -> None:
    write_events(
        tmp_path, *(make_event(step, "a", head) for step, head in [(0, 0), (10, 1), (20, 2), (10, 1), (15, 3)])
    )
    assert [(one["step"], one["head"]) for one in scalar_run(tmp_path).events] == [(0, 0), (10, 1), (15, 3)]


def test_of_a_damaged_file_of_events_the_rest_is_read_and_told(tmp_path: Path) -> None:
    wrong = [
        "[3]",
        {**make_event(6, "a", 0), "step": "x"},
        {**make_event(6, "a", 0), "layer": ["a"]},
        "[" * 100_000,
        '{"step": 9, "la',
    ]
    write_events(tmp_path, make_event(5, "a", 0, ratio=10**400, cause=3), "", *wrong, make_event(7, "a", 1, state=[]))
    findings = read(tmp_path)
    [run] = findings.scalar_runs
    assert [one["step"] for one in run.events] == [5, 7]
    assert findings.notes == [f"{tmp_path / 'attn_monitor_events.jsonl'}: 5 lines without an event left out"]
    assert "  head 0 of a    5           inf         warning     3" in summarize_scalars(run).splitlines()


def test_event_files_with_only_scalars_give_those(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("attn_entropy/encoder.0", 0.5 + step, step)
            writer.add_scalar("train_loss", 3.0 - step, step)
    run = scalar_run(tmp_path)
    assert run.source == "event files"
    assert run.scalars["attn_entropy/encoder.0"].values.tolist() == [0.5, 1.5, 2.5]
    assert {tag: points.values.tolist() for tag, points in run.others.items()} == {"train_loss": [3, 2, 1]}


def test_tables_are_better_than_csv(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    (tmp_path / "metrics.csv").write_text("step,attn_entropy/encoder.0\n0,1.0\n")
    assert only(tmp_path).steps.tolist() == list(make_run().steps)


@pytest.mark.parametrize("text", ["", "step", "epoch,step\n0,x\n", "\0\1", "step,attn_entropy/a\nnan,1\n,2\n1,\n"])
def test_a_csv_without_numbers_of_ours_is_foreign(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    assert read(tmp_path).foreign == [tmp_path.name]


def test_a_truncated_csv_gives_its_whole_cells(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,attn_entropy/a,train_loss\n0,1.0,5.0\n1,2.0,4.0\n2,3.0,-\n3,")
    run = scalar_run(tmp_path)
    assert run.scalars["attn_entropy/a"].values.tolist() == [1, 2, 3]
    assert run.others["train_loss"].values.tolist() == [5, 4]


def test_scalars_of_a_user_are_the_users_whatever_they_are_called(tmp_path: Path) -> None:
    tags = ["loss/attn_penalty", "my_attn_entropy/x", "attention", "x" * 700]
    ours = ["attn_entropy/a", "val_attn_entropy_min/a", "attn/entropy_min", "test_attn/saturation_ratio_max"]
    ours += ["attn_monitor/saturated_heads", "attn_logit_max_max/a"]
    ratios((0,), scalars={tag: [2.0] for tag in (*tags, *ours)}).write(tmp_path)
    assert sorted(only(tmp_path).scalars) == sorted(tags)


def test_scalars_of_the_new_style_are_scalars(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("other_loss", 2.5, 3, new_style=True)
    loss = only(tmp_path).scalars["other_loss"]
    assert (loss.steps.tolist(), loss.values.tolist()) == ([3], [2.5])

"""What `attn-monitor report` makes of flight records: runs and pages, and no trust in their names."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from attn_monitor import AttentionMonitor
from attn_monitor.cli import main
from attn_monitor.flight_records import (
    Beginning,
    flight_name,
    to_json,
    write_flight,
)
from attn_monitor.reports.flight import Flight, as_run, newest_flights
from tests.event_data import HOSTILE, make_run
from tests.flights import Planted
from tests.models import LIGHTNING_ADVICE, fit
from tests.stored_flights import make_flight, read, store
from tests.test_report import Page, table

pytestmark = LIGHTNING_ADVICE
NAN, INF = math.nan, math.inf


def test_the_run_of_the_page_has_every_number_and_curve() -> None:
    record = make_flight()
    run = as_run(Flight("version_0", record))
    assert run.name == "version_0 (flight record of step 40)"
    assert (run.layers, run.head_dims, run.threshold) == (["a.attn", "b.attn"], [64, None], 0.5)
    values = run.tables["saturation_ratio"].values
    assert values.shape == (3, 2, 3)
    assert_array_equal(values[:, 0, :2], record.tables["saturation_ratio"][:, :2])
    assert_array_equal(values[:, 1], record.tables["saturation_ratio"][:, 2:])
    assert np.isnan(values[:, 0, 2]).all()
    assert run.steps.tolist() == [20, 30, 40]
    curves = {name: (points.steps.tolist(), points.values.tolist()) for name, points in run.scalars.items()}
    assert repr(curves.pop("loss")) == repr(([20, 30, 39, 40], [2.5, 1.25, NAN, -INF]))
    assert curves == {
        "learning_rate/optimizer 0 group 0": ([20, 30, 40], [0.01] * 3),
        "learning_rate/optimizer 0 group 1": ([20, 30, 40], [0.02] * 3),
        "grad_norm": ([20, 40], [1.5, INF]),
        "grad_norm/a.attn": ([20, 30, 40], [10.0, 15.0, 20.0]),
    }


def test_the_report_shows_it_in_the_terminal_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run().write(tmp_path)
    store(tmp_path, make_flight(30))
    store(tmp_path, make_flight(50))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    headings = [line for line in printed.out.splitlines() if ": flight record of step " in line]
    assert [line.split(",")[0] for line in headings] == [
        f"{tmp_path.name}: flight record of step 30",
        f"{tmp_path.name}: flight record of step 50",
    ]
    assert printed.out.count("last observations") == 1
    assert printed.out.count("it began there") == 2
    page = Page((tmp_path / "attention_report.html").read_text())
    assert page.texts["summary"][1:] == headings
    assert "step 50            nan" in page.texts["pre"][-1]
    assert [run["meta"]["name"] for run in page.data["runs"]] == [
        tmp_path.name,
        f"{tmp_path.name} (flight record of step 50)",
    ]
    assert_array_equal(
        table(page.data["runs"][1], "saturation_ratio")[1][:, 1], make_flight().tables["saturation_ratio"][:, 2:]
    )


def test_names_are_text_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tags: list[list[str]] = []
    for name in ("harmless", *HOSTILE):
        folder = tmp_path / str(len(tags))
        record = make_flight(layers=(name, f"{name} 2"), exception=name, diagnosis=[name], reasons=[name], written=name)
        store(folder, replace(record, began=Beginning(step=1, text=name)))
        assert main(["report", str(folder)]) == 0
        page = Page((folder / "attention_report.html").read_text())
        tags.append(page.tags)
        assert page.data["runs"][0]["meta"]["layers"] == [name, f"{name} 2"]
    assert all(found == tags[0] for found in tags)
    capsys.readouterr()


def test_a_folder_with_nothing_else_has_a_summary_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    fit(Planted(step=2, value=NAN, skipping=False), AttentionMonitor(), 4, default_root_dir=root)
    capsys.readouterr()
    assert main(["report", str(root)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].startswith("root: flight record of step 2, written ")
    assert "in the order of the forward pass it begins in head 1 of net.blocks.1" in printed.out
    assert "wrote" in printed.out
    assert printed.err == ""


def test_a_run_of_csv_has_a_page_of_its_flight_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = CSVLogger(tmp_path)
    fit(Planted(step=1, value=NAN), AttentionMonitor(), 3, logger=logger)
    assert main(["report", str(logger.log_dir)]) == 0
    printed = capsys.readouterr()
    assert "no HTML file" not in printed.err
    page = Page((Path(logger.log_dir) / "attention_report.html").read_text())
    [run] = page.data["runs"]
    assert run["meta"]["name"] == "version_0 (flight record of step 1)"
    assert run["scalars"]["loss"]["values"][1] is None


def test_a_run_of_tensorboard_is_read_as_before(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(Planted(step=1, value=NAN), AttentionMonitor(), 3, logger=logger)
    findings = read(Path(logger.log_dir))
    assert (findings.notes, findings.foreign) == ([], [])
    assert [flight.record.step for flight in findings.flights] == [1]
    [run] = findings.runs
    flight = as_run(findings.flights[0])
    assert flight.layers == run.layers
    for name, stored in flight.tables.items():
        if name in run.tables:
            np.testing.assert_allclose(stored.values, run.tables[name].values[:2], rtol=1e-5)


def test_the_records_of_a_second_monitor_are_told_under_its_name(tmp_path: Path) -> None:
    store(tmp_path / "run", make_flight())
    write_flight(tmp_path / "run", to_json(make_flight(step=30)), flight_name(30, "monitor2_"))
    write_flight(tmp_path / "run", to_json(make_flight(step=50)), flight_name(50, "monitor2_"))
    findings = read(tmp_path)
    assert [(flight.run, flight.record.step) for flight in findings.flights] == [
        ("run", 40),
        ("run (monitor 2)", 30),
        ("run (monitor 2)", 50),
    ]
    assert [flight.record.step for flight in newest_flights(findings.flights)] == [40, 50]

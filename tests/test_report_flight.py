"""What `attn-monitor report` makes of flight records: files in, words and curves out, and no trust in either."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from attn_monitor import AttentionMonitor
from attn_monitor import flight_records as records_module
from attn_monitor.cli import main
from attn_monitor.flight_records import (
    Beginning,
    FlightRecord,
    Observation,
    flight_name,
    from_json,
    to_json,
    write_flight,
)
from attn_monitor.reports.flight import Flight, as_run, newest_flights, summarize_flight
from attn_monitor.reports.runs import Findings, find_runs, read_runs
from tests.event_data import HOSTILE, make_run
from tests.flights import Planted
from tests.models import LIGHTNING_ADVICE, fit
from tests.test_report import Page, table

pytestmark = LIGHTNING_ADVICE
NAN, INF = math.nan, math.inf


def make_flight(step: int = 40, layers: tuple[str, str] = ("a.attn", "b.attn"), **more: Any) -> FlightRecord:
    """Return a record of three observations of two layers with 2 and 3 heads."""
    observations = [
        Observation(
            step=when,
            loss=loss,
            learning_rates=[[0.01, 0.02]],
            grad_norm=norm,
            layer_grad_norms={layers[0]: 0.5 * when, layers[1]: None},
        )
        for when, loss, norm in ((step - 20, 2.5, 1.5), (step - 10, 1.25, None), (step, NAN, INF))
    ]
    ratio = np.array([[0.1, 0.2, 0.3, 0.4, NAN], [0.2, 0.3, 0.4, 0.5, 0.6], [0.3, NAN, 7.5, 0.6, 0.7]], np.float32)
    options: dict[str, Any] = {
        "reasons": ["critical event", "loss not finite"],
        "written": "2031-02-03T04:05:06+00:00",
        "diagnosis": [f"step {step}: head 0 of {layers[1]} is saturated\n  likely cause: this and that"],
        "began": Beginning(step=step - 1, loss="nan", seen_at=step, layer=layers[1], head=0, text="it began there"),
        "limit": 0.5,
        "heads": dict(zip(layers, (2, 3), strict=True)),
        "head_dims": dict(zip(layers, (64, None), strict=True)),
        "observations": observations,
        "losses": [(step - 20, 2.5), (step - 10, 1.25), (step - 1, NAN), (step, -INF)],
        "tables": {"saturation_ratio": ratio, "logit_max": 10 * ratio},
        **more,
    }
    return FlightRecord(step=step, **options)


def read(directory: Path) -> Findings:
    return read_runs(find_runs(directory))


def store(folder: Path, record: FlightRecord) -> Path:
    return write_flight(folder, to_json(record), flight_name(record.step))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_holds_what_was_given_and_is_strict_json(tmp_path: Path) -> None:
    record = make_flight()
    path = store(tmp_path / "new" / "folder", record)
    assert [entry.name for entry in path.parent.iterdir()] == ["attn_monitor_flight_40.json"]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    plain = json.loads(path.read_text(), parse_constant=refuse)
    assert plain["observations"][2]["loss"] == "nan"
    assert plain["observations"][2]["grad_norm"] == "inf"
    assert plain["observations"][1]["grad_norm"] is None
    assert plain["tables"]["saturation_ratio"]["b.attn"] == [[0.3, 0.4, None], [0.4, 0.5, 0.6], [7.5, 0.6, 0.7]]

    found = from_json(path.read_text())
    assert found.began == record.began
    assert (found.step, found.reasons, found.written, found.diagnosis) == (
        record.step,
        record.reasons,
        record.written,
        record.diagnosis,
    )
    assert (found.heads, found.head_dims, found.limit) == (record.heads, record.head_dims, record.limit)
    assert [repr(one) for one in found.observations] == [repr(one) for one in record.observations]
    assert repr(found.losses) == repr(record.losses)
    for name, values in record.tables.items():
        assert_array_equal(found.tables[name], values)


def test_a_large_model_has_fewer_observations_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MOST_NUMBERS", 2 * 5 * 2)
    found = from_json(to_json(make_flight()))
    assert len(found.observations) == 3
    assert [one.step for one in found.tabled] == [30, 40]
    assert found.tables["logit_max"].shape == (2, 5)
    assert as_run(Flight("run", found)).tables["logit_max"].steps.tolist() == [30, 40]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, make_flight())
    before = path.read_text()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_flight(tmp_path, "new", flight_name(40))
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"format": "other"}, "it is no flight record but 'other'"),
        ({"version": 2}, "its version is 2, this attn_monitor reads 1"),
        ({"step": "4"}, "it is damaged (TypeError: expected a whole number, got '4')"),
        ({"step": True}, "expected a whole number, got True"),
        ({"heads": {"a.attn": 2, "b.attn": 4}}, "the numbers of 'b.attn' have the shape (3, 3)"),
        ({"heads": {"a.attn": 2, "c": 3}}, "it is damaged (KeyError: 'c')"),
        ({"observations": [{}]}, "it is damaged (KeyError: 'step')"),
        ({"observations": []}, "the numbers of 'a.attn' have the shape (3, 2)"),
        ({"losses": {"steps": [1], "values": []}}, "zip()"),
        ({"limit": 10**400}, "it is damaged (OverflowError"),
        ({"limit": "much"}, "expected a number, got 'much'"),
        ({"tables": 3}, "it is damaged (AttributeError"),
        ({"began": 3}, "it is damaged (TypeError"),
        ({"reasons": None}, "it is damaged (TypeError"),
    ],
)
def test_a_damaged_file_is_said_and_hides_no_other(damage: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = store(tmp_path, make_flight(40))
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    store(tmp_path, make_flight(50))
    findings = read(tmp_path)
    assert [flight.record.step for flight in findings.flights] == [50]
    [note] = findings.notes
    assert note.startswith(f"{path} could not be read: ")
    assert words in note


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "3", "null", "{}", "[1]", '"x"'])
def test_a_file_of_something_else_is_said(text: str, tmp_path: Path) -> None:
    store(tmp_path, make_flight(40)).write_text(text)
    findings = read(tmp_path)
    assert (findings.flights, len(findings.notes)) == ([], 1)


# -- the words ---------------------------------------------------------------------------------------------------------


def test_the_summary_says_when_why_where_and_what_led_to_it() -> None:
    text = summarize_flight(Flight("version_3", make_flight(exception="ValueError: bad\nsecond line")))
    assert text.splitlines() == [
        "version_3: flight record of step 40, written 2031-02-03T04:05:06+00:00: critical event, loss not finite",
        "  ValueError: bad",
        "  second line",
        "  it began there",
        "  step 40: head 0 of b.attn is saturated",
        "    likely cause: this and that",
        "",
        "  last observations  loss  learning rate  gradient norm  largest ratio  of",
        "  step 20            2.5   0.01 0.02      1.5            0.4            head 1 of b.attn",
        "  step 30            1.25  0.01 0.02      -              0.6            head 2 of b.attn",
        "  step 40            nan   0.01 0.02      inf            7.5            head 0 of b.attn",
    ]


def test_a_record_without_observations_is_told_of_all_the_same() -> None:
    bare = FlightRecord(step=7, reasons=["exception"], exception="KeyError: 'x'", losses=[(6, 1.5)])
    assert summarize_flight(Flight("run", from_json(to_json(bare)))).splitlines() == [
        "run: flight record of step 7: exception",
        "  KeyError: 'x'",
        "  nothing was observed; the last losses are 1.5 at step 6",
    ]
    run = as_run(Flight("run", from_json(to_json(bare))))
    assert (run.layers, run.tables, list(run.scalars)) == ([], {}, ["loss"])


def one_head(*ratios: float, **more: Any) -> FlightRecord:
    """Return a record of one head without a diagnosis, observed at steps 10, 20 and so on."""
    observations = [Observation(step=10 * (index + 1)) for index in range(len(ratios))]
    tables = {"saturation_ratio": np.array(ratios, np.float32)[:, None]} if ratios else {}
    options: dict[str, Any] = {"reasons": ["critical event"], "heads": {"a": 1}, "head_dims": {"a": 8}, **more}
    return from_json(
        to_json(FlightRecord(step=10 * len(ratios), observations=observations, tables=tables, limit=0.5, **options))
    )


@pytest.mark.parametrize(
    ("record", "brief", "full"),
    [
        (
            one_head(0.7),
            ["  step 10: largest ratio 0.7, head 0 of a"],
            ["", "  last observations  largest ratio  of", "  step 10            0.7            head 0 of a"],
        ),
        (
            one_head(0.7, INF, losses=[(10, 2.0), (20, NAN)]),
            ["  step 20: largest ratio inf, head 0 of a"],
            [
                "",
                "  last observations  largest ratio  of",
                "  step 10            0.7            head 0 of a",
                "  step 20            inf            head 0 of a",
            ],
        ),
        (one_head(NAN), ["  step 10: no ratio was measured"], ["  step 10: no ratio was measured"]),
        (
            one_head(losses=[(8, 2.0), (9, NAN)]),
            ["  nothing was observed; the last losses are 2 at step 8, nan at step 9"],
            ["  nothing was observed; the last losses are 2 at step 8, nan at step 9"],
        ),
        (one_head(), ["  nothing was observed"], ["  nothing was observed"]),
    ],
    ids=["one observation", "inf", "not measured", "losses only", "nothing"],
)
def test_no_section_is_a_heading_alone(record: FlightRecord, brief: list[str], full: list[str]) -> None:
    heading = f"run: flight record of step {record.step}: critical event"
    assert summarize_flight(Flight("run", record), brief=True).splitlines() == [heading, *brief]
    assert summarize_flight(Flight("run", record)).splitlines() == [heading, *full]


def test_a_brief_section_names_the_head_of_nan_logits_beside_the_loss() -> None:
    counts = np.zeros((3, 5), np.float32)
    counts[2, 3] = 7
    record = make_flight(began=None)
    text = summarize_flight(Flight("run", replace(record, tables={**record.tables, "nonfinite": counts})), brief=True)
    assert text.splitlines()[1:] == ["  step 40: loss nan, logits are nan or inf in head 1 of b.attn"]


def test_an_inf_ratio_is_the_worst_of_an_observation() -> None:
    ratio = np.array([[0.3, INF, NAN, 7.5, 0.7]] * 3, np.float32)
    text = summarize_flight(Flight("run", make_flight(tables={"saturation_ratio": ratio})))
    assert [line.split()[-5:] for line in text.splitlines()[-3:]] == [["inf", "head", "1", "of", "a.attn"]] * 3


def test_no_line_can_steer_a_terminal() -> None:
    evil = "\x1b[31mred\x07"
    record = make_flight(layers=(evil, "b"), exception=evil, diagnosis=[evil], written=evil, reasons=[evil])
    began = Beginning(step=1, text=f"{evil}\nx")
    text = summarize_flight(Flight(evil, replace(record, began=began)))
    assert all(char.isprintable() for line in text.split("\n") for char in line)
    assert "\\x1b[31mred\\x07\\nx" in text


# -- the page ----------------------------------------------------------------------------------------------------------


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


def test_observations_with_nan_logits_do_not_read_as_not_measured() -> None:
    counts = np.zeros((3, 5), np.float32)
    counts[2, [2, 4]] = 9
    record = make_flight()
    tables = {**record.tables, "nonfinite": counts}
    tables["saturation_ratio"] = np.where(counts > 0, NAN, record.tables["saturation_ratio"])
    text = summarize_flight(Flight("run", replace(record, tables=tables)))
    rows = [line.split() for line in text.splitlines()[-3:]]
    assert rows[2][-10:] == ["nan", "or", "inf", "head", "0", "of", "b.attn", "and", "1", "more"]
    assert "nan" not in rows[1][-6:]


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

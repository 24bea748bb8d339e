"""What is said beside the events, such as a wrong scale and forecasts: kept in every run, and shown by its readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from attn_monitor.cli import main
from attn_monitor.dashboards.texts import note_page
from attn_monitor.lightning_loop import LightningLoop
from attn_monitor.publishing import Publisher
from attn_monitor.reports.summary import summarize
from attn_monitor.saturation import SaturationRule
from tests.board import LocalBoard
from tests.models import LIGHTNING_ADVICE, make_record, quiet, read_events
from tests.run_directories import only, read
from tests.summarized import collapsing
from tests.test_report import Page

pytestmark = LIGHTNING_ADVICE
AUDIT = "scale audit: scale * sqrt(d_k=8) is 2.83 <b>\n  in net.attn"
AUDIT_LINE = "scale audit: scale * sqrt(d_k=8) is 2.83 <b>; in net.attn"
FORECAST = "step 7: head 1 of net.attn reaches its limit about step 19"
TOLD = [{"step": 0, "note": AUDIT_LINE}, {"step": 7, "note": FORECAST}]


def train(logger: Any, notes: dict[int, Sequence[str]], steps: Sequence[int] = (0, 7, 11), prefix: str = "") -> Path:
    """Publish records of a healthy layer with three heads."""
    problems: list[str] = []
    publisher = Publisher(frozenset({"logit_row_std"}), SaturationRule(), prefix, problems.append)
    loop = LightningLoop(quiet(logger=logger))
    logger.save()  # as a fit does before its first step
    for step in steps:
        record = {"net.attn": make_record(3, logit_row_std=[1.0, 2.0, 3.0])}
        publisher.publish(loop, step, record, 0, notes=notes.get(step, ()))
    logger.finalize("success")
    assert problems == []
    return Path(logger.log_dir)


def stored(folder: Path, prefix: str = "") -> list[Any]:
    return [json.loads(line) for line in (folder / f"{prefix}attn_monitor_notes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("prefix", ["", "monitor2_"])
def test_notes_are_kept_in_a_file_and_in_tensorboard_with_their_steps(tmp_path: Path, prefix: str) -> None:
    folder = train(TensorBoardLogger(tmp_path), {0: [AUDIT], 7: [FORECAST]}, prefix=prefix)
    assert stored(folder, prefix) == TOLD
    assert not list(folder.glob("*events.jsonl"))
    tag = f"{prefix}attn_monitor/notes/text_summary"
    texts = read_events(folder).Tensors(tag)
    pages = [(text.step, text.tensor_proto.string_val[0].decode()) for text in texts]
    assert pages == [
        (0, "#### step 0\n\n- scale audit: scale \\* sqrt(d_k=8) is 2.83 &lt;b&gt; in net.attn"),
        (7, f"#### step 7\n\n- {FORECAST}"),
    ]
    run = only(tmp_path)
    assert run.notes == TOLD
    assert set(run.tables) == {"saturation_ratio", "logit_row_std", "nonfinite"}


def test_a_run_of_which_nothing_was_said_has_no_notes(tmp_path: Path) -> None:
    folder = train(TensorBoardLogger(tmp_path), {})
    assert not list(folder.glob("*.jsonl"))
    assert "attn_monitor/notes/text_summary" not in read_events(folder).Tags()["tensors"]
    assert only(tmp_path).notes == []
    assert "noted" not in summarize(only(tmp_path))


def test_the_report_tells_notes_where_no_event_ever_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(TensorBoardLogger(tmp_path), {0: [AUDIT], 7: [FORECAST]})
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  no event: no head was flagged")
    assert lines[2:5] == ["  but noted:", f"    step 0: {AUDIT_LINE}", f"    {FORECAST}"]
    page = Page((tmp_path / "attention_report.html").read_text())
    assert AUDIT_LINE in page.texts["pre"][0]
    [run] = json.loads(page.texts["script#attn-monitor-data"][0])["runs"]
    assert run["meta"]["notes"] == TOLD


def test_the_tab_serves_notes_until_the_run_goes_back(tmp_path: Path) -> None:
    train(TensorBoardLogger(tmp_path, version="one"), {0: [AUDIT], 7: [FORECAST]})
    [run] = LocalBoard(tmp_path).get("runs").body
    assert LocalBoard(tmp_path).get("meta", run=run).body["notes"] == TOLD
    train(TensorBoardLogger(tmp_path, version="one"), {}, steps=(5, 7, 9))
    assert LocalBoard(tmp_path).get("meta", run=run).body["notes"] == TOLD[:1]
    assert only(tmp_path).notes == TOLD[:1]


def test_a_run_with_only_scalars_has_its_notes_from_the_file(tmp_path: Path) -> None:
    folder = train(CSVLogger(tmp_path), {0: [AUDIT], 7: [FORECAST]})
    [run] = read(tmp_path).scalar_runs
    assert run.notes == TOLD
    assert main(["report", str(tmp_path), "--summary-only"]) == 0
    with (folder / "attn_monitor_notes.jsonl").open("a") as file:
        file.write('{"step": 5, "note": "later"}\n{"step": 5\n{"step": "6", "note": "x"}\n')  # resumed at 5, damaged
    findings = read(tmp_path)
    assert [note["note"] for note in findings.scalar_runs[0].notes] == [AUDIT_LINE, "later"]
    assert findings.notes == [f"{folder / 'attn_monitor_notes.jsonl'}: 2 lines without a note left out"]


def test_the_report_of_scalars_tells_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(CSVLogger(tmp_path), {0: [AUDIT]})
    assert main(["report", str(tmp_path), "--summary-only"]) == 0
    assert f"  but noted:\n    step 0: {AUDIT_LINE}\n" in capsys.readouterr().out


def test_a_summary_lists_few_notes_and_counts_the_rest() -> None:
    notes = [{"step": step, "note": f"step {step}: \x1b[31m forecast"} for step in range(7)]
    lines = summarize(replace(collapsing(), notes=notes)).splitlines()
    start = lines.index("  noted beside them:")
    assert lines[start + 1 : start + 7] == [
        *(f"    step {step}: \\x1b[31m forecast" for step in range(5)),
        "    and 2 more, all in attn_monitor_notes.jsonl",
    ]


def test_a_page_of_notes_is_bounded() -> None:
    page = note_page(3, [f"note {number}" for number in range(23)])
    assert page.startswith("#### step 3\n\n- note 0\n- note 1\n")
    assert page.endswith("- note 19\n- and 3 more")
    assert note_page(3, []) == ""


def test_a_folder_that_takes_no_file_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    (Path(logger.log_dir) / "attn_monitor_notes.jsonl").mkdir(parents=True)
    problems: list[str] = []
    publisher = Publisher(frozenset({"logit_row_std"}), SaturationRule(), "", problems.append)
    loop = LightningLoop(quiet(logger=logger))
    publisher.publish(loop, 0, {"a": make_record(3, logit_row_std=[1.0, 2.0, 3.0])}, 0, notes=[AUDIT])
    assert len(problems) == 1
    assert "writing the file of notes" in problems[0]
    assert only(tmp_path).notes == TOLD[:1]

"""Directories of runs as they are found on disk: finished, running, crashed, resumed, damaged, and what is no run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor, views
from attn_monitor.reports import runs as reading
from attn_monitor.reports.runs import Findings, find_runs, read_runs
from attn_monitor.views import RunData
from tests.event_data import make_event, make_run
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet, read_events
from tests.run_directories import HEADS, LAYERS, only, ratios, read, write_events

pytestmark = LIGHTNING_ADVICE
ROOT = Path(__file__).parent.parent


def event_file(directory: Path) -> Path:
    [path] = directory.iterdir()
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    first, second = make_event(20, LAYERS[1], 3), make_event(40, LAYERS[1], 3, severity="critical", state="critical")
    written = make_run(events={20: [first], 40: [second]}, threshold=0.75)
    written.write(tmp_path)
    run = only(tmp_path)
    assert (run.name, list(run.layers), list(run.head_dims)) == (tmp_path.name, list(LAYERS), [64] * 3)
    assert run.threshold == 0.75
    assert set(run.tables) == set(written.tables)
    for name, values in written.tables.items():
        assert_array_equal(run.tables[name].steps, written.steps)
        assert_array_equal(run.tables[name].values, values)
    assert list(run.events) == [first, second]
    assert set(run.scalars) == {"train_loss"}
    assert run.scalars["train_loss"].values == pytest.approx(written.scalars["train_loss"], rel=1e-6)
    assert_array_equal(run.scalars["train_loss"].steps, written.steps)


def test_a_training_is_read_back_as_it_was(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(statistics=["entropy", "logit_std"])
    quiet(logger=logger, callbacks=[monitor], max_steps=3).fit(Lit("hand", "sdpa"), loader(3))
    run = only(tmp_path)
    assert run.name == "lightning_logs/version_0"
    assert list(run.layers) == ["net.blocks.0", "net.blocks.1"]
    for index, (step, layers) in enumerate(monitor.history):
        for row, stats in enumerate(layers.values()):
            for name in ("entropy", "logit_std", "q_rms", "alignment"):
                assert run.tables[name].steps[index] == step
                assert_array_equal(run.tables[name].values[index, row], getattr(stats, name).float().numpy())
    assert len(monitor.history) == len(run.steps) == 3
    losses = read_events(str(logger.log_dir)).Scalars("train_loss")
    assert run.scalars["train_loss"].values.tolist() == [point.value for point in losses]


def test_runs_have_the_names_of_their_directories_in_the_order_of_people(tmp_path: Path) -> None:
    for name in ("version_10", "version_2", "other/version_0"):
        make_run().write(tmp_path / name)
    with SummaryWriter(str(tmp_path / "plain")) as plain:
        plain.add_scalar("train_loss", 1.0, 0)
    findings = read(tmp_path)
    assert [run.name for run in findings.runs] == ["other/version_0", "version_2", "version_10"]
    assert findings.foreign == ["plain"]


def test_a_directory_and_a_run_in_it_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    make_run().write(tmp_path / "run")
    make_run(steps=(1, 2)).write(tmp_path / "run" / "run")
    assert {run.name: len(run.steps) for run in read(tmp_path / "run").runs} == {".": 7, "run": 2}


def test_links_to_nothing_are_no_files(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    (tmp_path / "events.out.tfevents.1.host.7.0").symlink_to("nowhere")
    (tmp_path / "metrics.csv").symlink_to("nowhere")
    assert only(tmp_path).steps.tolist() == list(make_run().steps)


def test_stages_are_runs_of_their_own(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    make_run(layers=LAYERS[:2], prefix="val_", threshold=0.25).write(tmp_path)
    findings = read(tmp_path)
    assert [run.name for run in findings.runs] == [tmp_path.name, f"{tmp_path.name} (validation)"]
    assert [run.threshold for run in findings.runs] == [0.5, 0.25]
    assert [list(run.layers) for run in findings.runs] == [list(LAYERS), list(LAYERS[:2])]


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    written = make_run()
    with SummaryWriter(str(tmp_path)) as writer:
        written.write(tmp_path, range(2), writer)
        assert only(tmp_path).steps.tolist() == [0, 10]
        written.write(tmp_path, range(2, 5), writer)
        assert only(tmp_path).steps.tolist() == [0, 10, 20, 30, 40]


def test_a_resumed_run_takes_back_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    make_run(events={20: [make_event(20, LAYERS[1], 3)]}).write(tmp_path)
    ratios((15, 25, 35), scalars={"train_loss": [15, 25, 35]}).write(tmp_path)
    run = only(tmp_path)
    ratio = run.tables["saturation_ratio"]
    assert ratio.steps.tolist() == [0, 10, 15, 25, 35]
    assert ratio.values[2:, 0, 0] == pytest.approx([1.5, 2.5, 3.5])
    assert run.scalars["train_loss"].steps.tolist() == [0, 10, 15, 25, 35]
    assert list(run.events) == []  # what had opened at 20 has not happened


def test_events_of_a_resumed_run_follow_those_before(tmp_path: Path) -> None:
    ratios((0, 10, 20), events={step: [make_event(step, LAYERS[0], step // 10)] for step in (0, 10, 20)}).write(
        tmp_path
    )
    ratios((10, 20), events={10: [make_event(10, LAYERS[1], 4)]}).write(tmp_path)
    assert [(one["step"], one["head"]) for one in only(tmp_path).events] == [(0, 0), (10, 4)]


def test_event_files_are_read_by_age_and_not_by_name(tmp_path: Path) -> None:
    names = {0: "999.host.7.0", 100: "1000.host.7.0", 200: "1001.host.7.9", 300: "1001.host.7.10"}
    for start, name in names.items():
        ratios((start, start + 10)).write(tmp_path / str(start))
        event_file(tmp_path / str(start)).rename(tmp_path / f"events.out.tfevents.{name}")
    assert only(tmp_path).steps.tolist() == [0, 10, 100, 110, 200, 210, 300, 310]


def test_a_model_that_grows_is_padded(tmp_path: Path) -> None:
    ratios((10,), layers=LAYERS[:2]).write(tmp_path)
    ratios((20,)).write(tmp_path)
    run = only(tmp_path)
    assert list(run.layers) == list(LAYERS)
    values = run.tables["saturation_ratio"].values
    assert values.shape == (2, len(LAYERS), HEADS)
    assert values[0, :2].ravel() == pytest.approx(1 + np.arange(2 * HEADS) / 1000)
    assert np.isnan(values[0, 2]).all()
    assert values[1].ravel() == pytest.approx(2 + np.arange(3 * HEADS) / 1000)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_of_a_truncated_file_the_rest_is_read_and_told(tmp_path: Path) -> None:
    ratios((0, 10, 20)).write(tmp_path)
    path = event_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    findings = read(tmp_path)
    [run] = findings.runs
    assert run.steps.tolist() == [0, 10]
    [note] = findings.notes
    assert note.startswith(f"{path}: the last record is unfinished, ")


def test_of_a_damaged_file_the_rest_is_read_and_told(tmp_path: Path) -> None:
    ratios((0, 10, 20)).write(tmp_path)
    path = event_file(tmp_path)
    data = bytearray(path.read_bytes())
    second = [place for place in range(len(data)) if data.startswith(b"attn_monitor/saturation", place)][1]
    data[second + 20] ^= 1
    path.write_bytes(data)
    findings = read(tmp_path)
    [run] = findings.runs
    assert run.steps.tolist() == [0, 20]
    assert findings.notes == [f"{path}: 1 damaged record left out"]


def test_the_first_record_lost_leaves_rows_without_names(tmp_path: Path) -> None:
    """It alone may say which plugin the tensors belong to."""
    with SummaryWriter(str(tmp_path)) as writer:
        ratios((0,)).write(tmp_path, writer=writer)
        for step in (10, 20):
            table = tensor_util.make_tensor_proto(np.full((3, HEADS), step, np.float32))
            value = Summary.Value(tag="attn_monitor/saturation_ratio", tensor=table)
            writer._get_file_writer().add_summary(Summary(value=[value]), step)
    path = event_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(LAYERS[1].encode())] ^= 1
    path.write_bytes(data)
    [run] = read(tmp_path).runs
    assert list(run.layers) == ["layer 0", "layer 1", "layer 2"]
    assert run.steps.tolist() == [10, 20]
    assert run.tables["saturation_ratio"].values[:, 2, HEADS - 1].tolist() == [10, 20]


def test_a_file_of_noise_beside_a_good_one_costs_a_note(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    noise = tmp_path / "events.out.tfevents.1.host.7.0"
    noise.write_bytes(b"\x07" * 211)
    findings = read(tmp_path)
    assert findings.notes == [f"{noise}: 211 bytes that are no records left out"]
    assert findings.runs[0].steps.tolist() == list(make_run().steps)


# -- only scalars ------------------------------------------------------------------------------------------------------


def test_events_of_one_step_are_read_with_the_worst_head_first(tmp_path: Path) -> None:
    events = [make_event(20, LAYERS[1], head, ratio=ratio) for head, ratio in enumerate([0.51, 0.74, 0.62])]
    ended = make_event(20, LAYERS[0], 4, ratio=0.3, state="ended")
    make_run(events={20: [*events, ended], 30: [make_event(30, LAYERS[2], 0, ratio=9.0)]}).write(tmp_path)
    assert [(one["step"], one["head"]) for one in only(tmp_path).events] == [
        (20, 1),
        (20, 2),
        (20, 0),
        (20, 4),
        (30, 0),
    ]


# -- no run ------------------------------------------------------------------------------------------------------------


def test_an_empty_directory_has_no_runs(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "notes.txt").write_text("events.out")
    assert find_runs(tmp_path) == []
    assert read(tmp_path) == Findings()


def test_what_is_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no directory .*nowhere: give the one that holds the event files"):
        find_runs(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is a file: give the directory it is in"):
        find_runs(tmp_path / "file")


def test_progress_adds_up_to_the_size_of_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run().write(tmp_path / name)
        write_events(tmp_path / name, make_event(0, "a", 1))
    found = find_runs(tmp_path)
    seen: list[int] = []
    read_runs(found, seen.append)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.*") if path.is_file()]
    assert len(sizes) == 6
    assert sum(seen) == sum(run.size for run in found) == sum(sizes)


def test_reading_needs_neither_torch_nor_lightning(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'pytorch_lightning', 'lightning', 'torchmetrics'])); "
        "from pathlib import Path; from attn_monitor.reports.runs import find_runs, read_runs; "
        f"print(len(read_runs(find_runs(Path({str(tmp_path)!r}))).runs[0].steps))"
    )
    run: Any = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout == "7\n"


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bad", "good"):
        make_run().write(tmp_path / name)
    assemble = views.assemble

    def picky(name: str, *rest: Any, **options: Any) -> RunData:
        if name == "bad":
            raise TypeError("must be real number, not bytes")
        return assemble(name, *rest, **options)

    monkeypatch.setattr(reading, "assemble", picky)
    findings = read_runs(find_runs(tmp_path))
    assert [run.name for run in findings.runs] == ["good"]
    assert findings.notes == ["bad could not be read, TypeError: must be real number, not bytes"]

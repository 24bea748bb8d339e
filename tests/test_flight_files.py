"""Where the last steps of a training are written, and what happens where that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from attn_monitor import AttentionMonitor
from attn_monitor import flight_recorder as recorder_module
from attn_monitor.flight_records import from_json
from tests.flights import Overflowing, Planted, disk_full, written
from tests.models import LIGHTNING_ADVICE, fit, loader, quiet

pytestmark = LIGHTNING_ADVICE


def test_every_logger_with_a_folder_gets_it_and_without_any_the_root(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    fit(Planted(step=1), AttentionMonitor(), 3, logger=loggers)
    for logger in loggers:
        assert written(str(logger.log_dir))[0].step == 1
    fit(Planted(step=1), AttentionMonitor(), 3, logger=False, default_root_dir=tmp_path / "root")
    assert written(tmp_path / "root")[0].step == 1


def test_fast_dev_run_writes_nothing_and_names_no_file(tmp_path: Path) -> None:
    monitor = AttentionMonitor()
    _, said = fit(Planted(step=1), monitor, 3, fast_dev_run=3, default_root_dir=tmp_path)
    assert not list(tmp_path.rglob("*flight*"))
    assert monitor.flight_recorder.paths == []
    [text] = [text for text in said if "the loss turned nan at step 1" in text]
    assert text.endswith("it begins in head 1 of net.blocks.1")


class Remote(Logger):
    """Writes to an address, as the loggers of object stores do; nothing of it reaches a disk here."""

    log_dir = "s3://bucket/run"  # a property of Lightning's own loggers, which this one must not ask for a folder
    name, version = "remote", 0

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Take them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Take them."""


@pytest.mark.parametrize("ends", [False, True])
def test_of_logs_at_an_address_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = AttentionMonitor(every_n_steps=100 if ends else 1)
    _, said = fit(Planted(step=1), monitor, 3, logger=Remote(), default_root_dir=tmp_path)
    assert not list(tmp_path.rglob("*flight*"))
    [text] = [text for text in said if "the loss turned nan at step 1" in text]
    assert text.endswith(
        "; what led to it is in the next checkpoint alone, as no file of it is written to s3://bucket/run"
    )
    local = CSVLogger(tmp_path / "local")
    fit(Planted(step=1), AttentionMonitor(), 3, logger=[Remote(), local])
    assert written(str(local.log_dir))[0].step == 1


def test_a_file_that_could_not_be_written_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "write_flight", disk_full)
    _, said = fit(Overflowing(1), AttentionMonitor(), 3, logger=CSVLogger(tmp_path))
    assert any("the loss turned inf at step 1" in text for text in said)
    assert not any("attn_monitor_flight_" in text for text in said)


def test_a_writing_error_with_another_text_each_time_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, text: str, name: str) -> Path:
        raise OSError(f"{folder / name} is gone")

    monkeypatch.setattr(recorder_module, "write_flight", fails)
    _, said = fit(Overflowing(1, 3, 5), AttentionMonitor(), 7, logger=CSVLogger(tmp_path))
    failed = [text for text in said if "writing the flight record failed" in text]
    assert len(failed) == 1
    assert "attn_monitor_flight_1.json is gone" in failed[0]


def test_a_prefix_gives_the_files_of_a_second_monitor_names_of_their_own(tmp_path: Path) -> None:
    monitor, start = AttentionMonitor(), recorder_module.FlightRecorder.start
    monitor.flight_recorder.start = lambda *_: start(monitor.flight_recorder, "monitor2_")  # type: ignore[method-assign] # as if it were the second
    logger = CSVLogger(tmp_path)
    _, said = fit(Planted(step=1), monitor, 3, logger=logger)
    assert sorted(path.name for path in Path(str(logger.log_dir)).glob("*flight*")) == [
        "monitor2_attn_monitor_flight_1.json"
    ]
    assert any(text.endswith("what led to it is in monitor2_attn_monitor_flight_1.json") for text in said)


def test_two_monitors_on_one_trainer_leave_a_file_each(tmp_path: Path) -> None:
    one, two = AttentionMonitor(modules="net.blocks.0"), AttentionMonitor(modules="net.blocks.1")
    logger = CSVLogger(tmp_path)
    fit(Planted(layer=0, step=1), one, 3, callbacks=[two], logger=logger)
    folder = Path(str(logger.log_dir))
    first = from_json((folder / "attn_monitor_flight_1.json").read_text())
    second = from_json((folder / "monitor2_attn_monitor_flight_1.json").read_text())
    assert (list(first.heads), list(second.heads)) == (["net.blocks.0"], ["net.blocks.1"])


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor()
    trainer = quiet(callbacks=[monitor], logger=logger)
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    trainer.fit(Planted(step=1), loader(3))
    assert not list(tmp_path.rglob("*flight*"))
    assert monitor.flight_recorder.began is not None


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "write_flight", disk_full)
    trainer, said = fit(Overflowing(1, 3), AttentionMonitor(), 5, logger=CSVLogger(tmp_path))
    assert trainer.global_step == 5
    failed = [text for text in said if "flight record failed" in text]
    assert [text.removeprefix("AttentionMonitor: ") for text in failed] == [
        "writing the flight record failed: OSError: [Errno 28] No space left on device"
    ]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    class Remove(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                root.rename(tmp_path / "elsewhere")

    root = tmp_path / "root"
    root.mkdir()
    fit(Overflowing(1), AttentionMonitor(), 3, logger=False, default_root_dir=root, callbacks=[Remove()])
    assert [record.step for record in written(root)] == [1]

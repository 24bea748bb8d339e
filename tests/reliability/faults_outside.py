"""Faults of what is around a training: loggers, disks, clocks, checkpoints, other processes."""

from __future__ import annotations

import copy
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from attn_monitor import AttentionMonitor
from attn_monitor.tags import EVENTS_FILE
from tests.models import read_events
from tests.reliability.expectations import alone, right, subject, survives, watching
from tests.reliability.registry import Verdict, fault
from tests.reliability.trials import STEPS, attempt, clean, records, same_records, with_patches

TAG = "attn_logit_std/net.blocks.0"
EVERY_STEP = range(STEPS)


class Unwell(CSVLogger):
    """Fails at one thing, with another text each time, but only where it is asked by the monitor."""

    def __init__(self, folder: Path, failing: str) -> None:
        super().__init__(folder)
        self.failing, self.calls = failing, 0

    def fail(self, place: str) -> None:
        """Fail at the place of one's choice."""
        if place == self.failing and self.asked_by_us():
            self.calls += 1
            raise OSError(f"connection {self.calls} was reset")

    @staticmethod
    def asked_by_us() -> bool:
        """Tell whether the monitor is among the callers."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_globals.get("__name__") == "attn_monitor.publishing":
                return True
        return False

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.fail("log_metrics")
        super().log_metrics(metrics, step)

    @property
    def experiment(self) -> Any:
        self.fail("experiment")
        return super().experiment

    def save(self) -> None:
        self.fail("save")
        super().save()


@fault(
    "a logger that raises while it logs, is opened or is saved, with another text each time",
    whose="the system's",
    sees="one warning for each kind of error that names the logger and the first of them",
    lost="the values for that logger; the others get them",
)
def logger(folder: Path) -> Verdict:
    late = 3
    unwatched = attempt(subject(), [Alarmed(late)])
    for failing in ("log_metrics", "experiment", "save"):
        unwell, board = Unwell(folder / failing, failing), TensorBoardLogger(folder, name=failing)
        monitor = watching()
        trial = attempt(subject(), [Alarmed(late), monitor], logger=[unwell, board])  # an event saves the loggers
        assert trial.error == "", trial.error
        assert trial.same_as(unwatched)
        clean(trial)
        assert unwell.calls > 0
        told = [text for text in trial.said if "was reset" in text]
        assert 1 <= len(told) <= 2, told  # of writing, and of saving at an event
        assert all("Unwell failed: OSError: connection " in text for text in told), told
        assert len(read_events(board.log_dir).Scalars(TAG)) == STEPS
        right(monitor, last=late, but=range(late, STEPS))
    return Verdict(3, 3)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond a size: writes fail in whatever thread they happen, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Alarmed(Callback):
    """Raises the logits so that there are events in some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            for block in pl_module.net.blocks[:2]:
                block.qkv.weight.data.mul_(8.0)


@fault(
    "the disk is full for the file of events and the flight record",
    whose="the system's",
    sees="one warning for each file",
    lost="these files; events stay in `events`, the record in `flight_recorder`",
)
def full_for_files(folder: Path) -> Verdict:
    board = CSVLogger(folder, name="run", version=0)
    run = Path(board.log_dir)
    run.mkdir(parents=True)
    (run / EVENTS_FILE).symlink_to("/dev/full")
    unwatched = attempt(subject(), [Alarmed(2)])
    monitor = watching()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # This file is written beside its place and then moved: a link to a full device would be replaced.
    recording = with_patches(patch("attn_monitor.flight_recorder.write_flight", full))
    trial = attempt(subject(), [Alarmed(2), monitor], during=recording, logger=board)
    assert trial.error == "", trial.error
    assert trial.same_as(unwatched)
    clean(trial)
    assert monitor.events
    for what in ("the file of events", "the flight record"):
        [_] = [text for text in trial.said if f"writing {what} failed: OSError: [Errno 28]" in text]
    right(monitor, last=2, but=range(2, STEPS))
    return Verdict()


@fault(
    "the disk is full for TensorBoard's event file",
    whose="the system's",
    sees="one warning, and at the end of the fit the error of TensorBoard's writer, as Lightning's own values bring it",
    lost="what TensorBoard would have got; history, events and other loggers have it, and every step was trained",
)
def full_for_tensorboard(folder: Path) -> Verdict:
    board = TensorBoardLogger(folder, name="alone")
    unwatched = attempt(subject(), [], during=full_disk(150), logger=board)
    assert unwatched.error == "OSError: [Errno 27] File too large"  # from what Lightning logs
    board, table = TensorBoardLogger(folder, name="board"), CSVLogger(folder, name="table")
    monitor = watching()
    silent = {"log_every_n_steps": 99}  # so that all that is written is ours
    trial = attempt(subject(), [monitor], during=full_disk(20_000), logger=[board, table], **silent)
    assert trial.error == unwatched.error
    assert replace(trial, error="").same_as(alone())
    assert trial.left == {}
    assert 1 <= len(trial.said) <= 4, trial.said
    right(monitor)
    return Verdict()


class Deleting(Callback):
    """Deletes a folder in the middle of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            shutil.rmtree(self.folder)


@fault(
    "the folder of the run is deleted in the middle of it",
    whose="the system's",
    sees="from TensorBoard as with a full disk; "
    "CSV goes on once an event makes the folder again, else the fit ends with its error",
    lost="what was in it; every step was trained",
)
def deleted(folder: Path) -> Verdict:
    kinds: list[Any] = [TensorBoardLogger, CSVLogger]
    for kind in kinds:
        board = kind(folder, name=kind.__name__, version=0)
        run = Path(board.log_dir)
        run.mkdir(parents=True)
        unwatched = attempt(subject(), [Alarmed(3)])
        monitor = watching()
        trial = attempt(subject(), [Alarmed(3), Deleting(run), monitor], logger=board, log_every_n_steps=99)
        # The file of events makes the folder again, which is enough for CSV; TensorBoard's file is open and gone.
        assert trial.error.startswith("FileNotFoundError") if kind is TensorBoardLogger else trial.error == ""
        assert replace(trial, error="").same_as(unwatched)
        assert trial.left == {}
        assert len([text for text in trial.said if "failed" in text]) <= 3, trial.said
        assert monitor.events
        assert (run / EVENTS_FILE).exists()  # made again for what comes later
        right(monitor, last=3, but=range(3, STEPS))
    return Verdict(2, 2)


@fault("the clock goes back, by an hour in every step", whose="the system's", sees="nothing")
def clock(folder: Path) -> Verdict:
    real, calls = time.time, [0]

    def back() -> float:
        calls[0] += 1
        return real() - 3600.0 * calls[0]

    board = TensorBoardLogger(folder)
    monitor = watching()
    trial = survives(with_patches(patch("time.time", back)), monitor, steps=EVERY_STEP, logger=board)
    assert trial.said == []
    assert calls[0] > 0
    points = read_events(board.log_dir).Scalars(TAG)
    found = dict(monitor.history)
    assert [point.step for point in points] == list(EVERY_STEP)
    for point in points:
        std = found[point.step]["net.blocks.0"].logit_std
        assert std is not None
        torch.testing.assert_close(point.value, float(std.mean()), rtol=1e-6, atol=0)
    right(monitor)
    return Verdict()


@fault("TensorBoard is not installed", whose="the system's", sees="nothing")
def no_tensorboard(folder: Path) -> Verdict:
    names = ("tensorboard", "torch.utils.tensorboard")
    monitor = watching()
    hidden = with_patches(patch.dict(sys.modules, dict.fromkeys(names)))
    trial = survives(hidden, monitor, steps=EVERY_STEP, logger=CSVLogger(folder))
    assert trial.said == []
    right(monitor)
    return Verdict()


@fault(
    "numpy cannot draw the pictures",
    whose="the system's",
    sees="one warning that there are no more images",
    lost="the pictures of that run; scalars and tables go on",
)
def no_pictures(folder: Path) -> Verdict:
    def no_loop(*_: Any, **__: Any) -> Any:
        raise TypeError("No loop matching the specified signature")

    board = TensorBoardLogger(folder)
    monitor = watching()
    broken = with_patches(patch("attn_monitor.dashboards.pictures.encode_png", no_loop))
    trial = survives(broken, monitor, steps=EVERY_STEP, logger=board)
    (text,) = trial.said
    assert "no more images (TypeError: No loop matching" in text
    assert len(read_events(board.log_dir).Scalars(TAG)) == STEPS
    right(monitor)
    return Verdict()


def damaged(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield states of other versions, and damaged ones: every key missing, and every value of other types."""
    yield {}
    yield {"version": 1}
    yield {"version": 99, "heads": {"of": "the future"}}
    for key in state:
        yield {other: value for other, value in state.items() if other != key}
        values: list[Any] = [None, 7, "text", [[]], {"a": float("nan")}, torch.zeros(3)]
        for wrong in values:
            yield {**state, key: wrong}


@fault(
    "a checkpoint whose state of the monitor is of another version, or damaged",
    whose="the system's",
    sees="one warning that the state is ignored",
    lost="the memory of the run before",
)
def bad_state(folder: Path) -> Verdict:
    path = folder / "run.ckpt"
    first = watching()

    class Save(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)

    attempt(subject(), [first, Save()])
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    (key,) = [key for key in saved["callbacks"] if "AttentionMonitor" in key]
    states = list(damaged(saved["callbacks"][key]))
    unwatched = attempt(subject(), [], ckpt_path=path, max_epochs=2)
    resumed = watching()
    attempt(subject(), [resumed], ckpt_path=path, max_epochs=2)
    wanted = {step: record for step, record in records(resumed).items() if step >= STEPS}
    assert sorted(wanted) == list(range(STEPS, 2 * STEPS))
    chosen = states[::4]
    for number, state in enumerate(chosen):
        broken = copy.deepcopy(saved)
        broken["callbacks"][key] = state
        torch.save(broken, folder / f"{number}.ckpt")
        monitor = watching()
        trial = attempt(subject(), [monitor], ckpt_path=folder / f"{number}.ckpt", max_epochs=2)
        assert trial.error == "", trial.error
        assert trial.same_as(unwatched)
        clean(trial)
        assert len(trial.said) <= 2, trial.said
        found = {step: record for step, record in records(monitor).items() if step >= STEPS}
        assert same_records(found, wanted), number
    for state in states:  # the rest without a training
        monitor = AttentionMonitor()
        monitor.load_state_dict(state)
        assert monitor.events == []
    assert alone().error == ""
    return Verdict(len(states), len(chosen))


@fault(
    "one of two processes is killed in the middle of a step",
    whose="the system's",
    sees="on the other process the error of torch.distributed, within its timeout",
    lost="the step that was not finished",
)
def killed_process(folder: Path) -> Verdict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.reliability.killed", str(folder)]
    started = time.monotonic()
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes[1] == -signal.SIGKILL
    ended, history, behind = (folder / "rank0.txt").read_text().splitlines()
    assert ended in ("RuntimeError", "DistBackendError", "DistNetworkError"), ended  # what torch.distributed raises
    assert (history, behind) == ("2", "{}"), (ended, history, behind)
    assert time.monotonic() - started < 120
    return Verdict(1, 0)

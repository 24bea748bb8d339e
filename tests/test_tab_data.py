"""The data behind the Attention tab, with real event files behind a real TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from attn_monitor.tensorboard_plugin.loader import NAME
from tests.board import LocalBoard
from tests.event_data import HOSTILE, make_event, make_run
from tests.models import DIM, HEADS, LIGHTNING_ADVICE, Lit, loader, quiet
from tests.tab_data import EVENTS, all_frames, assert_serves, decode

pytestmark = LIGHTNING_ADVICE


def test_routes_return_exactly_what_was_written(tmp_path: Path) -> None:
    make_run(events=EVENTS).write(tmp_path / "one")
    board = LocalBoard(tmp_path)
    assert board.get("runs").body == ["one"]
    assert_serves(board)
    assert_serves(board)  # and again from what is kept


def test_after_a_fit_the_routes_return_what_was_measured(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="fit")
    monitor = AttentionMonitor(statistics=["entropy_normalized", "logit_row_std"], stages=["train", "validate"])
    model = Lit("hand", "sdpa", gain=6.0)
    with pytest.warns(AttentionWarning, match="critical"):
        quiet(callbacks=[monitor], logger=logger).fit(model, loader(5), loader(2))
    board = LocalBoard(tmp_path)
    run, validation = board.get("runs").body
    assert (run, validation) == ("fit/version_0", "fit/version_0 (validation)")
    meta = board.get("meta", run=run).body
    assert meta["steps"] == [step for step, _ in monitor.history] == list(range(5))
    assert meta["layers"] == ["net.blocks.0", "net.blocks.1"]
    assert meta["heads"] == [HEADS, HEADS]
    assert meta["head_dims"] == [DIM // HEADS] * 2
    assert meta["statistics"][0]["threshold"] == 0.5
    assert "train_loss" in meta["scalars"]
    assert not [tag for tag in meta["scalars"] if "attn" in tag]
    names = {row["name"] for row in meta["statistics"]}
    assert {"saturation_ratio", "entropy_normalized", "scale_ratio", "q_rms", "k_rms", "alignment", "qk_std"} <= names
    for name in ("entropy_normalized", "q_rms", "alignment"):
        measured = [[getattr(stats, name).tolist() for stats in layers.values()] for _, layers in monitor.history]
        np.testing.assert_array_equal(decode(all_frames(board, run, name)), np.array(measured, np.float32))
    served = board.get("events", run=run).body
    assert [event["message"] for event in served if event["state"] == "opened"]
    opened = {(event["step"], event["layer"], event["head"]) for event in served if event["state"] != "ended"}
    assert {(event.step, event.layer, event.head) for event in monitor.events} <= opened
    np.testing.assert_allclose(
        board.get("scalar", run=run, tag="train_loss").body["values"], [loss.item() for loss in model.losses], rtol=1e-6
    )
    assert board.get("meta", run=validation).body["layers"] == meta["layers"]


def test_all_steps_are_kept(tmp_path: Path) -> None:
    run = make_run(steps=range(0, 1212, 4), layers=("a", "b"), heads=3)
    run.write(tmp_path / "one")
    board = LocalBoard(tmp_path)
    assert len(board.get("meta", run="one").body["steps"]) == 303
    np.testing.assert_array_equal(decode(all_frames(board, "one", "q_rms")), run.tables["q_rms"])


def test_the_user_still_decides_how_many_steps_are_kept(tmp_path: Path) -> None:
    make_run(steps=range(50)).write(tmp_path / "one")
    board = LocalBoard(tmp_path, "--samples_per_plugin", f"{NAME}=7")
    assert len(board.get("meta", run="one").body["steps"]) == 7


def test_several_runs_and_stages_have_names_of_their_own(tmp_path: Path) -> None:
    make_run(seed=1).write(tmp_path / "a" / "version_0")
    make_run(seed=2).write(tmp_path / "b")
    make_run(seed=3, prefix="val_", scalars={}).write(tmp_path / "b")
    board = LocalBoard(tmp_path)
    assert board.get("runs").body == ["a/version_0", "b", "b (validation)"]
    for seed, name in enumerate(board.get("runs").body, start=1):
        np.testing.assert_array_equal(decode(all_frames(board, name, "k_rms")), make_run(seed=seed).tables["k_rms"])


def test_a_run_that_is_still_being_written_grows(tmp_path: Path) -> None:
    run = make_run(events=EVENTS)
    writer = SummaryWriter(str(tmp_path / "one"))
    run.write(tmp_path, range(3), writer)
    board = LocalBoard(tmp_path)
    assert board.get("meta", run="one").body["steps"] == [0, 10, 20]
    assert len(board.get("events", run="one").body) == 1
    run.write(tmp_path, range(3, 7), writer)
    board.reload()
    assert_serves(board)
    writer.close()


def test_a_resumed_run_drops_what_it_went_back_over(tmp_path: Path) -> None:
    lost = {10: [make_event(10, "layers.0.attn", 1)], 50: [make_event(50, "layers.0.attn", 2)]}
    first, second = make_run(seed=1, events=lost), make_run(seed=2, events={20: EVENTS[20]})
    first.write(tmp_path / "one", range(6))
    second.write(tmp_path / "one", [0])  # a new process writes its names again
    second.write(tmp_path / "one", range(2, 5))
    board = LocalBoard(tmp_path)
    assert board.get("meta", run="one").body["steps"] == [0, 20, 30, 40]
    frames = decode(all_frames(board, "one", "q_rms"))
    np.testing.assert_array_equal(frames, second.tables["q_rms"][[0, 2, 3, 4]])
    assert [event["step"] for event in board.get("events", run="one").body] == [20]


@pytest.mark.parametrize("kind", ["empty directory", "another run"])
def test_without_our_data_there_are_no_runs_and_no_errors(tmp_path: Path, kind: str) -> None:
    if kind == "another run":
        writer = SummaryWriter(str(tmp_path / "other"))
        writer.add_scalar("loss", 1.0, 0)
        writer.close()
    board = LocalBoard(tmp_path)
    assert board.get("runs") == (200, [])
    answer = board.get("meta", run="other")
    assert (answer.status, answer.body) == (400, {"error": "`run` expects one of [], got 'other'."})


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "no events"])
def test_a_damaged_file_costs_what_is_damaged(tmp_path: Path, damage: str) -> None:
    run = make_run()
    run.write(tmp_path / "one")
    run.write(tmp_path / "sound")
    [path] = (tmp_path / "one").iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[: len(data) * 2 // 3],
            "corrupt": data[: len(data) // 2] + b"\xff" * 64 + data[len(data) // 2 + 64 :],
            "no events": b"not an event file",
        }[damage]
    )
    board = LocalBoard(tmp_path)
    runs = board.get("runs").body
    assert runs == (["sound"] if damage == "no events" else ["one", "sound"])
    for name in runs:
        frames = all_frames(board, name, "q_rms")
        count = len(frames["steps"])
        assert count == 7 if name == "sound" else 1 <= count < 7
        np.testing.assert_array_equal(decode(frames), run.tables["q_rms"][:count])


def test_hostile_names_come_back_as_they_are(tmp_path: Path) -> None:
    tags = [name for name in HOSTILE if "/" not in name]
    run = make_run(layers=HOSTILE, heads=3, scalars={tag: [1.0] * 7 for tag in tags})
    run.events[20] = [make_event(20, HOSTILE[3], 0)]  # type: ignore[index] # a dict, to be read only elsewhere
    folder = "<b>'run' & \N{SNOWMAN} [1]"
    run.write(tmp_path / folder)
    board = LocalBoard(tmp_path)
    assert board.get("runs").body == [folder]
    meta = board.get("meta", run=folder).body
    assert meta["layers"] == list(HOSTILE)
    assert set(tags) <= set(meta["scalars"])
    for tag in tags:
        assert board.get("scalar", run=folder, tag=tag).body["values"] == [1.0] * 7
    assert board.get("events", run=folder).body[0]["layer"] == HOSTILE[3]
    refused = board.get("meta", run="<script>alert(1)</script>")
    assert refused.status == 400  # as JSON that no browser renders
    assert "<script>" in refused.body["error"]


def test_what_was_read_is_kept_as_long_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(events=EVENTS).write(tmp_path / "one")
    board = LocalBoard(tmp_path)
    assert_serves(board)
    provider = board.data_provider
    read: list[str] = []

    def counting(*args: Any, **options: Any) -> Any:
        read.extend(options["run_tag_filter"].tags)
        return original(*args, **options)

    original = provider.read_tensors
    monkeypatch.setattr(provider, "read_tensors", counting)
    assert_serves(board)
    assert read == []
    monkeypatch.setattr("attn_monitor.tensorboard_plugin.store._CACHE_BYTES", 1)
    make_run(steps=(70, 80)).write(tmp_path / "one")
    board.reload()
    assert board.get("meta", run="one").body["steps"] == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    assert len(all_frames(board, "one", "q_rms")["steps"]) == 9
    assert {"attn_monitor/saturation_ratio", "attn_monitor/q_rms"} <= set(read)


def test_json_of_a_damaged_event_record_is_left_out(tmp_path: Path) -> None:
    run = make_run(events={10: [make_event(10, "layers.0.attn", 0, value=float("inf"))]})
    run.write(tmp_path / "one")
    [event] = LocalBoard(tmp_path).get("events", run="one").body
    assert event["value"] is None
    json.dumps(event, allow_nan=False)

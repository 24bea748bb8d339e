"""What the Attention tab has to serve of a run."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.board import LocalBoard, Server
from tests.event_data import make_event, make_run

EVENTS = {20: [make_event(20, "layers.1.attn", 3)], 40: [make_event(40, "layers.1.attn", 3, state="critical")]}


def decode(frames: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(frames["data"]), "<f4").reshape(frames["shape"])


def all_frames(board: LocalBoard | Server, run: str, statistic: str) -> dict[str, Any]:
    answer = board.get("frames", run=run, statistic=statistic, first=0, count=1000)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.body
    return body


def assert_serves(board: LocalBoard | Server) -> None:
    """Compare every route with the run that `make_run(events=EVENTS)` wrote into the folder "one"."""
    run = make_run(events=EVENTS)
    meta = board.get("meta", run="one").body
    assert meta["steps"] == list(run.steps)
    assert meta["layers"] == list(run.layers)
    assert (meta["heads"], meta["head_dims"]) == ([5, 5, 3], [64, 64, 64])
    assert (meta["scalars"], meta["events"]) == (["train_loss"], 2)
    assert {row["name"] for row in meta["statistics"]} == set(run.tables)
    assert meta["statistics"][0]["threshold"] == 0.5
    for name, table in run.tables.items():
        frames = all_frames(board, "one", name)
        assert frames["steps"] == list(run.steps)
        np.testing.assert_array_equal(decode(frames), table)
    piece = board.get("frames", run="one", statistic="q_rms", first=2, count=3).body
    assert piece["steps"] == [20, 30, 40]
    np.testing.assert_array_equal(decode(piece), run.tables["q_rms"][2:5])
    lines = board.get("line", run="one", layer=1, head=3).body["statistics"]
    assert set(lines) == set(run.tables)
    assert lines["alignment"] == {"steps": list(run.steps), "values": run.tables["alignment"][:, 1, 3].tolist()}
    some = board.get("line", run="one", layer=2, head=0, statistic=["q_rms", "k_rms"]).body["statistics"]
    assert set(some) == {"q_rms", "k_rms"}
    assert board.get("events", run="one").body == [EVENTS[20][0], EVENTS[40][0]]
    loss = board.get("scalar", run="one", tag="train_loss").body
    assert loss["steps"] == list(run.steps)
    np.testing.assert_allclose(loss["values"], run.scalars["train_loss"], rtol=1e-6)

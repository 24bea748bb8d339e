from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attn_monitor import views
from attn_monitor.catalog import ALL
from attn_monitor.scales import SCALES

NAN, INF = math.nan, math.inf


def strings(*texts: str) -> NDArray[Any]:
    return np.array([text.encode() for text in texts], dtype=object)


def head(value: float, shape: tuple[int, int] = (1, 1)) -> NDArray[np.float32]:
    return np.full(shape, value, np.float32)


def decode(frames: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(frames["data"]), "<f4").reshape(frames["shape"])


def stored() -> dict[str, list[tuple[int, NDArray[Any]]]]:
    """Return what a model writes that has a layer of 2 heads first and one of 3 from step 7 on."""
    return {
        "attn_monitor/layers": [(3, strings("a")), (7, strings("a", "b<"))],
        "attn_monitor/head_dim": [(3, np.array([64.0])), (7, np.array([64.0, NAN]))],
        "attn_monitor/saturation_ratio": [
            (3, np.array([[0.1, 0.2]])),
            (7, np.array([[0.3, INF, NAN], [0.5, 0.6, 0.7]])),
            (9, np.array([[0.4, 0.8, NAN], [0.9, 1.0, NAN]])),
        ],
        "attn_monitor/grad_logits_norm": [(7, np.array([[1.0, 2.0, NAN], [3.0, 4.0, 5.0]]))],
        "attn_monitor/event_records": [(7, strings('{"step": 7, "layer": "b<", "head": 2, "value": NaN}', "{broken"))],
    }


def assembled() -> views.RunData:
    loss = views.series([(3, 2.0), (7, NAN), (9, 1.0)])
    return views.assemble("run/0", stored(), {"train_loss": loss}, threshold=0.5)


def test_a_growing_model_is_padded_with_nan() -> None:
    run = assembled()
    assert (run.name, run.layers, run.head_dims, run.threshold) == ("run/0", ["a", "b<"], [64, None], 0.5)
    steps, values = run.tables["saturation_ratio"]
    assert (steps.tolist(), values.shape) == ([3, 7, 9], (3, 2, 3))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values[0], np.array([[0.1, 0.2, NAN], [NAN] * 3], np.float32))
    np.testing.assert_array_equal(values[1], np.array([[0.3, INF, NAN], [0.5, 0.6, 0.7]], np.float32))


def test_meta_is_json_that_names_everything_there_is() -> None:
    meta: dict[str, Any] = json.loads(json.dumps(views.run_meta(assembled()), allow_nan=False))
    ratio, gradient = meta.pop("statistics")
    assert meta == {
        "name": "run/0",
        "layers": ["a", "b<"],
        "heads": [2, 3],
        "head_dims": [64, None],
        "steps": [3, 7, 9],
        "scalars": ["train_loss"],
        "events": 1,
        "notes": [],
    }
    assert ratio["name"] == "saturation_ratio"
    assert (ratio["worse"], ratio["threshold"]) == ("up", 0.5)
    assert ratio["scale"] == {"kind": "log", "low": 0.01, "high": 10.0}
    assert gradient["name"] == "grad_logits_norm"
    assert (gradient["label"], gradient["threshold"]) == ("grad logits norm", None)
    assert gradient["definition"].startswith("norm of dL/dlogits")


def test_frames_are_exact_and_keep_inf() -> None:
    frames: dict[str, Any] = views.frames(assembled(), "saturation_ratio", slice(1, 9))
    assert (frames["steps"], frames["shape"]) == ([7, 9], [2, 2, 3])
    np.testing.assert_array_equal(decode(frames), assembled().tables["saturation_ratio"].values[1:])


def test_frames_of_a_statistic_that_skips_steps_are_aligned_with_the_run() -> None:
    frames: dict[str, Any] = views.frames(assembled(), "grad_logits_norm", slice(None))
    assert frames["steps"] == [3, 7, 9]
    values = decode(frames)
    assert np.isnan(values[[0, 2]]).all()
    np.testing.assert_array_equal(values[1], [[1, 2, NAN], [3, 4, 5]])


def test_the_line_of_a_head_has_null_where_there_is_no_number() -> None:
    run = assembled()
    line: dict[str, Any] = json.loads(json.dumps(views.line(run, 0, 1), allow_nan=False))
    assert line["statistics"] == {
        "saturation_ratio": {"steps": [3, 7, 9], "values": [float(np.float32(0.2)), None, float(np.float32(0.8))]},
        "grad_logits_norm": {"steps": [7], "values": [2.0]},
    }
    only: dict[str, Any] = views.line(run, 1, 2, ["grad_logits_norm"])
    assert only == {"statistics": {"grad_logits_norm": {"steps": [7], "values": [5.0]}}}


@pytest.mark.parametrize(("layer", "which"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_head_that_does_not_exist_is_an_error(layer: int, which: int) -> None:
    with pytest.raises(IndexError, match=f"{layer if not 0 <= layer < 2 else which} of"):
        views.line(assembled(), layer, which)


def test_an_unknown_statistic_or_scalar_is_an_error() -> None:
    with pytest.raises(KeyError):
        views.frames(assembled(), "entropy", slice(0, 1))
    with pytest.raises(KeyError):
        views.scalar(assembled(), "val_loss")


def test_scalars_and_events_are_json() -> None:
    run = assembled()
    assert views.scalar(run, "train_loss") == {"steps": [3, 7, 9], "values": [2.0, None, 1.0]}
    assert views.events(run) == [{"step": 7, "layer": "b<", "head": 2, "value": None}]  # the broken one is left out


def test_a_step_written_twice_keeps_the_last_and_going_back_drops_what_was_later() -> None:
    points = [(1, "a"), (2, "b"), (2, "c"), (5, "d"), (8, "e"), (5, "f"), (6, "g")]
    assert views.settle(points) == [(1, "a"), (2, "c"), (5, "f"), (6, "g")]
    table = views.table([(0, head(1)), (4, head(2)), (8, head(3)), (4, head(5)), (6, head(6))])
    assert table.steps.tolist() == [0, 4, 6]
    assert table.values.ravel().tolist() == [1, 5, 6]


def test_stages_are_runs_of_their_own() -> None:
    tensors = {"attn_monitor/q_rms": [(0, head(1))], "val_attn_monitor/q_rms": [(0, head(2))]}
    assert views.stages([*tensors, "test_attn_monitor/layers", "attn_monitor/layers"]) == ["", "val_"]
    names = []
    for prefix in views.stages(tensors):
        run = views.assemble("x", tensors, {}, prefix=prefix)
        names.append((run.name, run.tables["q_rms"].values.item()))
    assert names == [("x", 1.0), ("x (validation)", 2.0)]


def test_a_second_monitor_is_a_run_of_its_own() -> None:
    order = ["", "test_", "monitor2_", "monitor2_val_", "monitor10_"]
    tensors = {f"{prefix}attn_monitor/q_rms": [(0, head(index))] for index, prefix in enumerate(order)}
    assert views.stages(reversed(tensors)) == order
    names = [views.assemble("x", tensors, {}, prefix=prefix).name for prefix in order]
    assert names == ["x", "x (test)", "x (monitor 2)", "x (monitor 2, validation)", "x (monitor 10)"]
    assert views.assemble("x", tensors, {}, prefix="monitor2_").tables["q_rms"].values.item() == 2
    tags = ["monitor2_attn_entropy/a", "monitor2_val_attn/entropy_min", "monitor2_loss", "monitor_attn_x/a"]
    assert [tag for tag in tags if views.is_users(tag)] == ["monitor2_loss", "monitor_attn_x/a"]


def test_events_of_one_step_have_the_worst_head_first() -> None:
    written = [
        {"step": 7, "layer": "a", "head": number, "state": "opened", "ratio": ratio, "threshold": 0.5}
        for number, ratio in enumerate([0.6, None, 0.9])
    ]
    tensors = {"attn_monitor/event_records": [(7, strings(*map(json.dumps, written)))]}
    assert [event["head"] for event in views.assemble("x", tensors, {}).events] == [1, 2, 0]


def test_names_that_were_lost_are_numbered_and_no_data_is_no_step() -> None:
    run = views.assemble("x", {"attn_monitor/q_rms": [(0, head(1, (3, 2)))]}, {})
    assert run.layers == ["layer 0", "layer 1", "layer 2"]
    assert run.head_dims == [None] * 3
    empty = views.assemble("y", {}, {})
    meta = views.run_meta(empty)
    assert (meta["layers"], meta["steps"], meta["statistics"], meta["heads"]) == ([], [], [], [])


def test_what_is_no_table_is_no_statistic() -> None:
    tags = ["attn_monitor/layers", "attn_monitor/head_dim", "attn_monitor/event_records", "attn_monitor/", "q_rms"]
    assert [views.statistic_of(tag) for tag in [*tags, "attn_monitor/events/text_summary"]] == [None] * 6
    assert views.statistic_of("test_attn_monitor/q_rms", "test_") == "q_rms"
    assert views.table([(0, np.zeros(3)), (1, head(7))]).steps.tolist() == [1]  # a vector is no table


@pytest.mark.parametrize(
    ("content", "threshold"),
    [(b'{"threshold": 0.5}', 0.5), ("{}", None), (b"", None), (b"[1]", None), ('{"threshold": "x"}', None)],
)
def test_the_limit_comes_from_the_content_of_the_tag(content: bytes | str, threshold: float | None) -> None:
    assert views.threshold_of(content) == threshold


def test_scalars_of_ours_are_not_the_users() -> None:
    ours = ["val_attn_entropy/a", "attn/entropy_min", "test_attn/saturated_heads", "attn_monitor/saturation_ratio_max"]
    assert [tag for tag in ["train_loss", *ours, "lr/attn_x", "attn/lr"] if views.is_users(tag)] == [
        "train_loss",
        "lr/attn_x",
        "attn/lr",
    ]


def test_every_statistic_is_described() -> None:
    names = [*ALL, *SCALES, "entropy_standard_error"]
    run = views.assemble("x", {f"attn_monitor/{name}": [(0, head(1))] for name in names}, {})
    meta: dict[str, Any] = views.run_meta(run)
    assert all(row["definition"] for row in meta["statistics"])
    names = [row["name"] for row in meta["statistics"]]
    assert (names[0], names[-1]) == ("saturation_ratio", "entropy_standard_error")


def test_views_need_neither_torch_nor_lightning() -> None:
    code = "import attn_monitor.views, sys; print(*{name.split('.')[0] for name in sys.modules})"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert not {"torch", "pytorch_lightning", "lightning", "torchmetrics", "tensorboard"} & set(done.stdout.split())

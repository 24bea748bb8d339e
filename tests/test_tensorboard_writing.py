"""How tables, pictures, histograms and texts reach the event file."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.util import tensor_util
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor
from attn_monitor.dashboards.pictures import draw
from attn_monitor.dashboards.summaries import bucketed
from attn_monitor.dashboards.tables import Rows, Snapshot
from attn_monitor.dashboards.tensorboard import Dashboard
from attn_monitor.events import SaturationEvent
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import Changes
from tests.cases.support import Trained, fit, normal, serve
from tests.models import DIM, LIGHTNING_ADVICE, HandWritten, make_record, read_events

pytestmark = LIGHTNING_ADVICE
RULE = SaturationRule()
NAN, INF = math.nan, math.inf


def test_rows_of_a_run_that_goes_on_stay_where_they_are(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = HandWritten(), HandWritten()
            self.steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.early(self.late(x) if self.steps > 1 else x)

    monitor = AttentionMonitor()
    model = Trained(Net())
    for resumed in (monitor, AttentionMonitor()):
        resumed.load_state_dict(monitor.state_dict())
        fit(model, resumed, serve(normal(3, 5, DIM)), logger=TensorBoardLogger(tmp_path, name="", version=""))
    names = [[name.decode() for name in row.tolist()] for _, row in arrays(tmp_path, "attn_monitor/layers")]
    assert names == [["net.early"], ["net.early", "net.late"], ["net.early", "net.late"]]


def event(step: int, head: int) -> SaturationEvent:
    return SaturationEvent(
        step=step,
        layer="net.a b",
        head=head,
        statistic="logit_row_std",
        value=9.0,
        head_dim=64,
        ratio=9 / 8,
        threshold=0.5,
        severity="critical",
    )


def write(dashboard: Dashboard, writers: list[Any], shot: Snapshot, changes: Changes | None = None) -> list[str]:
    pictures = {name: draw(name, shot, RULE.default_limit) for name in dashboard.names if name in shot.tables}
    return dashboard.prepare(shot, changes or Changes(), pictures=pictures) + dashboard.send(writers)


def arrays(folder: Path, tag: str) -> list[tuple[int, Any]]:
    """Return the tensors of a tag with their steps."""
    return [(one.step, tensor_util.make_ndarray(one.tensor_proto)) for one in read_events(folder).Tensors(tag)]


def test_pictures_tensors_and_texts_come_back_from_the_event_file(tmp_path: Path) -> None:
    writer, rows = SummaryWriter(str(tmp_path)), Rows()
    dashboard = Dashboard({"entropy_normalized"}, SaturationRule(threshold=0.4))
    record = {"net.a b": make_record(2, entropy_normalized=[0.0, 0.5], logit_row_std=[4.0, 8.0])}
    shots = [rows.take(3, record, RULE)]
    assert write(dashboard, [writer], shots[0], Changes(opened=[event(3, 0), event(3, 1)])) == []
    late = {"first": make_record(1, head_dim=None, entropy_normalized=[1.0], critical_ratio=[0.25]), **record}
    shots.append(rows.take(7, late, RULE))
    assert write(dashboard, [writer], shots[1], Changes(ended=[event(3, 1)])) == []
    writer.close()

    events = read_events(tmp_path)
    tags = events.Tags()
    assert set(tags["images"]) == {"attn_heads/entropy_normalized", "attn_heads/saturation_ratio"}
    for picture, shot in zip(events.Images("attn_heads/entropy_normalized"), shots, strict=True):
        drawn = draw("entropy_normalized", shot, 0.5).rgb()
        np.testing.assert_array_equal(
            np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("RGB")), drawn
        )
        assert (picture.step, picture.height, picture.width) == (shot.step, *drawn.shape[:2])

    (first, table), (second, wider) = arrays(tmp_path, "attn_monitor/logit_row_std")
    assert (first, second, wider.dtype) == (3, 7, np.float32)
    np.testing.assert_array_equal(table, [[4, 8]])
    np.testing.assert_array_equal(wider, [[4, 8], [NAN, NAN]])
    np.testing.assert_array_equal(arrays(tmp_path, "attn_monitor/saturation_ratio")[1][1], [[0.5, 1], [0.25, NAN]])
    metadata = events.SummaryMetadata("attn_monitor/logit_row_std")
    assert (metadata.plugin_data.plugin_name, metadata.data_class) == ("attn_monitor", 2)
    assert "root of the mean over rows" in metadata.summary_description
    contents = {tag: json.loads(text) for tag, text in events.PluginTagToContent("attn_monitor").items()}
    assert contents["attn_monitor/logit_row_std"] == {"version": 1, "kind": "heads", "statistic": "logit_row_std"}
    assert contents["attn_monitor/saturation_ratio"]["threshold"] == 0.4
    assert {tag: content["kind"] for tag, content in contents.items() if content["kind"] != "heads"} == {
        "attn_monitor/layers": "layers",
        "attn_monitor/head_dim": "head_dim",
        "attn_monitor/event_records": "events",
    }
    names = [(step, names.tolist()) for step, names in arrays(tmp_path, "attn_monitor/layers")]
    assert names == [(3, [b"net.a b"]), (7, [b"net.a b", b"first"])]
    (_, dims), (_, more) = arrays(tmp_path, "attn_monitor/head_dim")
    np.testing.assert_array_equal(dims, [64])
    np.testing.assert_array_equal(more, [64, NAN])
    records = [
        (step, [json.loads(entry)["state"] for entry in entries])
        for step, entries in arrays(tmp_path, "attn_monitor/event_records")
    ]
    assert records == [(3, ["opened", "opened"]), (7, ["ended"])]

    texts = events.Tensors("attn_monitor/events/text_summary")
    assert [text.step for text in texts] == [3, 7]  # one a step: TensorBoard keeps no more
    page = texts[0].tensor_proto.string_val[0].decode()
    assert str(event(3, 0)) in page
    assert str(event(3, 1)) in page


def test_names_of_every_kind_come_back(tmp_path: Path) -> None:
    names = ["a/b", "x.y", "m[0]", 'q"q', "<script>", "ünïcode", "\ud800", "a\nb"]
    writer = SummaryWriter(str(tmp_path))
    record = {name: make_record(1, entropy=[1.0], logit_row_std=[9.0]) for name in names}
    opened = [replace(event(0, 0), layer=name) for name in names]
    assert write(Dashboard({"entropy"}, RULE), [writer], Rows().take(0, record, RULE), Changes(opened=opened)) == []
    writer.close()
    ((_, stored),) = arrays(tmp_path, "attn_monitor/layers")
    readable = [name if name != "\ud800" else "?" for name in names]  # no UTF-8 has a lone surrogate
    assert [name.decode() for name in stored.tolist()] == readable
    ((_, records),) = arrays(tmp_path, "attn_monitor/event_records")
    assert [json.loads(entry)["layer"] for entry in records.tolist()] == names


def test_a_kind_that_cannot_be_made_is_given_up_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop(*args: Any, **kwargs: Any) -> None:
        raise TypeError("No loop matching the specified signature")

    monkeypatch.setattr("attn_monitor.dashboards.summaries.bucketed", no_loop)
    writer, dashboard = SummaryWriter(str(tmp_path)), Dashboard({"entropy_normalized"}, RULE)
    shot = Rows().take(0, {"a": make_record(entropy_normalized=[0.1, 0.2])}, RULE)
    assert write(dashboard, [writer], shot) == ["histograms (TypeError: No loop matching the specified signature)"]
    assert write(dashboard, [writer], replace(shot, step=1)) == []
    writer.close()
    events = read_events(tmp_path)
    assert events.Tags()["histograms"] == []
    assert len(events.Images("attn_heads/entropy_normalized")) == 2
    assert len(events.Tensors("attn_monitor/entropy_normalized")) == 2


def test_a_writer_that_fails_is_given_up_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sound = SummaryWriter(str(tmp_path / "broken")), SummaryWriter(str(tmp_path / "sound"))

    def disk_full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, "_get_file_writer", disk_full)
    dashboard = Dashboard({"entropy_normalized"}, RULE)
    shot = Rows().take(0, {"a": make_record(entropy_normalized=[0.1, 0.2])}, RULE)
    assert write(dashboard, [broken, sound], shot) == ["but scalars (OSError: [Errno 28] No space left on device)"]
    assert write(dashboard, [broken, sound], replace(shot, step=1)) == []
    sound.close()
    assert len(read_events(tmp_path / "sound").Images("attn_heads/entropy_normalized")) == 2


def test_only_tensorboard_writers_are_written_to() -> None:
    class CsvLike:
        def add_scalar(self) -> None: ...

    shot = Rows().take(0, {"a": make_record()}, RULE)
    assert write(Dashboard({"entropy"}, RULE), [CsvLike(), None], shot, Changes(opened=[event(0, 0)])) == []


def test_a_foreign_writer_gets_pictures_histograms_and_texts_but_no_tensors() -> None:
    calls: list[tuple[Any, ...]] = []

    class Foreign:
        def add_image(self, tag: str, image: Any, step: int, dataformats: str) -> None:
            calls.append((tag, image.ndim, step, dataformats))

        def add_text(self, tag: str, text: str, step: int) -> None:
            calls.append((tag, str(event(4, 1)) in text, step))

        def add_histogram_raw(self, tag: str, **fields: Any) -> None:
            calls.append((tag, fields["num"], fields["global_step"]))

    shot = Rows().take(4, {"net.a b": make_record(entropy_normalized=[0.1, 0.2], logit_row_std=[1.0, NAN])}, RULE)
    dashboard = Dashboard({"entropy_normalized"}, RULE, prefix="val_")
    assert write(dashboard, [Foreign()], shot, Changes(opened=[event(4, 1)])) == []
    assert calls == [
        ("val_attn_monitor/events", True, 4),
        ("val_attn_heads/entropy_normalized", 3, 4, "HWC"),
        ("val_attn_heads/saturation_ratio", 3, 4, "HWC"),
        ("val_attn_heads_histogram/entropy_normalized", 2, 4),
        ("val_attn_heads_histogram/saturation_ratio", 1, 4),
    ]


# -- histograms --------------------------------------------------------------------------------------------------------


def test_buckets_hold_every_finite_value() -> None:
    values = np.array([[0.0, 3.0, NAN], [1.5, INF, 0.05]], dtype=np.float32)
    found = bucketed(values)
    assert found is not None
    assert (found["min"], found["max"], found["num"]) == (0.0, 3.0, 4.0)
    assert found["sum"] == pytest.approx(4.55)
    assert found["sum_squares"] == pytest.approx(9 + 2.25 + 0.0025)
    np.testing.assert_allclose(found["bucket_limit"], np.linspace(0.1, 3.0, 30), rtol=1e-6)
    assert {index: count for index, count in enumerate(found["bucket"]) if count} == {0: 2.0, 15: 1.0, 29: 1.0}


@pytest.mark.parametrize("values", [[], [NAN], [NAN, INF, -INF]])
def test_nothing_finite_gives_no_histogram(values: list[float]) -> None:
    assert bucketed(np.array(values)) is None


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0, 2.0], [1e-320, 0.0], [-1e30, 1e30], [1.0, 1.0 + 1e-7]])
def test_extreme_values_have_buckets(values: list[float]) -> None:
    found = bucketed(np.array(values))
    assert found is not None
    assert sum(found["bucket"]) == len(values)
    assert len(found["bucket"]) == len(found["bucket_limit"])

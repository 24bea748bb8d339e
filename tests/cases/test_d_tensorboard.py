"""D: TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor, SaturationRule
from attn_monitor.catalog import HEADLINE, STATISTICS
from attn_monitor.dashboards.layout import CONFIG_TAG
from attn_monitor.dashboards.pictures import draw
from attn_monitor.dashboards.tables import Rows
from tests.cases.support import SelfAttention, Thermostat, Trained, fit, normal, serve, tb_tags
from tests.models import LIGHTNING_ADVICE, make_record, read_events

pytestmark = LIGHTNING_ADVICE


class Deep(nn.Module):
    def __init__(self, layers: int, heads: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SelfAttention(dim, heads) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("heads", [1, 32])
def test_d01_the_number_of_tags_grows_with_layers_and_not_with_heads(tmp_path: Path, heads: int) -> None:
    layers = 48
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor()
    fit(Trained(Deep(layers, heads, 64)), monitor, serve(normal(1, 3, 64)), logger=logger)
    tags = read_events(logger.log_dir).Tags()
    ours = [tag for tag in tags["scalars"] if tag.startswith("attn_") and not tag.startswith("attn_monitor/")]
    per_layer = sum(1 if STATISTICS[name].worse is None else 2 for name in HEADLINE)
    ours = [tag for tag in ours if not tag.startswith("attn/")]
    assert len(ours) == layers * per_layer
    assert len([tag for tag in tags["scalars"] if tag.startswith(("attn_monitor/", "attn/"))]) <= 10
    assert len(tags["images"]) == len(tags["histograms"]) == len(HEADLINE) + 1
    assert len(tags["tensors"]) < 30
    legend = read_events(logger.log_dir).Tensors("attn_monitor/legend/text_summary")[0].tensor_proto.string_val[0]
    assert f"{layers * per_layer + 3} curves are logged for {layers} layers" in legend.decode()
    table = read_events(logger.log_dir).Tensors("attn_monitor/logit_std")[0]
    assert tensor_util.make_ndarray(table.tensor_proto).shape == (layers, heads)

    few = TensorBoardLogger(tmp_path, name="few")
    fit(
        Trained(Deep(layers, heads, 64)),
        AttentionMonitor(statistics=["logit_std"]),
        serve(normal(1, 3, 64)),
        logger=few,
    )
    assert len([tag for tag in tb_tags(few.log_dir) if tag.startswith("attn_logit")]) == layers * 2


def test_d02_weights_that_are_nan_do_not_end_the_run_at_the_worst_moment(tmp_path: Path) -> None:
    net = Deep(2, 3, 12)
    with torch.no_grad():
        net.get_parameter("layers.1.qkv.weight")[:12] = math.nan
    logger, monitor = TensorBoardLogger(tmp_path), AttentionMonitor()
    trainer, said = fit(Trained(net, lr=0.0), monitor, serve(normal(1, 5, 12)), logger=logger)
    assert trainer.global_step == 1
    events = read_events(logger.log_dir)
    assert len(events.Scalars("attn_logit_std/net.layers.0")) == 1
    assert [math.isnan(point.value) for point in events.Scalars("attn_logit_std/net.layers.1")] == [True]
    broken = tensor_util.make_ndarray(events.Tensors("attn_monitor/nonfinite")[0].tensor_proto)
    assert broken.tolist() == [[0] * 3, [25] * 3]
    assert events.Histograms("attn_heads_histogram/logit_std")[0].histogram_value.num == 3  # the sound layer alone
    assert [(event.layer, event.statistic, event.severity) for event in monitor.events] == [
        ("net.layers.1", "nonfinite", "critical")
    ] * 3
    (message,) = said
    assert "has 25 unmasked logits that are nan or inf" in message


def test_d02_a_model_of_nan_alone_has_no_histogram_and_still_a_picture(tmp_path: Path) -> None:
    net = Deep(2, 3, 12)
    with torch.no_grad():
        for layer in range(2):
            net.get_parameter(f"layers.{layer}.qkv.weight").fill_(math.nan)
    logger, monitor = TensorBoardLogger(tmp_path), AttentionMonitor()
    trainer, said = fit(Trained(net, lr=0.0), monitor, serve(normal(2, 5, 12)), logger=logger)
    assert (
        trainer.global_step,
        len([text for text in said if "are critical, their logits are nan or inf" in text]),
    ) == (2, 1)
    events = read_events(logger.log_dir)
    assert events.Tags()["histograms"] == []
    assert [point.value for point in events.Scalars("attn_monitor/saturated_heads")] == [6, 6]
    assert len(events.Images("attn_heads/saturation_ratio")) == 2
    (record,) = events.Tensors("attn_monitor/event_records")
    assert len(record.tensor_proto.string_val) == 6


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        ("attn_monitor.dashboards.pictures.encode_png", "images"),
        ("attn_monitor.publishing.draw", "images"),
        ("attn_monitor.dashboards.summaries.bucketed", "histograms"),
        ("attn_monitor.dashboards.tensorboard.legend_page", "texts"),
        ("attn_monitor.dashboards.tensorboard.event_records", "tensors"),
        ("attn_monitor.dashboards.tensorboard.overview", "overview"),
        ("torch.utils.tensorboard.SummaryWriter._get_file_writer", "but scalars"),
    ],
)
def test_d03_a_rich_write_that_fails_leaves_the_scalars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, lost: str
) -> None:
    original: Any = SummaryWriter._get_file_writer

    def no_loop(*args: Any, **kwargs: Any) -> Any:
        if lost == "but scalars" and not sys._getframe(1).f_code.co_filename.endswith("dashboards/tensorboard.py"):
            return original(*args)  # what Lightning's logger and torch's own methods write
        raise TypeError("No loop matching the specified signature and casting was found")

    net = Thermostat()
    net.std = 50.0  # for there to be a text
    logger, monitor = TensorBoardLogger(tmp_path), AttentionMonitor()
    with monkeypatch.context() as patched:
        patched.setattr(broken, no_loop)
        trainer, said = fit(Trained(net, lr=0.0), monitor, serve(torch.zeros(3, 1)), logger=logger)
    assert trainer.global_step == 3
    (note,) = [text for text in said if "critical" not in text]
    assert f"TensorBoard gets no more {lost} (TypeError: No loop matching" in note
    events = read_events(logger.log_dir)
    assert [point.step for point in events.Scalars("attn_logit_std/net")] == [0, 1, 2]
    there = {
        "images": events.Tags()["images"],
        "histograms": events.Tags()["histograms"],
        "texts": [tag for tag in events.Tags()["tensors"] if tag.endswith("text_summary")],
        "tensors": [tag for tag in events.Tags()["tensors"] if not tag.endswith("text_summary")],
        "overview": [tag for tag in events.Tags()["scalars"] if tag.startswith("attn/")],
    }
    missing = {kind for kind, tags in there.items() if not tags}
    assert missing == (set(there) if lost == "but scalars" else {lost})


BLOCKED = """
import sys, warnings
for name in ("tensorboard", "torch.utils.tensorboard", "pkg_resources"):
    sys.modules[name] = None
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from attn_monitor import AttentionMonitor

torch.manual_seed(0)

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    def training_step(self, batch, batch_idx):
        return self.attn(batch, batch, batch)[0].square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

logger = CSVLogger({folder!r})
trainer = pl.Trainer(
    callbacks=[AttentionMonitor()], logger=logger, accelerator="cpu", max_epochs=1, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(2, 5, 8) * 0.1))
print([str(warning.message) for warning in caught if "AttentionMonitor" in str(warning.message)])
print("attn_logit_std/attn" in open(logger.log_dir + "/metrics.csv").readline())
"""


@pytest.mark.slow
def test_d04_nothing_needs_tensorboard(tmp_path: Path) -> None:
    script = BLOCKED.format(folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "True"]


def test_d05_a_bfloat16_model_gives_plain_numbers(tmp_path: Path) -> None:
    values: list[object] = []

    class Strict(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            values.extend(value for key, value in metrics.items() if "attn_" in key)
            super().log_metrics(metrics, step)

    board = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, said = fit(
            Trained(Deep(2, 3, 12)),
            monitor,
            serve(normal(2, 5, 12)),
            logger=[Strict(tmp_path), board],
            precision="bf16-true",
        )
    assert said == []
    assert not [w for w in caught if re.search("dtype|bfloat16|ScalarType", str(w.message), re.IGNORECASE)]
    assert len(values) > 20
    assert {type(value) for value in values} == {float}
    for _, record in monitor.history:
        for stats in record.values():
            assert {value.dtype for value in stats.measured().values()} <= {torch.float32, torch.float64}
    assert len(read_events(board.log_dir).Images("attn_heads/logit_std")) == 2
    assert len(read_events(board.log_dir).Histograms("attn_heads_histogram/logit_std")) == 2


DIES = """
import os
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from attn_monitor import AttentionMonitor
from tests.cases.support import Thermostat, Trained, quiet, serve

class Die(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4:
            os._exit(7)

net = Thermostat()
def script(step):
    net.std = 50.0 if step == 3 else 1.0
board = TensorBoardLogger({folder!r}, name="", version="", flush_secs=10**6, max_queue=10**6)
table = CSVLogger({folder!r}, name="", version="", flush_logs_every_n_steps=10**6)
trainer = quiet(callbacks=[AttentionMonitor(), Die()], logger=[board, table])
trainer.fit(Trained(net, script, lr=0.0), serve(torch.zeros(9, 1)))
"""


@pytest.mark.slow
def test_d06_what_led_to_an_event_survives_a_process_that_dies(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", DIES.format(folder=str(tmp_path))], capture_output=True, check=False)
    assert run.returncode == 7
    events = read_events(tmp_path)
    assert [point.step for point in events.Scalars("attn_logit_std/net")] == [0, 1, 2, 3]
    texts = events.Tensors("attn_monitor/events/text_summary")
    assert [text.step for text in texts] == [3]
    page = texts[0].tensor_proto.string_val[0].decode()
    assert all(f"step 3: head {head} of net" in page for head in (0, 1))
    records = [json.loads(text) for text in events.Tensors("attn_monitor/event_records")[0].tensor_proto.string_val]
    assert [(record["step"], record["head"], record["state"]) for record in records] == [
        (3, 0, "opened"),
        (3, 1, "opened"),
    ]
    lines = (tmp_path / "attn_monitor_events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == records  # once, though two loggers share the folder
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attn_logit_std/net"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]


def test_d06_events_are_in_a_plain_file_at_once(tmp_path: Path) -> None:
    net = Thermostat()
    file = tmp_path / "attn_monitor_events.jsonl"
    seen: list[int] = []

    def script(step: int) -> None:
        seen.append(len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0)
        net.std = 50.0 if step == 1 else 1.0

    logger = CSVLogger(tmp_path, name="", version="")
    fit(Trained(net, script, lr=0.0), AttentionMonitor(), serve(torch.zeros(4, 1)), logger=logger)
    assert seen == [0, 0, 2, 4]
    states = [json.loads(line)["state"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert states == ["opened", "opened", "ended", "ended"]


def test_d06_an_exception_loses_no_point(tmp_path: Path) -> None:
    def script(step: int) -> None:
        if step == 5:
            raise RuntimeError("in the middle")

    logger = TensorBoardLogger(tmp_path, flush_secs=10**6, max_queue=10**6)
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(Trained(Thermostat(), script), AttentionMonitor(), serve(torch.zeros(9, 1)), logger=logger)
    assert [point.step for point in read_events(logger.log_dir).Scalars("attn_logit_std/net")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("layout", [False, True])
def test_d07_a_run_is_one_directory(tmp_path: Path, layout: bool) -> None:
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(custom_scalars=layout)
    fit(Trained(Deep(3, 2, 12)), monitor, serve(normal(3, 5, 12)), logger=logger)
    assert {path.parent for path in tmp_path.rglob("events.out.*")} == {Path(logger.log_dir)}
    assert [path for path in Path(logger.log_dir).iterdir() if path.is_dir()] == []
    events = read_events(logger.log_dir)
    written = events.Tensors(CONFIG_TAG) if CONFIG_TAG in events.Tags()["tensors"] else []
    assert len(written) == layout  # not once per step
    for event in written:
        charts = [
            chart
            for category in layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
            for chart in category.chart
        ]
        assert len(charts) == 5 * 3  # every statistic with a direction, every layer
        tags = set(events.Tags()["scalars"])
        assert all({band.value, band.lower, band.upper} <= tags for chart in charts for band in chart.margin.series)


def test_d08_pictures_are_small_in_range_and_paint_nan(tmp_path: Path) -> None:
    rows = Rows()
    large = {f"layer.{row}": make_record(2048, logit_std=(normal(2048, seed=row) * 80).tolist()) for row in range(12)}
    picture = draw("logit_std", rows.take(0, large, SaturationRule()), 0.5)
    assert max(picture.rgb().shape) <= 1024
    assert picture.rgb().dtype == np.uint8
    for odd in (math.nan, math.inf):
        shot = Rows().take(0, {"a": make_record(4, entropy=[odd] * 4)}, SaturationRule())
        assert draw("entropy", shot, 0.5).rgb().ndim == 3

    logger = TensorBoardLogger(tmp_path)
    net = nn.Sequential(SelfAttention(12, 2), SelfAttention(12, 3))
    monitor = AttentionMonitor()
    fit(Trained(net), monitor, serve(normal(2, 5, 12)), logger=logger)
    stored = read_events(logger.log_dir).Images("attn_heads/entropy_normalized")[0]
    pixels = np.asarray(Image.open(io.BytesIO(stored.encoded_image_string)).convert("RGB"))
    picture = draw("entropy_normalized", Rows().take(0, monitor.history[0][1], SaturationRule()), 0.5)
    np.testing.assert_array_equal(pixels, picture.rgb())
    middle = picture.cell // 2
    cells = pixels[picture.top + middle :: picture.cell, picture.left + middle :: picture.cell][:2, :3].tolist()
    assert cells[0][2] == [255, 255, 255]  # the first layer has no third head
    assert all(cells[layer][head] != [255, 255, 255] for layer in (0, 1) for head in range(2 + layer))

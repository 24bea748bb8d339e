"""D: TensorBoard."""

from __future__ import annotations

import csv
import io
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
from tensorboard.util import tensor_util
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import HEADLINE, STATISTICS
from attn_monitor.colors import heat_image
from tests.cases.support import SelfAttention, Thermostat, Trained, fit, normal, serve, tb_tags
from tests.models import LIGHTNING_ADVICE, read_events

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
    assert len(ours) == layers * per_layer
    assert len([tag for tag in tags["scalars"] if tag.startswith("attn_monitor/")]) == 3
    assert len(tags["images"]) == len(HEADLINE) + 1
    assert len(tags["tensors"]) < 30
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
    assert "attn_logit_std/net.layers.1" not in events.Tags()["scalars"]
    broken = tensor_util.make_ndarray(events.Tensors("attn_monitor/nonfinite")[0].tensor_proto)
    assert broken.tolist() == [[0] * 3, [25] * 3]
    assert [(event.layer, event.statistic, event.severity) for event in monitor.events] == [
        ("net.layers.1", "nonfinite", "critical")
    ] * 3
    (message,) = said
    assert "has 25 allowed logits that are nan or inf" in message


@pytest.mark.parametrize("method", ["add_image", "add_text", "_get_file_writer"])
def test_d03_a_rich_write_that_fails_leaves_the_scalars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(SummaryWriter, method)

    def no_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if method != "_get_file_writer" or sys._getframe(1).f_code.co_filename.endswith("attn_monitor/tensorboard.py"):
            raise TypeError("No loop matching the specified signature and casting was found")
        return original(self, *args, **kwargs)

    net = Thermostat()
    net.std = 50.0  # for there to be a text
    logger, monitor = TensorBoardLogger(tmp_path), AttentionMonitor()
    with monkeypatch.context() as patched:
        patched.setattr(SummaryWriter, method, no_loop)
        trainer, said = fit(Trained(net, lr=0.0), monitor, serve(torch.zeros(3, 1)), logger=logger)
    assert trainer.global_step == 3
    (note,) = [text for text in said if "newly saturated" not in text]
    assert "TensorBoard gets no more" in note
    assert "TypeError: No loop matching" in note
    assert [point.step for point in read_events(logger.log_dir).Scalars("attn_logit_std/net")] == [0, 1, 2]


BLOCKED = """
import sys, warnings
for name in ("tensorboard", "torch.utils.tensorboard", "pkg_resources"):
    sys.modules[name] = None
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from attn_monitor import AttentionMonitor

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
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(2, 5, 8)))
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
    assert [text.step for text in texts] == [3, 3]
    assert "step 3: head 0 of net" in texts[0].tensor_proto.string_val[0].decode()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attn_logit_std/net"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]


def test_d06_an_exception_loses_no_point(tmp_path: Path) -> None:
    def script(step: int) -> None:
        if step == 5:
            raise RuntimeError("in the middle")

    logger = TensorBoardLogger(tmp_path, flush_secs=10**6, max_queue=10**6)
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(Trained(Thermostat(), script), AttentionMonitor(), serve(torch.zeros(9, 1)), logger=logger)
    assert [point.step for point in read_events(logger.log_dir).Scalars("attn_logit_std/net")] == [0, 1, 2, 3, 4]


def test_d07_a_run_is_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(Trained(Deep(3, 2, 12)), AttentionMonitor(), serve(normal(3, 5, 12)), logger=logger)
    assert {path.parent for path in tmp_path.rglob("events.out.*")} == {Path(logger.log_dir)}
    assert [path for path in Path(logger.log_dir).iterdir() if path.is_dir()] == []


def test_d08_pictures_are_small_in_range_and_paint_nan(tmp_path: Path) -> None:
    large = heat_image("logit_std", normal(1500, 2048) * 80)
    assert (large.shape, large.dtype) == ((1024, 1024, 3), torch.uint8)
    assert heat_image("entropy", torch.full((2, 4), math.nan)).unique().tolist() == [128]
    assert heat_image("entropy", torch.full((2, 4), math.inf)).shape == (2, 4, 3)

    logger = TensorBoardLogger(tmp_path)
    net = nn.Sequential(SelfAttention(12, 2), SelfAttention(12, 3))
    fit(Trained(net), AttentionMonitor(), serve(normal(2, 5, 12)), logger=logger)
    picture = read_events(logger.log_dir).Images("attn_heads/entropy_normalized")[0]
    pixels = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)))
    assert pixels.shape == (2, 3, 3)
    assert pixels[0, 2].tolist() == [128, 128, 128]  # the first layer has no third head
    assert all(pixels[layer, head].tolist() != [128] * 3 for layer in (0, 1) for head in range(2 + layer))

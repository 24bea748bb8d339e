"""What loggers other than TensorBoard's get, of the real packages, which write to a folder and reach no network."""

from __future__ import annotations

import csv
import posixpath
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import HEADLINE
from attn_monitor.dashboards.other_loggers import log_scalars, mlflow_name, takes_pictures
from attn_monitor.dashboards.pictures import draw
from attn_monitor.dashboards.tables import Rows
from attn_monitor.scales import RATIO
from attn_monitor.tags import layer_tag
from tests.cases.support import Trained, fit, normal, serve
from tests.models import LIGHTNING_ADVICE, Lit, loader, split_heads

pytestmark = LIGHTNING_ADVICE
STEPS = 3
PICTURES = sorted(f"attn_heads/{name}" for name in (*HEADLINE, RATIO))


class Twice(nn.Module):
    """Two attentions in one module, so that the second is called `net#1`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x))
        x = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
        q, k, v = split_heads(self.qkv(x))
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


def train(logger: Any) -> tuple[AttentionMonitor, dict[str, float]]:
    """Train for three steps; return the monitor and the last values of its tags."""
    monitor = AttentionMonitor()
    trainer, said = fit(Trained(Twice()), monitor, serve(normal(STEPS, 5, 12)), logger=logger)
    assert said == []
    assert [list(record) for _, record in monitor.history] == [["net", "net#1"]] * STEPS
    return monitor, {tag: value.item() for tag, value in trainer.callback_metrics.items() if tag.startswith("attn_")}


def drawn(monitor: AttentionMonitor, name: str) -> list[Any]:
    """Return the pictures of a statistic, step by step."""
    rows = Rows()
    return [draw(name, rows.take(step, record, monitor.saturation), 0.5).rgb() for step, record in monitor.history]


# -- names -------------------------------------------------------------------------------------------------------------

NAMES = ["a", "a#1", "a@1", "a1", "a_1", "a b", "a_b", "ä", "é", "", ".", "..", "...", "#", "a:b", "a\\b", "x" * 300]
NAMES += ["x" * 301, "<script>", "a-123456", "a.b.c", "A"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_one_that_mlflow_takes(name: str) -> None:
    for tag in (f"attn_entropy_normalized_min/{layer_tag(name)}", f"attn_entropy/{name}", f"val_attn_monitor/{name}"):
        found = mlflow_name(tag)
        assert re.fullmatch(r"[a-zA-Z0-9_.\-: /]+", found), found
        assert len(found) <= 250
        assert posixpath.normpath(found) == found
        assert found.count("/") == tag.count("/")


def test_no_two_names_become_one() -> None:
    tags = {f"attn_entropy/{layer_tag(name)}" for name in NAMES} | {f"attn_entropy/{name}" for name in NAMES}
    tags |= {mlflow_name(tag) for tag in tags}
    for one, other in combinations(sorted(tags), 2):
        assert mlflow_name(one) != mlflow_name(other), (one, other)


def test_usual_names_stay() -> None:
    for tag in ("attn_logit_std/model.layers.11.self_attn", "attn_monitor/saturated_heads"):
        assert mlflow_name(tag) == tag


def test_mlflow_gets_no_more_at_once_than_it_takes() -> None:
    calls: list[dict[str, float]] = []

    class MLFlowLogger:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            assert step == 7
            calls.append(metrics)

    tags = {f"attn_entropy/layer.{index}#1": float(index) for index in range(2345)}
    log_scalars(MLFlowLogger(), tags, 7)
    assert [len(call) for call in calls] == [1000, 1000, 345]
    assert {name: value for call in calls for name, value in call.items()} == {
        mlflow_name(tag): value for tag, value in tags.items()
    }


# -- loggers -----------------------------------------------------------------------------------------------------------


def test_csv_has_a_column_for_every_tag(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    _, last = train(logger)
    with open(Path(logger.log_dir) / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["attn_logit_std/net#1"]]
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert {tag for tag in rows[0] if tag.startswith("attn_")} == set(last)
    assert {tag: float(rows[-1][tag]) for tag in last} == pytest.approx(last, rel=1e-6)
    assert not takes_pictures(logger)


def test_a_logger_that_cannot_log_pictures_is_said_once(tmp_path: Path) -> None:
    class WithPictures(CSVLogger):
        seen = 0

        def log_image(self, key: str, images: list[Any], step: int) -> None:
            WithPictures.seen += 1
            if step == 1:
                raise OSError("quota exceeded")

    _, said = fit(Lit("hand"), AttentionMonitor(), loader(STEPS), logger=WithPictures(tmp_path))
    assert said == ["WithPictures gets no more images (OSError: quota exceeded); scalars go on"]
    assert WithPictures.seen == len(PICTURES) + 1


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the packages from the network and from the home folder."""
    settings = {
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow wants to be asked for it
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        **{f"WANDB_{kind}_DIR": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")},
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_mlflow_has_every_value_and_the_pictures(offline: Path) -> None:
    pytest.importorskip("mlflow")
    from pytorch_lightning.loggers import MLFlowLogger

    logger = MLFlowLogger(tracking_uri=f"file:{offline}/runs")
    monitor, last = train(logger)  # under -W error: the logger warns of every name that it has to change
    client: Any = logger.experiment
    kept = {name for name in client.get_run(logger.run_id).data.metrics if name.startswith("attn_")}
    assert kept == {mlflow_name(tag) for tag in last}
    assert len(kept) == len(last)
    for tag, value in last.items():
        history = client.get_metric_history(logger.run_id, mlflow_name(tag))
        assert [point.step for point in history] == list(range(STEPS))
        assert history[-1].value == pytest.approx(value, rel=1e-6)

    (folder,) = offline.rglob("images")
    files = sorted(folder.glob("*.png"))
    assert len(files) == len(PICTURES) * STEPS
    found = sorted(np.asarray(Image.open(file)).tobytes() for file in files if f"~{RATIO}+" in file.name)
    assert found == sorted(picture.tobytes() for picture in drawn(monitor, RATIO))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The anonymous setting:UserWarning")
def test_wandb_has_every_value_and_the_pictures(offline: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from pytorch_lightning.loggers import WandbLogger

    logger = WandbLogger(save_dir=offline, project="attention", offline=True)
    monitor, last = train(logger)
    run: Any = logger.experiment
    summary = {name: run.summary[name] for name in run.summary.keys()}  # noqa: SIM118 # it can't be iterated over
    assert {tag: summary[tag] for tag in last} == pytest.approx(last, rel=1e-6)
    assert {name for name in summary if name.startswith("attn_")} == {*last, *PICTURES}
    assert summary["trainer/global_step"] == STEPS - 1
    folder = Path(run.dir) / "media" / "images" / "attn_heads"
    wandb.finish()
    files = sorted(folder.glob("*.png"))
    assert len(files) == len(PICTURES) * STEPS
    found = sorted(np.asarray(Image.open(file)).tobytes() for file in folder.glob(f"{RATIO}_*.png"))
    assert found == sorted(picture.tobytes() for picture in drawn(monitor, RATIO))

"""The layout of TensorBoard's custom scalars: ours where there is none, and never instead of a user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import HEADLINE
from attn_monitor.dashboards.layout import CONFIG_TAG, bands, categories_written
from attn_monitor.dashboards.scalars import scalars
from attn_monitor.saturation import SaturationRule
from tests.cases.support import fit
from tests.models import LIGHTNING_ADVICE, Lit, loader, make_record, read_events

pytestmark = LIGHTNING_ADVICE
USERS = {"mine": {"both losses": ["Multiline", ["train_loss", "val_loss"]]}}


def layouts(folder: str | Path) -> list[Any]:
    """Return every layout in a run, in the order written."""
    events = read_events(folder)
    if CONFIG_TAG not in events.Tags()["tensors"]:
        return []
    return [layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]) for event in events.Tensors(CONFIG_TAG)]


def train(logger: Any, count: int = 3, **options: Any) -> list[str]:
    """Train two layers; return what the monitor said."""
    _, said = fit(Lit("hand", "sdpa"), AttentionMonitor(**options), loader(count), logger=logger)
    return said


def test_bands_reach_from_the_mean_to_the_worst_head() -> None:
    record = {
        f"net.{name}": make_record(entropy=[1.0, 2.0], logit_max=[1.0, 2.0], sink_mass=[0.1, 0.2]) for name in "ab"
    }
    tags = scalars(record, ["entropy", "logit_max", "sink_mass"], SaturationRule(), 0)
    assert bands(tags) == {
        "attn_logit_max": {
            f"net.{name}": [
                "Margin",
                [f"attn_logit_max/net.{name}", f"attn_logit_max/net.{name}", f"attn_logit_max_max/net.{name}"],
            ]
            for name in "ab"
        },
        "attn_entropy": {
            f"net.{name}": [
                "Margin", [f"attn_entropy/net.{name}", f"attn_entropy_min/net.{name}", f"attn_entropy/net.{name}"]
            ]
            for name in "ab"
        },
    }  # fmt: skip
    prefixed = bands([f"val_{tag}" for tag in tags], "val_")
    assert list(prefixed) == ["val_attn_logit_max", "val_attn_entropy"]
    assert prefixed["val_attn_entropy"]["net.a"][1][1] == "val_attn_entropy_min/net.a"


def test_a_layout_is_opt_in_and_written_once(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    train(logger)
    assert layouts(logger.log_dir) == []
    logger = TensorBoardLogger(tmp_path)
    assert train(logger, custom_scalars=True) == []
    (layout,) = layouts(logger.log_dir)
    assert [category.title for category in layout.category] == [
        f"attn_{name}" for name in ("logit_std", "logit_row_std", "logit_max", "entropy_normalized", "jacobian_trace")
    ]
    tags = read_events(logger.log_dir).Tags()["scalars"]
    for category in layout.category:
        assert [chart.title for chart in category.chart] == ["net.blocks.0", "net.blocks.1"]
        for chart in category.chart:
            (band,) = chart.margin.series
            assert {band.value, band.lower, band.upper} <= set(tags)
            values = {
                edge: read_events(logger.log_dir).Scalars(getattr(band, edge))[0].value
                for edge in ("lower", "value", "upper")
            }
            assert values["lower"] <= values["value"] <= values["upper"]
            assert values["lower"] < values["upper"]


def test_a_layout_of_the_users_stays(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, flush_secs=10**6, max_queue=10**6)
    logger.experiment.add_custom_scalars(USERS)
    (message,) = train(logger, custom_scalars=True)
    assert "TensorBoard gets no more layouts (FileExistsError: the run has a layout with ['mine']" in message
    (layout,) = layouts(logger.log_dir)
    assert [category.title for category in layout.category] == ["mine"]
    assert len(read_events(logger.log_dir).Images("attn_heads/logit_std")) == 3


def test_a_layout_that_comes_later_stays_too(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    train(logger, custom_scalars=True)
    logger.experiment.add_custom_scalars(USERS)
    (message,) = train(logger, custom_scalars=True)
    assert "['mine']" in message
    assert [category.title for category in layouts(logger.log_dir)[-1].category] == ["mine"]


def test_a_second_fit_into_the_same_run_keeps_ours_in_silence(tmp_path: Path) -> None:
    for _ in range(2):
        logger = TensorBoardLogger(tmp_path, name="", version="")
        assert train(logger, custom_scalars=True) == []
        logger.finalize("success")
    assert len(layouts(tmp_path)) == 1


def test_what_is_written_is_read_back_from_every_file_of_the_run(tmp_path: Path) -> None:
    assert categories_written(str(tmp_path)) is None
    for categories in (["one"], ["two", "three"]):
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_custom_scalars({name: {"chart": ["Multiline", ["loss"]]} for name in categories})
    (tmp_path / "events.out.tfevents.0000000000.empty").touch()
    assert set(categories_written(str(tmp_path)) or []) in ({"one"}, {"two", "three"})
    with pytest.raises(FileNotFoundError, match="no such folder on this machine: s3://"):
        categories_written("s3://bucket/run")


def test_only_one_stage_writes_a_layout(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(custom_scalars=True, stages=("train", "validate"))
    _, said = fit(Lit("hand"), monitor, loader(2), loader(2), logger=logger)
    assert said == []
    (layout,) = layouts(logger.log_dir)
    assert len(layout.category) == len(HEADLINE) - 1
    assert all(category.title.startswith("attn_") for category in layout.category)


def test_the_option_is_checked() -> None:
    with pytest.raises(TypeError, match="custom_scalars"):
        AttentionMonitor(custom_scalars="yes")  # type: ignore[arg-type] # what is tested

"""E: torchmetrics."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionProbe
from attn_monitor.functional import softmax_statistics
from attn_monitor.metric import AttentionMetric
from tests.cases.support import SelfAttention, Thermostat, Trained, collect, curve, fit, normal, only, serve, value
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE


class Blocks(nn.Module):
    """Two attentions, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(12, 2), SelfAttention(12, 3)
        self.unused = nn.MultiheadAttention(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_e01_no_metric_becomes_part_of_the_users_module(tmp_path: Path) -> None:
    model = Trained(Blocks())
    parameters, modules = set(model.state_dict()), {name for name, _ in model.named_modules()}
    trainer, _ = fit(model, AttentionMonitor(), serve(normal(2, 5, 12)))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert set(model.state_dict()) == parameters
    assert {name for name, _ in model.named_modules()} == modules
    saved = torch.load(tmp_path / "run.ckpt", weights_only=False)["state_dict"]
    assert set(saved) == parameters


def test_e01_parts_of_several_devices_do_not_mix_in_silence() -> None:
    on_meta = SelfAttention(12, 2).to("meta")
    with AttentionProbe(on_meta) as probe:
        on_meta(torch.empty(2, 5, 12, device="meta"))
    assert dict(probe.compute()) == {}
    assert "meta device hold no numbers" in probe.skipped["SelfAttention"]

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = SelfAttention(12, 2), SelfAttention(12, 2).to("meta")

        def forward(self, x: Tensor) -> Tensor:
            self.there(x.to("meta"))
            return self.here(x)

    model = Split()
    with AttentionProbe(model) as split:
        model(normal(2, 5, 12))
    assert list(split.compute()) == ["here"]
    assert list(split.skipped) == ["there"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a second device is needed")
def test_e01_statistics_of_a_gpu_arrive_on_the_cpu() -> None:
    model = SelfAttention(12, 2)
    x = normal(2, 5, 12)
    here = only(collect(model, lambda: model(x)))
    model.cuda()
    there = only(collect(model, lambda: model(x.cuda())))
    for name in ("logit_std", "entropy", "logit_max"):
        assert getattr(there, name).device.type == "cpu"
        torch.testing.assert_close(value(there, name), value(here, name), rtol=1e-3, atol=1e-4)


def test_e02_a_layer_that_never_ran_has_no_row_and_zero_is_a_value() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*before the ``update``.*")
        monitor = AttentionMonitor()
        trainer, said = fit(Trained(Blocks()), monitor, serve(normal(2, 5, 12)), max_epochs=2)
        assert AttentionMetric().compute() == {}
    assert said == []
    assert [list(record) for _, record in monitor.history] == [["net.first", "net.second"]] * 4
    assert not any("unused" in key for key in trainer.callback_metrics)

    zero = softmax_statistics(torch.zeros(2, 3, 5, 7))
    for name in ("logit_mean", "logit_std", "logit_max", "logit_min"):
        assert value(zero, name).tolist() == [0] * 3
    assert softmax_statistics(torch.full((2, 3, 5, 7), -torch.inf)).logit_mean is None


class Heating(Trained):
    """Has one temperature per epoch, another one in validation, and may break down in validation."""

    def __init__(self, stds: tuple[float, ...], broken: bool = False) -> None:
        super().__init__(Thermostat(), lr=0.0)
        self.stds, self.broken = stds, broken

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        net.std = self.stds[self.current_epoch]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        net.std = 100.0
        super().validation_step(batch, batch_idx)
        if self.broken:
            raise RuntimeError("validation broke down")


def test_e03_every_record_starts_from_nothing() -> None:
    monitor = AttentionMonitor(stages=("train", "validate"))
    two = torch.zeros(2, 1)
    fit(Heating((1.0, 5.0, 2.0)), monitor, serve(two), serve(two), max_epochs=3)
    assert curve(monitor, "net", "logit_std") == pytest.approx([1, 1, 5, 5, 2, 2], rel=1e-5)
    assert [record["net"].calls for _, record in monitor.history] == [1] * 6
    assert float(value(monitor.evaluations["validate"]["net"], "logit_std").max()) == pytest.approx(100, rel=1e-5)
    assert monitor.evaluations["validate"]["net"].calls == 2


def test_e03_a_validation_that_breaks_down_leaves_nothing_for_the_next_run() -> None:
    monitor = AttentionMonitor(stages=("train", "validate"))
    two = torch.zeros(2, 1)
    with pytest.raises(RuntimeError, match="validation broke down"):
        fit(Heating((1.0,), broken=True), monitor, serve(two), serve(two))
    fit(Heating((3.0,)), monitor, serve(two), serve(two))
    assert curve(monitor, "net", "logit_std") == pytest.approx([1, 1, 3, 3], rel=1e-5)
    assert monitor.evaluations["validate"]["net"].calls == 2


class Alternating(Trained):
    """Its logits are all 0, then all 1, and so on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        net.std, net.mean = 0.0, float(batch_idx % 2)
        return super().training_step(batch, batch_idx)


def test_e04_counts_and_means_are_exact_in_a_half_precision_model() -> None:
    model = Alternating(Thermostat(), lr=0.0).to(torch.bfloat16)
    model.net.get_parameter("weight").requires_grad_(True)
    monitor = AttentionMonitor(statistics=["logit_mean", "logit_std"])
    fit(model, monitor, serve(torch.zeros(600, 1)), accumulate_grad_batches=600, precision="bf16-true")
    ((_, record),) = monitor.history
    stats = record["net"]
    assert stats.calls == 600
    assert stats.rows.tolist() == [600 * 5] * 2
    assert value(stats, "logit_mean").tolist() == pytest.approx([0.5] * 2, abs=1e-6)
    assert value(stats, "logit_std").tolist() == pytest.approx([0.5] * 2, abs=1e-6)


def test_e05_loggers_get_plain_numbers_and_no_metric_objects(tmp_path: Path) -> None:
    given: list[object] = []

    class Strict(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            given.extend(value for key, value in metrics.items() if key.startswith("attn_"))
            super().log_metrics(metrics, step)

    logger = Strict(tmp_path)
    trainer, said = fit(Trained(Blocks()), AttentionMonitor(), serve(normal(2, 5, 12)), logger=logger)
    assert said == []
    assert {type(value) for value in given} == {float}
    assert {type(value) for key, value in trainer.callback_metrics.items() if key.startswith("attn_")} == {Tensor}
    logger.save()
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attn_logit_std/net.first"]]
    assert [float(row["attn_logit_std/net.first"]) > 0 for row in rows] == [True, True]


def test_e06_nan_is_counted_flagged_and_kept_out_of_the_finite_statistics() -> None:
    stats = softmax_statistics(torch.tensor([[1.0, float("nan"), 3.0]]))
    assert value(stats, "logit_mean").item() == pytest.approx(2)
    assert value(stats, "logit_std").item() == pytest.approx(1)
    assert stats.nonfinite.tolist() == [1]
    assert stats.entropy is None  # of no row all logits are known

    net = Thermostat()

    def breaks(step: int) -> None:
        net.pattern[1, 2, 3] = float("nan") if step == 1 else 0.0

    monitor = AttentionMonitor()  # by default
    trainer, said = fit(Trained(net, breaks, lr=0.0), monitor, serve(torch.zeros(2, 1)))
    assert [(event.step, event.head, event.statistic, event.severity) for event in monitor.events] == [
        (1, 1, "nonfinite", "critical")
    ]
    assert value(monitor.history[1][1]["net"], "logit_std").isfinite().all()
    assert trainer.callback_metrics["attn_monitor/saturated_heads"] == 1
    assert any("nan or inf" in text for text in said)

"""Arguments of the monitor, both Lightning packages, several fits and several monitors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.util import tensor_util
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from attn_monitor.records import AttentionStatistics
from attn_monitor.reports.runs import find_runs, read_runs
from tests.manual_training import TwoOptimizers
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet, read_events

pytestmark = LIGHTNING_ADVICE
LAYER = "net.blocks.0"


@pytest.mark.parametrize(("size", "kept"), [(0, []), (2, [3, 4]), (256, [0, 1, 2, 3, 4])])
def test_the_history_keeps_the_latest_records(size: int, kept: list[int]) -> None:
    monitor = AttentionMonitor(history_size=size)
    quiet(callbacks=[monitor]).fit(Lit("hand"), loader(5))
    assert [step for step, _ in monitor.history] == kept
    assert all(isinstance(stats, AttentionStatistics) for _, record in monitor.history for stats in record.values())


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_both_lightning_packages_are_served(name: str, tmp_path: Path) -> None:
    package = pytest.importorskip(name)

    class Model(package.LightningModule):  # type: ignore[misc, name-defined] # the package is a parameter
        def __init__(self) -> None:
            super().__init__()
            self.net = Lit("hand").net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = (self.net(batch[0]) ** 2).mean()
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = AttentionMonitor()
    assert isinstance(monitor, package.Callback)
    logger = package.loggers.TensorBoardLogger(tmp_path)
    quiet(package, callbacks=monitor, logger=logger).fit(Model(), loader(3))
    assert [step for step, _ in monitor.history] == [0, 1, 2]
    assert len(read_events(logger.log_dir).Scalars(f"attn_logit_std/{LAYER}")) == 3


def test_three_fits_in_a_row_each_start_afresh() -> None:
    model, monitor = Lit("hand"), AttentionMonitor()
    for _ in range(3):
        monitor.history.clear()
        quiet(callbacks=[monitor]).fit(model, loader(4))
        assert [(step, record[LAYER].calls) for step, record in monitor.history] == [(i, 1) for i in range(4)]


@pytest.mark.filterwarnings("ignore:.*the trainer has 2 AttentionMonitors")
def test_two_monitors_on_one_model_are_independent() -> None:
    model = Lit("hand", "sdpa")
    first, second = AttentionMonitor(modules="net.blocks.0"), AttentionMonitor(modules="net.blocks.1", every_n_steps=2)
    quiet(callbacks=[first, second]).fit(model, loader(4))
    assert [(step, [*record]) for step, record in first.history] == [(i, ["net.blocks.0"]) for i in range(4)]
    assert [(step, [*record]) for step, record in second.history] == [(i, ["net.blocks.1"]) for i in (0, 1, 3)]


def test_two_monitors_write_under_names_of_their_own(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    one = AttentionMonitor(modules="net.blocks.0")
    two = AttentionMonitor(modules="net.blocks.1", statistics=["entropy"])
    trainer = quiet(callbacks=[one, two], logger=logger)
    with pytest.warns(AttentionWarning, match="the tags of this one start with monitor2_"):
        trainer.fit(Lit("hand", "sdpa"), loader(2))
    assert {"attn_monitor/saturated_heads", "monitor2_attn_monitor/saturated_heads"} <= trainer.callback_metrics.keys()
    events = read_events(logger.log_dir)
    for prefix, monitor, name in (("", one, "net.blocks.0"), ("monitor2_", two, "net.blocks.1")):
        [layers] = events.Tensors(f"{prefix}attn_monitor/layers")
        assert [text.decode() for text in layers.tensor_proto.string_val] == [name]
        table = tensor_util.make_ndarray(events.Tensors(f"{prefix}attn_monitor/q_rms")[-1].tensor_proto)
        wanted = monitor.history[-1][1][name].q_rms
        assert wanted is not None
        assert table.tolist() == [wanted.float().tolist()]
    first, second = read_runs(find_runs(tmp_path)).runs
    assert (list(first.layers), list(second.layers)) == (["net.blocks.0"], ["net.blocks.1"])
    assert second.name.endswith(" (monitor 2)")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_steps": 0}, ValueError, r"`every_n_steps` expects a whole number of at least 1, got 0"),
        ({"every_n_steps": True}, TypeError, r"`every_n_steps` expects a whole number, got True"),
        ({"every_n_steps": 2.0}, TypeError, r"got 2.0 of type float"),
        ({"history_size": -1}, ValueError, r"`history_size` expects a whole number of at least 0, got -1"),
        ({"history_size": None}, TypeError, r"`history_size` expects a whole number, got None"),
        ({"max_queries": 0}, ValueError, r"`max_queries` expects a positive integer or None, got 0"),
        ({"statistics": ["logits_std"]}, ValueError, r"Unknown statistics \['logits_std'\]. Choose from"),
        ({"statistics": "logit_std"}, TypeError, r"Write statistics=\['logit_std'\]"),
        ({"statistics": []}, ValueError, r"`statistics` is empty"),
        ({"statistics": ["grad_logits_norm"], "gradients": False}, ValueError, r"which gradients=False does not"),
        ({"gradients": "no"}, TypeError, r"`gradients` expects True or False, got 'no'"),
        ({"per_call": 1}, TypeError, r"`per_call` expects True or False, got 1"),
        ({"modules": 3}, TypeError, r"`modules` expects a module name or glob"),
        ({"modules": []}, ValueError, r"empty list"),
        ({"saturation": 0.5}, TypeError, r"`saturation` expects a SaturationRule, got 0.5"),
        (
            {"on_saturation": "halt"},
            ValueError,
            r"`on_saturation` expects one of \['warn', 'stop', 'raise'\] or a call",
        ),
        ({"on_saturation": None}, TypeError, r"got None"),
        ({"stages": "train"}, TypeError, r"Write stages=\('train',\)"),
        ({"stages": ("fit",)}, ValueError, r"`stages` expects some of .* got 'fit'"),
        ({"stages": ()}, ValueError, r"`stages` is empty"),
    ],
)
def test_bad_arguments_are_refused_at_construction(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AttentionMonitor(**arguments)


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        AttentionMonitor("net")  # type: ignore[call-arg] # the mistake


def test_a_pattern_that_matches_nothing_ends_the_fit_before_it_starts() -> None:
    model = Lit("hand")
    with pytest.raises(ValueError, match=r"matches no module.*net\.blocks\.0"):
        quiet(callbacks=[AttentionMonitor(modules="encoder.*")]).fit(model, loader(2))
    assert model.losses == []


def test_a_choice_of_modules_that_can_be_read_once_holds_for_every_stage() -> None:
    once: Any = (name for name in ["net.*"])
    monitor = AttentionMonitor(modules=once, stages=("train", "validate"))
    quiet(callbacks=[monitor]).fit(Lit("hand"), loader(2), loader(2))
    assert list(monitor.history[0][1]) == list(monitor.evaluations["validate"]) == ["net.blocks.0"]


def test_the_tuner_does_not_reach_the_monitor(tmp_path: Path) -> None:
    from pytorch_lightning.tuner.tuning import Tuner

    class Tunable(Lit):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    model, monitor = Tunable("hand"), AttentionMonitor()
    trainer = quiet(callbacks=[monitor], default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, loader(20), num_training=10, max_lr=1e3)
    assert (monitor.events, len(monitor.history)) == ([], 0)
    trainer.fit(model, loader(2))
    assert [step for step, _ in monitor.history] == [0, 1]


def test_a_single_monitor_needs_no_list() -> None:
    trainer = quiet(callbacks=AttentionMonitor())
    assert sum(isinstance(callback, AttentionMonitor) for callback in trainer.callbacks) == 1


def test_a_lightning_cli_can_configure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    from pytorch_lightning.cli import LightningCLI

    rule = {"class_path": "attn_monitor.SaturationRule", "init_args": {"threshold": 0.4, "patience": 2}}
    arguments = {"every_n_steps": 2, "modules": ["net.*"], "on_saturation": "stop", "saturation": rule}
    callback = {"class_path": "attn_monitor.AttentionMonitor", "init_args": arguments}
    settings = {"accelerator": "cpu", "logger": False, "callbacks": [callback]}
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    cli = LightningCLI(
        TwoOptimizers, run=False, args={"trainer": settings}, save_config_callback=None, seed_everything_default=False
    )
    (monitor,) = [found for found in vars(cli.trainer)["callbacks"] if isinstance(found, AttentionMonitor)]
    assert (monitor.every_n_steps, monitor.modules, monitor.on_saturation) == (2, ["net.*"], "stop")
    assert (monitor.saturation.threshold, monitor.saturation.patience) == (0.4, 2)

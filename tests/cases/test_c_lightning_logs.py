"""C: pitfalls of logging from a Lightning callback."""

from __future__ import annotations

import csv
import warnings
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from tests.cases.lit import Block, data
from tests.cases.support import SelfAttention, Thermostat, Trained, fit, serve, tb_tags, value
from tests.models import LIGHTNING_ADVICE, quiet, read_events

pytestmark = LIGHTNING_ADVICE
LAYER = "net.attn"
PREFIXES = {"train": "", "validate": "val_", "test": "test_", "predict": "predict_"}


def columns(logger: CSVLogger) -> list[dict[str, str]]:
    """Return the rows a CSV logger wrote."""
    logger.save()
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def steps_of(logger: CSVLogger, column: str) -> list[int]:
    return [int(row["step"]) for row in columns(logger) if row.get(column)]


def numbers(logger: CSVLogger, column: str) -> list[float]:
    return [float(row[column]) for row in columns(logger) if row.get(column)]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys that go through Lightning's `log` and `log_dict`, as they come."""
    keys: list[str] = []

    def spy(name: str) -> Any:
        real = getattr(pl.LightningModule, name)

        def noting(self: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
            keys.extend([what] if isinstance(what, str) else what)
            return real(self, what, *args, **kwargs)

        return noting

    for name in ("log", "log_dict"):
        monkeypatch.setattr(pl.LightningModule, name, spy(name))
    return keys


def test_c01_every_entry_point_logs_where_lightning_allows_no_log(tmp_path: Path, logged: list[str]) -> None:
    monitor = AttentionMonitor(stages=("train", "validate", "test", "predict"))
    logger = CSVLogger(tmp_path)
    model = Trained(Block())
    trainer, said = fit(model, monitor, data(4), data(2), logger=logger)
    means = [float(value(record[LAYER], "logit_std").mean()) for _, record in monitor.history]
    during = [float(value(monitor.evaluations["validate"][LAYER], "logit_std").mean())]
    trainer.validate(model, data(3), verbose=False)
    trainer.test(model, data(2), verbose=False)
    trainer.predict(model, data(2))
    quiet(callbacks=[AttentionMonitor()], logger=CSVLogger(tmp_path)).fit(Trained(Block()), data(2))
    assert said == []
    keys = {stage: f"{prefix}attn_logit_std/{LAYER}" for stage, prefix in PREFIXES.items()}
    assert numbers(logger, keys["train"]) == pytest.approx(means, rel=1e-6)
    after = [
        float(value(monitor.evaluations[stage][LAYER], "logit_std").mean()) for stage in PREFIXES if stage != "train"
    ]
    found = [number for stage in PREFIXES if stage != "train" for number in numbers(logger, keys[stage])]
    assert found == pytest.approx([*during, *after], rel=1e-6)
    assert steps_of(logger, keys["train"]) == [0, 1, 2, 3]
    assert len({tuple(row) for row in columns(logger)}) == 1
    # Nothing of ours goes through `log`, so that no hook can forbid it and no key can come with other arguments.
    assert set(logged) == {"train_loss", "val_loss", "test_loss"}


class Adversarial(Trained):
    """Steps two optimizers by hand in every batch."""

    def __init__(self) -> None:
        super().__init__(Block())
        self.automatic_optimization = False
        self.judge = nn.Linear(12, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override] # returns nothing on purpose
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = self.judge(self.net(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.judge)]


def test_c02_two_optimizers_by_hand_do_not_double_the_x(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor()
    trainer, _ = fit(Adversarial(), monitor, data(6), logger=logger, log_every_n_steps=2)
    assert trainer.global_step == 12  # the trap
    assert steps_of(logger, "train_loss") == [1, 3, 5]
    assert steps_of(logger, f"attn_logit_std/{LAYER}") == [0, 1, 3, 5]  # the first step is always observed
    assert [step for step, _ in monitor.history] == [0, 1, 3, 5]


NAMES = ("encoder.layers.0.self_attn", "net.dataloader_idx_0.attn", "a b", "x:y")


class Named(nn.Module):
    """Attentions in modules with the names that break loggers."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, SelfAttention(12, 2))

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = x + self.get_submodule(name)(x)
        return x


def test_c06_layer_names_of_any_kind_make_different_safe_tags(tmp_path: Path) -> None:
    table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(statistics=["logit_std"])
    trainer, said = fit(Trained(Named()), monitor, data(2), logger=[table, board])
    assert said == []
    assert list(monitor.history[0][1]) == [f"net.{name}" for name in NAMES]
    keys = [key for key in trainer.callback_metrics if key.startswith("attn_logit_std/")]
    assert len(keys) == 4
    assert all(key.count("/") == 1 and not set(key) & set(" :") for key in keys)
    assert keys[:2] == [f"attn_logit_std/net.{name}" for name in NAMES[:2]]
    assert set(keys) <= tb_tags(board.log_dir)
    assert set(keys) <= set(columns(table)[0])


@pytest.mark.parametrize("first", ["csv", "tensorboard"])
def test_c07_pictures_go_to_tensorboard_wherever_it_stands(tmp_path: Path, first: str) -> None:
    table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    loggers = [table, board] if first == "csv" else [board, table]
    _, said = fit(Trained(Block()), AttentionMonitor(), data(3), logger=loggers)
    assert said == []
    assert len(read_events(board.log_dir).Images("attn_heads/entropy_normalized")) == 3
    assert len(read_events(board.log_dir).Tensors("attn_monitor/entropy_normalized")) == 3
    assert steps_of(table, f"attn_logit_std/{LAYER}") == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "hints", "steps"),
    [
        ({"logger": False}, 1, 3),
        ({"fast_dev_run": True, "logger": True}, 0, 1),
        ({"fast_dev_run": True, "logger": "tensorboard"}, 0, 1),
        ({"overfit_batches": 1, "logger": False}, 1, 1),
        ({"overfit_batches": 1, "logger": True}, 0, 1),
        ({"limit_train_batches": 0, "logger": False}, 1, 0),
        ({"limit_train_batches": 0, "logger": True}, 0, 0),
    ],
)
def test_c08_without_a_logger_events_work_and_one_hint_is_enough(
    tmp_path: Path, settings: dict[str, Any], hints: int, steps: int
) -> None:
    if settings.get("logger") == "tensorboard":
        settings = {**settings, "logger": TensorBoardLogger(tmp_path)}
    net = Thermostat()
    net.std = 50.0
    monitor = AttentionMonitor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet(callbacks=[monitor], default_root_dir=tmp_path, **settings)
        trainer.fit(Trained(net), serve(torch.zeros(3, 1)), serve(torch.zeros(2, 1)))
    assert sum("logger" in str(warning.message) for warning in caught) == hints  # whoever says it
    assert (trainer.global_step, trainer.state.finished) == (steps, True)
    ratio = 50 * net_ratio(net)
    assert [(event.step, event.head) for event in monitor.events] == ([(0, 0), (0, 1)] if steps else [])
    assert max([event.ratio for event in monitor.events], default=ratio) == pytest.approx(ratio, rel=1e-5)
    assert [step for step, _ in monitor.history] == list(range(steps))
    spreads = [float(value(record["net"], "logit_row_std").max()) for _, record in monitor.history]
    assert spreads == pytest.approx([ratio * net.D**0.5] * steps, rel=1e-5)
    assert (float(trainer.callback_metrics[KEY]) if steps else ratio) == pytest.approx(ratio, rel=1e-5)


KEY = "attn_monitor/saturation_ratio_max"


@pytest.mark.parametrize("order", list(permutations([0, 1])))
def test_c12_early_stopping_finds_the_keys_in_any_order(order: tuple[int, ...]) -> None:
    stopping = EarlyStopping(KEY, patience=0, check_on_train_epoch_end=True, strict=True)
    callbacks: list[Any] = [AttentionMonitor(), stopping]
    net = Thermostat()
    model = Trained(net, lr=0.0)
    trainer, _ = fit(model, [callbacks[i] for i in order], serve(torch.zeros(2, 1)), max_epochs=9, log_every_n_steps=50)
    assert trainer.callback_metrics[KEY] == pytest.approx(net_ratio(net), rel=1e-5)
    assert trainer.current_epoch == 2  # the ratio of the second epoch is no smaller


def net_ratio(net: Thermostat) -> float:
    return float(net.pattern.var(-1, correction=0).mean(-1).max().sqrt() / net.D**0.5)

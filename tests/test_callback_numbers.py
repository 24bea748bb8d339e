"""What the monitor logs, against numbers computed by hand, and at which steps."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.util import tensor_util
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import HEADLINE, STATISTICS
from tests.manual_training import TwoOptimizers
from tests.models import LIGHTNING_ADVICE, Lit, batches, by_hand, loader, quiet, read_events

pytestmark = LIGHTNING_ADVICE
LAYER = "net.blocks.0"


def close(measured: Tensor | None, expected: Tensor) -> bool:
    assert measured is not None
    return torch.allclose(measured.double(), expected.double(), rtol=1e-5, atol=1e-7)


def reference(model: Lit, inputs: list[Tensor], accumulate: int = 1, epochs: int = 1) -> list[dict[str, Tensor]]:
    """Train a copy in a plain loop and return the statistics of each optimizer step, from logits kept in the model."""
    model = copy.deepcopy(model)
    block: Any = model.net.blocks[0]
    optimizer = model.configure_optimizers()
    found = []
    for _ in range(epochs):
        for start in range(0, len(inputs), accumulate):
            group = inputs[start : start + accumulate]
            block.kept = []
            optimizer.zero_grad()
            torch.stack([model.loss([x]) for x in group]).mean().backward()
            logits, gradients = torch.cat(block.kept), torch.cat([kept.grad for kept in block.kept])
            found.append(by_hand(logits, gradients))
            if len(group) < accumulate:  # Lightning divides by `accumulate` all the same: take its step
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= len(group) / accumulate
            optimizer.step()
    return found


def test_every_number_in_the_event_file_equals_the_one_computed_by_hand(tmp_path: Path) -> None:
    model = Lit("hand")
    expected = reference(model, batches(6))
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor()
    quiet(callbacks=[monitor], logger=logger).fit(model, loader(6))

    events = read_events(logger.log_dir)
    worst = {name: {"up": "max", "down": "min"}.get(STATISTICS[name].worse or "") for name in HEADLINE}
    for name in HEADLINE:
        curve = events.Scalars(f"attn_{name}/{LAYER}")
        assert [point.step for point in curve] == list(range(6))
        assert [point.value for point in curve] == pytest.approx(
            [float(row[name].mean()) for row in expected], rel=1e-5
        )
        if worst[name]:
            curve = events.Scalars(f"attn_{name}_{worst[name]}/{LAYER}")
            extreme = [float(getattr(row[name], worst[name] or "")()) for row in expected]
            assert [point.value for point in curve] == pytest.approx(extreme, rel=1e-5)
        tables = events.Tensors(f"attn_monitor/{name}")
        for table, row in zip(tables, expected, strict=True):
            assert close(torch.tensor(tensor_util.make_ndarray(table.tensor_proto)[0]), row[name])
    ratios = [float(row["logit_row_std"].max()) / 6**0.5 for row in expected]
    assert [p.value for p in events.Scalars("attn_monitor/saturation_ratio_max")] == pytest.approx(ratios, rel=1e-5)
    assert {p.value for p in events.Scalars("attn_monitor/observed_layers")} == {1.0}
    assert {p.value for p in events.Scalars("attn_monitor/saturated_heads")} == {0.0}


def test_the_logged_keys_are_those_of_the_docstring(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[AttentionMonitor()], logger=CSVLogger(tmp_path))
    trainer.fit(Lit("hand"), loader(1))
    documented = AttentionMonitor.__doc__ or ""
    kinds = {key.split("/")[0] for key in trainer.callback_metrics if key.startswith("attn_")} - {"attn_monitor"}
    assert kinds == {
        f"attn_{name}{suffix}"
        for name in HEADLINE
        for suffix in ("", {"up": "_max", "down": "_min"}.get(STATISTICS[name].worse or "", ""))
    }
    model_wide = [key for key in trainer.callback_metrics if key.startswith("attn_monitor/")]
    assert len(model_wide) == 3
    assert all(f"`{key}`" in documented for key in model_wide)
    assert all(f"`{name}`" in documented for name in HEADLINE)


@pytest.mark.parametrize(
    ("arguments", "settings", "steps"),
    [
        ({}, {"log_every_n_steps": 1}, [0, 1, 2, 3, 4, 5, 6]),
        ({}, {"log_every_n_steps": 3}, [0, 2, 5]),
        ({}, {"log_every_n_steps": 50}, [0]),
        ({}, {"log_every_n_steps": 0}, [0]),
        ({"every_n_steps": 2}, {"log_every_n_steps": 50}, [0, 1, 3, 5]),
        ({"every_n_steps": 2}, {"log_every_n_steps": 1, "accumulate_grad_batches": 2}, [0, 1, 3]),
    ],
)
def test_the_first_step_is_observed_and_then_every_nth(
    arguments: dict[str, Any], settings: dict[str, Any], steps: list[int]
) -> None:
    monitor = AttentionMonitor(**arguments)
    quiet(callbacks=[monitor], **settings).fit(Lit("hand"), loader(7))
    assert [step for step, _ in monitor.history] == steps


def test_a_step_of_several_micro_batches_is_one_record_of_the_mean_loss() -> None:
    model = Lit("hand")
    expected = reference(model, batches(8), accumulate=3)
    monitor = AttentionMonitor()
    quiet(callbacks=[monitor], accumulate_grad_batches=3).fit(model, loader(8))
    assert [(step, record[LAYER].calls) for step, record in monitor.history] == [(0, 3), (1, 3), (2, 2)]
    for (_, record), row in zip(monitor.history, expected, strict=True):
        for name, value in row.items():
            assert close(getattr(record[LAYER], name), value), name


def test_the_gradient_is_free_of_the_loss_scale() -> None:
    from pytorch_lightning.plugins import MixedPrecision

    plain, scaled = AttentionMonitor(), AttentionMonitor()
    model = Lit("hand", "sdpa")
    twin = copy.deepcopy(model)
    quiet(callbacks=[plain], accumulate_grad_batches=2).fit(model, loader(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    precision.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)  # type: ignore[method-assign] # a precision plugin for this test
    quiet(callbacks=[scaled], accumulate_grad_batches=2, plugins=[precision]).fit(twin, loader(4))
    assert scaler.get_scale() == 4096.0
    for (_, one), (_, other) in zip(plain.history, scaled.history, strict=True):
        for layer, stats in one.items():
            assert stats.grad_logits_norm is not None
            assert close(other[layer].grad_logits_norm, stats.grad_logits_norm)


def csv_steps(logger: CSVLogger, column: str) -> list[int]:
    logger.save()
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[column]]


@pytest.mark.parametrize(("model", "accumulate"), [(TwoOptimizers, 1), (Lit, 1), (Lit, 2)])
def test_the_x_values_are_those_of_self_log(tmp_path: Path, model: type[Lit], accumulate: int) -> None:
    logger = CSVLogger(tmp_path)
    monitor = AttentionMonitor()
    trainer = quiet(
        callbacks=[monitor], logger=logger, log_every_n_steps=2, max_epochs=2, accumulate_grad_batches=accumulate
    )
    trainer.fit(model(), loader(7))
    ours = csv_steps(logger, f"attn_logit_std/{LAYER}")
    assert ours == [step for step, _ in monitor.history]
    assert ours == [0, *csv_steps(logger, "train_loss")]


def test_two_backward_passes_in_one_batch_add_up() -> None:
    model = TwoOptimizers()
    twin = copy.deepcopy(model)
    monitor = AttentionMonitor()
    quiet(callbacks=[monitor]).fit(model, loader(1))
    block: Any = twin.net.blocks[0]
    squares = torch.zeros(2, dtype=torch.float64)
    for optimizer in twin.configure_optimizers():
        block.kept = []
        optimizer.zero_grad()
        twin.loss([batches(1)[0]]).backward()
        optimizer.step()
        squares += by_hand(block.kept[0], block.kept[0].grad)["grad_logits_norm"] ** 2
    assert close(monitor.history[0][1][LAYER].grad_logits_norm, squares.sqrt())


def test_values_reach_every_logger_whatever_their_order(tmp_path: Path) -> None:
    for order in (1, -1):
        table, board = CSVLogger(tmp_path, name=f"csv{order}"), TensorBoardLogger(tmp_path, name=f"tb{order}")
        loggers = [table, board][::order]
        quiet(callbacks=[AttentionMonitor()], logger=loggers).fit(Lit("hand"), loader(3))
        assert csv_steps(table, f"attn_logit_std/{LAYER}") == [0, 1, 2]
        events = read_events(board.log_dir)
        assert len(events.Scalars(f"attn_logit_std/{LAYER}")) == 3
        assert len(events.Images("attn_heads/logit_std")) == 3


def test_callback_metrics_hold_the_latest_record_as_single_numbers() -> None:
    monitor = AttentionMonitor(statistics=["logit_std"])
    trainer = quiet(callbacks=[monitor])
    trainer.fit(Lit("hand"), loader(3))
    metric = trainer.callback_metrics[f"attn_logit_std/{LAYER}"]
    latest = monitor.history[-1][1][LAYER].logit_std
    assert latest is not None
    assert (metric.shape, metric.dtype) == ((), torch.float32)
    assert close(metric, latest.mean())
    assert "train_loss" in trainer.callback_metrics


def test_only_chosen_statistics_and_the_factors_are_recorded() -> None:
    monitor = AttentionMonitor(statistics=["entropy"])
    trainer = quiet(callbacks=[monitor])
    trainer.fit(Lit("hand"), loader(1))
    assert {key.split("/")[0] for key in trainer.callback_metrics if key.startswith("attn_")} == {
        "attn_entropy",
        "attn_entropy_min",
        "attn_monitor",
    }
    record = monitor.history[0][1][LAYER]
    assert record.measured().keys() >= {"entropy", "q_rms", "k_rms", "qk_std", "alignment", "scale_ratio"}
    assert (record.logit_std, record.logit_max, record.grad_logits_norm) == (None, None, None)


def test_without_gradients_none_is_measured() -> None:
    monitor = AttentionMonitor(gradients=False)
    trainer = quiet(callbacks=[monitor])
    trainer.fit(Lit("hand"), loader(1))
    assert monitor.history[0][1][LAYER].grad_logits_norm is None
    assert not any("grad" in key for key in trainer.callback_metrics)


class Skipping(Lit):
    """Returns no loss for the second batch and ends the second epoch early."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx != 1 else None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 1 else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batches_without_a_loss_are_not_counted_and_a_cut_step_is_dropped() -> None:
    model = Skipping("hand")
    twin = copy.deepcopy(model)
    monitor = AttentionMonitor()
    quiet(callbacks=[monitor], accumulate_grad_batches=2, max_epochs=3).fit(model, loader(4))
    # Epoch 1 stops after the first of the two micro-batches of its first step; that step never happens.
    assert [(step, record[LAYER].calls) for step, record in monitor.history][:2] == [(0, 1), (1, 2)]
    assert [record[LAYER].calls for _, record in monitor.history][2:] == [1, 2]
    block: Any = twin.net.blocks[0]
    block.kept = []
    twin.loss([batches(4)[0]]).backward()
    (kept,) = block.kept
    assert close(monitor.history[0][1][LAYER].grad_logits_norm, by_hand(kept, kept.grad)["grad_logits_norm"])

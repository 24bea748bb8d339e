"""Observing validation, test and prediction."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from tests.models import LIGHTNING_ADVICE, Lit, batches, by_hand, loader, quiet, read_events

pytestmark = LIGHTNING_ADVICE
LAYER = "net.blocks.0"


def numbers(model: Lit, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the statistics of one pass over the inputs, without training."""
    block: Any = copy.deepcopy(model).net.blocks[0]
    block.kept = []
    block(torch.cat(inputs))
    return by_hand(block.kept[0])


def test_by_default_only_training_is_observed() -> None:
    monitor = AttentionMonitor()
    trainer = quiet(callbacks=[monitor], num_sanity_val_steps=2, val_check_interval=1)
    trainer.fit(Lit("hand"), loader(3), loader(2))
    assert [record[LAYER].calls for _, record in monitor.history] == [1, 1, 1]
    assert not any(key.startswith("val_attn") for key in trainer.callback_metrics)
    assert monitor.evaluations == {}


def test_validation_has_its_own_record_and_leaves_training_alone(tmp_path: Path) -> None:
    class Frozen(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    model = Frozen("hand")
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(stages=("train", "validate"))
    trainer = quiet(
        callbacks=[monitor],
        logger=logger,
        num_sanity_val_steps=2,
        val_check_interval=1,
        accumulate_grad_batches=2,
    )
    trainer.fit(model, loader(4), loader(3, seed=9))

    training, validation = numbers(model, batches(4)[:2]), numbers(model, batches(3, seed=9))
    first, last = monitor.history[0][1][LAYER], monitor.evaluations["validate"][LAYER]
    assert first.logit_std is not None
    assert last.logit_std is not None
    torch.testing.assert_close(first.logit_std, training["logit_std"], rtol=1e-5, atol=0)
    torch.testing.assert_close(last.logit_std, validation["logit_std"], rtol=1e-5, atol=0)
    assert ([record[LAYER].calls for _, record in monitor.history], last.calls) == ([2, 2], 3)
    assert last.grad_logits_norm is None

    curve = read_events(logger.log_dir).Scalars(f"val_attn_entropy_normalized/{LAYER}")
    assert [point.step for point in curve] == [0, 0, 1, 1]
    assert curve[-1].value == pytest.approx(float(validation["entropy_normalized"].mean()), rel=1e-5)
    metrics = trainer.callback_metrics
    assert metrics["val_attn_monitor/observed_layers"] == 1
    assert not any("grad" in key for key in metrics if key.startswith("val_"))


@pytest.mark.parametrize(("stage", "prefix"), [("validate", "val_"), ("test", "test_"), ("predict", "predict_")])
def test_each_stage_runs_without_a_fit(tmp_path: Path, stage: str, prefix: str) -> None:
    model = Lit("hand")
    hooks = len(model.net.blocks[0]._forward_hooks)
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor(stages=(stage,))
    trainer = quiet(callbacks=[monitor], logger=logger)
    getattr(trainer, stage)(model, loader(3), **({} if stage == "predict" else {"verbose": False}))
    stats = monitor.evaluations[stage][LAYER]
    assert stats.logit_max is not None
    torch.testing.assert_close(stats.logit_max, numbers(model, batches(3))["logit_max"], rtol=1e-5, atol=0)
    assert not stats.logit_max.is_inference()
    logger.save()
    (point,) = read_events(logger.log_dir).Scalars(f"{prefix}attn_logit_max_max/{LAYER}")
    assert (point.step, point.value) == (0, pytest.approx(float(stats.logit_max.max())))
    assert not monitor.history
    assert len(model.net.blocks[0]._forward_hooks) == hooks
    assert "validation_step" not in vars(model)


def test_evaluation_counts_saturated_heads_without_events() -> None:
    monitor = AttentionMonitor(stages=("test",), on_saturation="raise")
    trainer = quiet(callbacks=[monitor])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        trainer.test(Lit("hand", gain=30.0), loader(2), verbose=False)
    assert trainer.callback_metrics["test_attn_monitor/saturated_heads"] == 2
    assert monitor.events == []


def test_a_pattern_that_matches_nothing_is_refused_before_evaluation() -> None:
    with pytest.raises(ValueError, match="matches no module"):
        quiet(callbacks=[AttentionMonitor(stages=("test",), modules="encoder")]).test(Lit("hand"), loader(1))


def test_training_alone_can_be_left_out() -> None:
    monitor = AttentionMonitor(stages=("validate",))
    trainer = quiet(callbacks=[monitor])
    trainer.fit(Lit("hand"), loader(2), loader(2))
    assert not monitor.history
    assert trainer.callback_metrics["val_attn_monitor/observed_layers"] == 1

"""What goes wrong around the monitor must not reach the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionProbe
from tests.models import LIGHTNING_ADVICE, Lit, fit, loader, quiet, read_events

pytestmark = LIGHTNING_ADVICE


def fails(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("broken on purpose")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("attach", "attaching to the model failed, this record is lost: ZeroDivisionError: broken on purpose"),
        ("compute", "computing the statistics failed, this record is lost: ZeroDivisionError: broken on purpose"),
        ("reset", "resetting failed, this record is lost: ZeroDivisionError: broken on purpose"),
    ],
)
def test_an_error_of_ours_is_said_once_and_training_goes_on(
    method: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(AttentionProbe, method, fails)
    stopping = EarlyStopping("attn_monitor/saturated_heads", patience=9, check_on_train_epoch_end=True)
    trainer, said = fit(Lit("hand"), AttentionMonitor(), 4, callbacks=[stopping], logger=CSVLogger(tmp_path))
    assert trainer.global_step == 4
    assert [text for text in said if "no logger" not in text] == [message]
    assert trainer.callback_metrics["attn_monitor/saturated_heads"] == 0


def test_a_statistic_that_raises_leaves_its_layer_in_the_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_monitor.looks.attention_rows", fails)
    monkeypatch.setattr("attn_monitor.looks.softmax_rows", fails)
    trainer, said = fit(Lit("hand", "sdpa"), AttentionMonitor(), 3, logger=[])
    seen = [text for text in said if "not measured" in text]
    assert trainer.global_step == 3
    assert len(seen) == 1
    assert "net.blocks.0, net.blocks.1 (" in seen[0]
    assert "broken on purpose" in seen[0]


def test_a_logger_that_fails_is_said_once_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(self: Any, metrics: dict[str, float], step: int) -> None:
        if any(key.startswith("attn_") for key in metrics):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(CSVLogger, "log_metrics", disk_full)
    tensorboard = TensorBoardLogger(tmp_path)
    trainer, said = fit(Lit("hand"), AttentionMonitor(), 3, logger=[CSVLogger(tmp_path), tensorboard])
    assert said == ["writing to CSVLogger failed: OSError: [Errno 28] No space left on device"]
    assert len(read_events(tensorboard.log_dir).Scalars("attn_logit_std/net.blocks.0")) == 3
    assert trainer.global_step == 3


def test_a_rich_write_that_fails_leaves_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop(*args: Any, **kwargs: Any) -> None:
        raise TypeError("No loop matching the specified signature")

    monkeypatch.setattr("attn_monitor.dashboards.pictures.encode_png", no_loop)
    logger = TensorBoardLogger(tmp_path)
    _, said = fit(Lit("hand"), AttentionMonitor(), 3, logger=logger)
    (message,) = said
    assert "TensorBoard gets no more images (TypeError: No loop matching" in message
    events = read_events(logger.log_dir)
    assert len(events.Scalars("attn_logit_std/net.blocks.0")) == 3
    assert len(events.Tensors("attn_monitor/logit_std")) == 3


@pytest.mark.parametrize(
    ("settings", "hints"),
    [
        ({"logger": False}, 1),
        ({"fast_dev_run": True, "logger": True}, 0),
        ({"fast_dev_run": 3, "logger": True}, 0),
        ({"overfit_batches": 1}, 1),
        ({"limit_train_batches": 0}, 1),
        ({"barebones": True, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None,
          "enable_model_summary": None, "num_sanity_val_steps": None, "log_every_n_steps": None}, 1),
    ],
)  # fmt: skip
def test_missing_loggers_are_mentioned_at_most_once(settings: dict[str, Any], hints: int) -> None:
    monitor = AttentionMonitor()
    trainer, said = fit(Lit("hand"), monitor, 2, **settings)
    assert len(said) == hints
    assert all("no logger" in text for text in said)
    assert bool(monitor.history) == (trainer.global_step > 0)


def test_a_logger_without_an_experiment_is_enough(tmp_path: Path) -> None:
    class Plain(Logger):
        rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012 # one logger in one test

        @property
        def name(self) -> str:
            return "plain"

        @property
        def version(self) -> int:
            return 0

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if step is not None and "attn_logit_std/net.blocks.0" in metrics:
                self.rows.append((step, metrics))

    logger = Plain()
    _, said = fit(Lit("hand"), AttentionMonitor(), 2, logger=logger)
    assert said == []
    assert [step for step, _ in logger.rows] == [0, 1]
    assert all(type(value) is float for _, row in logger.rows for value in row.values())


class NoAttention(Lit):
    def loss(self, batch: Any) -> Tensor:
        return (self.net.head(batch[0]) ** 2).mean()


def test_a_model_without_attention_is_said_once() -> None:
    monitor = AttentionMonitor()
    trainer, said = fit(NoAttention("hand"), monitor, 3)
    (message,) = [text for text in said if "no logger" not in text]
    assert "no attention was seen in NoAttention while training_step ran (modules with attention: none)" in message
    assert "observe_attention" in message
    assert (trainer.global_step, monitor.events) == (3, [])
    assert trainer.callback_metrics["attn_monitor/observed_layers"] == 0


def test_chosen_modules_without_attention_are_said_once_with_the_owners_found() -> None:
    _, said = fit(Lit("hand", "sdpa"), AttentionMonitor(modules=["net.head", nn.Embedding]), 3)
    (message,) = [text for text in said if "no logger" not in text]
    assert "no attention was seen in modules=['net.head', torch.nn.modules.sparse.Embedding]" in message
    assert "(modules with attention: net.blocks.0, net.blocks.1)" in message


def test_a_model_in_bfloat16_gives_plain_numbers(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    monitor = AttentionMonitor()
    quiet(callbacks=[monitor], logger=logger, precision="bf16-true").fit(Lit("hand", "sdpa", "mha"), loader(2))
    for _, record in monitor.history:
        for stats in record.values():
            assert all(value.dtype in (torch.float32, torch.float64) for value in stats.measured().values())
    assert len(read_events(logger.log_dir).Scalars("attn_logit_std/net.blocks.1")) == 2


def test_without_tensorboard_the_monitor_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("tensorboard", "torch.utils.tensorboard", "pkg_resources"):
        monkeypatch.setitem(sys.modules, name, None)
    _, said = fit(Lit("hand"), AttentionMonitor(), 2, logger=CSVLogger(tmp_path))
    assert said == []

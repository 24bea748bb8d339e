"""The callback for transformers' Trainer: the numbers of Lightning's, through the Trainer's own reporting."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import wandb
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from attn_monitor import AttentionMonitor, AttentionSaturationError, QKClip
from attn_monitor.events import AttentionWarning
from attn_monitor.integrations.transformers import STATE_FILE, AttentionMonitorCallback
from tests.language_models import LAYERS, language_model
from tests.models import LIGHTNING_ADVICE, quiet, read_events

pytestmark = LIGHTNING_ADVICE

BATCH, LENGTH, STEPS = 3, 11, 4
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
"""Its name in old versions of transformers is the second."""


class Text(IterableDataset[dict[str, Tensor]]):
    """The same random tokens in the same order for everybody."""

    def __init__(self, batches: int, rank: int = 0) -> None:
        generator = torch.Generator().manual_seed(17 + rank)
        self.tokens = torch.randint(29, (batches * BATCH, LENGTH), generator=generator)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for row in self.tokens:
            # Nothing predicts the first token. Old Trainers count it where they divide the loss, unless it is left out.
            yield {"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])}


def train(
    folder: Path, monitor: Any, model: nn.Module | None = None, *, steps: int = STEPS, lr: float = 0.5, **settings: Any
) -> tuple[Trainer, list[str]]:
    """Train with transformers' Trainer and return it with what the monitor said."""
    model = language_model() if model is None else model
    accumulated = settings.get("gradient_accumulation_steps", 1)
    resume = settings.pop("resume", None)
    callbacks = [monitor] if not isinstance(monitor, list) else monitor
    defaults: dict[str, Any] = {
        "report_to": ["tensorboard"],
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        use_cpu=True,
        **{**defaults, **settings},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Text(steps * accumulated),
            callbacks=callbacks,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer, [str(one.message) for one in caught if issubclass(one.category, AttentionWarning)]


class Lit(pl.LightningModule):
    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model: Any = model
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def run_of(folder: Path) -> Path:
    [events] = folder.rglob("events.out.tfevents.*")
    return events.parent


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = read_events(run_of(folder))
    return {
        tag.replace("/model.model.", "/model."): [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
        if tag.startswith("attn_")
    }


@pytest.mark.parametrize("accumulated", [1, 2])
def test_both_callbacks_log_the_same_numbers(tmp_path: Path, accumulated: int) -> None:
    ours = AttentionMonitorCallback()
    train(tmp_path / "hf", ours, gradient_accumulation_steps=accumulated)
    lightning = AttentionMonitor()
    trainer = quiet(
        callbacks=[lightning],
        logger=TensorBoardLogger(tmp_path / "pl"),
        accumulate_grad_batches=accumulated,
        default_root_dir=str(tmp_path),
    )
    loader = torch.utils.data.DataLoader(Text(STEPS * accumulated), batch_size=BATCH)
    trainer.fit(Lit(language_model(), lr=0.5), loader)
    found, expected = curves(tmp_path / "hf"), curves(tmp_path / "pl")
    assert list(found) == list(expected)
    assert len(found) == 11 * len(LAYERS) + 3
    for tag, points in expected.items():
        # Lightning counts the steps before, the Trainer those done.
        assert [step for step, _ in found[tag]] == [step + 1 for step, _ in points] == list(range(1, STEPS + 1))
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag
    for (step, record), (other, wanted) in zip(ours.history, lightning.history, strict=True):
        assert (step, list(record)) == (other + 1, LAYERS)
        for layer in LAYERS:
            gradient, like = record[layer].grad_logits_norm, wanted[f"model.{layer}"].grad_logits_norm
            torch.testing.assert_close(gradient, like, rtol=1e-6, atol=0.0)
    assert ours.metrics.keys() == {key.replace("/model.model.", "/model.") for key in lightning_keys(trainer)}


def lightning_keys(trainer: Any) -> list[str]:
    return [key for key in trainer.callback_metrics if key.startswith("attn_")]


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    watched, plain = language_model(), language_model()
    train(tmp_path / "a", AttentionMonitorCallback(), watched)
    train(tmp_path / "b", [], plain)
    for parameter, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())


def test_the_cadence_is_that_of_the_logs_unless_chosen(tmp_path: Path) -> None:
    logged, chosen, never = (AttentionMonitorCallback(**given) for given in ({}, {"every_n_steps": 2}, {}))
    train(tmp_path / "a", logged, logging_steps=3, steps=7)
    train(tmp_path / "b", chosen, logging_steps=3, steps=7)
    train(tmp_path / "c", never, logging_strategy="no", steps=5)
    assert [step for step, _ in logged.history] == [1, 3, 6]
    assert [step for step, _ in chosen.history] == [1, 2, 4, 6]
    assert [step for step, _ in never.history] == [1]  # the first is always observed


def test_a_collapsing_model_is_told_of_and_stopped(tmp_path: Path) -> None:
    monitor = AttentionMonitorCallback(on_saturation="stop", save_checkpoint=True)
    trainer, said = train(tmp_path, monitor, language_model(gain=4e4), lr=0.0)
    assert trainer.state.global_step == 1
    assert monitor.events
    assert any("training stops" in text for text in said)
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    texts = read_events(run_of(tmp_path)).Tags()["tensors"]
    assert any(tag.startswith("attn_monitor/") for tag in texts)
    assert (run_of(tmp_path) / "attn_monitor_events.jsonl").read_text()


def test_raise_and_a_function_of_the_users(tmp_path: Path) -> None:
    hot = language_model(gain=4e4)
    with pytest.raises(AttentionSaturationError):
        train(tmp_path / "a", AttentionMonitorCallback(on_saturation="raise"), hot, lr=0.0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hot.modules())
    called: list[Any] = []
    monitor = AttentionMonitorCallback(
        on_saturation=lambda trainer, model, events: called.append((trainer, model, events))
    )
    trainer, _ = train(tmp_path / "b", monitor, language_model(gain=4e4), lr=0.0)
    assert called[0][0] is trainer
    assert called[0][1] is trainer.model
    assert called[0][2][0] in monitor.events


class Failing(TrainerCallback):
    """Ends the training between the two ends of the second step."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        raise OSError("the user's own")


def test_after_an_exception_the_next_training_starts_clean(tmp_path: Path) -> None:
    model, monitor = language_model(), AttentionMonitorCallback()
    with pytest.raises(OSError, match="the user's own"):
        train(tmp_path / "a", [monitor, Failing()], model)
    monitor.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(OSError, match="the user's own"):
        train(tmp_path / "b", [monitor, Failing()], model)
    train(tmp_path / "c", monitor, model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [step for step, _ in monitor.history] == [1, 2, 3, 4]


def test_a_resumed_training_raises_the_events_of_an_unbroken_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_steps": 2, "flight_recorder": 5}
    whole = AttentionMonitorCallback(**options)
    train(tmp_path / "whole", whole, language_model(gain=3e3), steps=8, lr=2.0)
    assert whole.events
    first = AttentionMonitorCallback(**options)
    train(tmp_path / "parts", first, language_model(gain=3e3), steps=4, lr=2.0, save_strategy="steps", save_steps=4)
    path = tmp_path / "parts" / "checkpoint-4"
    assert (path / STATE_FILE).exists()
    second = AttentionMonitorCallback(**options)
    train(tmp_path / "parts", second, language_model(gain=3e3), steps=8, lr=2.0, resume=str(path))
    assert [str(event) for event in second.events] == [str(event) for event in whole.events]
    (path / STATE_FILE).write_bytes(b"nonsense")
    third = AttentionMonitorCallback(**options)
    _, said = train(tmp_path / "parts", third, language_model(gain=3e3), steps=8, lr=2.0, resume=str(path))
    assert any("state in the checkpoint is ignored" in text for text in said)


def test_bfloat16_checkpointing_and_compiling_are_watched(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {"bf16": True},
        "checkpointing": {CHECKPOINTING: True},
        "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    }
    for name, settings in kinds.items():
        monitor = AttentionMonitorCallback()
        _, said = train(tmp_path / name, monitor, steps=2, **settings)
        assert said == []
        plain = AttentionMonitorCallback()
        train(tmp_path / f"{name} plain", plain, steps=2)
        for (_, record), (_, wanted) in zip(monitor.history, plain.history, strict=True):
            assert list(record) == LAYERS
            for layer in LAYERS:
                for statistic in ("logit_std", "entropy_normalized", "grad_logits_norm"):
                    value, other = getattr(record[layer], statistic), getattr(wanted[layer], statistic)
                    tolerance = 0.05 if name == "bf16" else 1e-4
                    torch.testing.assert_close(value, other, rtol=tolerance, atol=1e-6)


def test_without_reports_events_and_metrics_remain(tmp_path: Path) -> None:
    monitor = AttentionMonitorCallback()
    _, said = train(tmp_path, monitor, report_to="none")
    assert len(said) == 1
    assert "reports to nothing" in said[0]
    assert math.isfinite(float(monitor.metrics[f"attn_logit_std/{LAYERS[0]}"]))


def test_the_state_is_found_where_the_checkpoint_is(tmp_path: Path) -> None:
    first = AttentionMonitorCallback()
    train(tmp_path / "a", first, language_model(gain=4e4), steps=2, lr=0.0, save_strategy="steps", save_steps=2)
    assert first.events
    second = AttentionMonitorCallback()
    path = str(tmp_path / "a" / "checkpoint-2")
    _, said = train(tmp_path / "b", second, language_model(gain=4e4), steps=4, lr=0.0, resume=path)
    assert [str(event) for event in second.events] == [str(event) for event in first.events]
    assert not any("afresh" in text for text in said)


def test_the_state_of_a_search_stands_beside_the_checkpoint_of_its_run(tmp_path: Path) -> None:
    monitor: Any = AttentionMonitorCallback()
    (tmp_path / "run-0" / "checkpoint-3").mkdir(parents=True)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    monitor.on_save(arguments, TrainerState(global_step=3), None)
    assert torch.load(tmp_path / "run-0" / "checkpoint-3" / STATE_FILE, weights_only=True)["events"] == []


class Summary(TrainerCallback):
    """Keeps what the W&B run holds at the end of a step."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert wandb.run is not None
        self.found = dict(wandb.run.summary)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb's own
def test_wandb_gets_the_same_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monitor, summary = AttentionMonitorCallback(), Summary()
    _, said = train(tmp_path, [monitor, summary], report_to=["wandb"])
    wandb.finish()
    assert said == []
    for tag, value in monitor.metrics.items():
        assert summary.found[tag] == pytest.approx(float(value)), tag
    assert any(key.startswith("attn_heads/") for key in summary.found)


def test_clipping_the_weights_works_under_the_trainer(tmp_path: Path) -> None:
    model, monitor = language_model(gain=4e4), AttentionMonitorCallback(mitigation=QKClip())
    train(tmp_path, monitor, model, lr=0.0)
    largest = [float(record[LAYERS[0]].measured()["logit_max"].max()) for _, record in monitor.history]
    assert largest[-1] < largest[0] / 2


def test_bad_options_fail_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="every_n_steps"):
        AttentionMonitorCallback(every_n_steps=0)
    with pytest.raises(TypeError, match="stages"):
        AttentionMonitorCallback(stages=("train",))


def test_outside_of_a_trainer_there_is_an_error_that_says_so() -> None:
    monitor: Any = AttentionMonitorCallback()
    with pytest.raises(RuntimeError, match=r"expects to be called by transformers\.Trainer"):
        monitor.on_train_begin(TrainingArguments("unused", use_cpu=True), None, None, model=nn.Linear(2, 2))

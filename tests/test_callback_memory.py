"""What other callbacks see of the monitor, and what it keeps in checkpoints and pickles."""

from __future__ import annotations

import pickle
import warnings
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn

from attn_monitor import AttentionMonitor, SaturationRule
from attn_monitor.events import AttentionWarning
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet
from tests.scripted import Scripted, fit

pytestmark = LIGHTNING_ADVICE


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("on_train_epoch_end", [True, False])
def test_early_stopping_and_checkpoints_can_watch_the_monitor_from_the_first_epoch(
    tmp_path: Path, order: int, on_train_epoch_end: bool
) -> None:
    key = "attn_monitor/saturated_heads"
    stopping = EarlyStopping(
        key, mode="min", patience=9, stopping_threshold=-1, check_on_train_epoch_end=on_train_epoch_end, strict=True
    )
    checkpoint = ModelCheckpoint(
        tmp_path, monitor=key, save_top_k=3, filename="{epoch}", save_on_train_epoch_end=on_train_epoch_end
    )
    callbacks: list[Callback] = [AttentionMonitor(every_n_steps=2), stopping, checkpoint]
    trainer = quiet(
        callbacks=list([*permutations(callbacks)][5 * order]),
        max_epochs=2,
        enable_checkpointing=True,
        num_sanity_val_steps=2,
    )
    with pytest.warns(AttentionWarning, match="newly saturated"):
        trainer.fit(Scripted([0.3, 0.3, 0.3, 0.6]), loader(2), loader(1))
    assert float(stopping.best_score) == 0.0
    assert sorted(float(score) for score in checkpoint.best_k_models.values()) == [0.0, 1.0]


def test_early_stopping_stops_on_it() -> None:
    stopping = EarlyStopping("attn_monitor/saturated_heads", divergence_threshold=0.5, check_on_train_epoch_end=True)
    trainer = quiet(callbacks=[stopping, AttentionMonitor()], max_epochs=5)
    with pytest.warns(AttentionWarning):
        trainer.fit(Scripted([0.3, 0.6, 0.6, 0.6, 0.6]), loader(1))
    assert trainer.current_epoch == 2


def test_the_memory_of_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    ratios = [0.3, 0.6, 0.6, 0.6]
    path = tmp_path / "half.ckpt"
    first = AttentionMonitor()
    trainer, said = fit(Scripted(ratios), first, 1, max_epochs=2)
    assert len(said) == 1
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)

    second = AttentionMonitor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(callbacks=[second], max_epochs=4).fit(Scripted(ratios), loader(1), ckpt_path=path)
    assert not [w for w in caught if "newly saturated" in str(w.message)]
    assert second.events == first.events
    assert [step for step, _ in second.history] == [0, 1, 2, 3]


def test_states_that_do_not_fit_are_ignored_with_a_warning() -> None:
    monitor = AttentionMonitor()
    monitor.load_state_dict({"version": 99})
    _, said = fit(Lit("hand"), monitor, 1)
    assert said == [
        "the monitor's state in the checkpoint is ignored: expected a saturation state of version 2, got 99"
    ]

    donor = AttentionMonitor()
    fit(Scripted([0.6], layers=2), donor, 1)
    heir = AttentionMonitor()
    heir.load_state_dict(donor.state_dict())
    trainer, said = fit(Lit("hand"), heir, 2)
    assert said == ["the checkpoint remembers layers that this model did not run: ['net.blocks.1']"]
    assert trainer.callback_metrics["attn_monitor/saturated_heads"] == 0


def test_another_model_starts_with_a_clean_memory_but_keeps_the_events() -> None:
    monitor = AttentionMonitor()
    _, first = fit(Scripted([0.6, 0.6]), monitor, 1)
    _, second = fit(Scripted([0.6, 0.6]), monitor, 1)
    assert (len(first), len(second), len(monitor.events)) == (1, 1, 2)


def test_monitors_of_different_settings_have_different_and_stable_keys() -> None:
    def only_decoder(name: str, module: nn.Module) -> bool:
        return name.startswith("decoder")

    settings: list[dict[str, Any]] = [
        {},
        {"modules": "a"},
        {"modules": ["a", nn.MultiheadAttention]},
        {"modules": only_decoder},
        {"modules": lambda name, module: True},
        {"modules": lambda name, module: False},
        {"statistics": ["entropy"]},
        {"every_n_steps": 5},
        {"saturation": SaturationRule(patience=2)},
        {"on_saturation": "stop"},
        {"stages": ("train", "test")},
        {"history_size": 1},
    ]
    keys = [AttentionMonitor(**setting).state_key for setting in settings]
    assert len(set(keys)) == len(keys)
    assert [AttentionMonitor(**setting).state_key for setting in settings] == keys
    assert not any(" at 0x" in key for key in keys)


@pytest.mark.filterwarnings("ignore:.*the trainer has 2 AttentionMonitors")
def test_two_monitors_are_saved_and_resumed_side_by_side(tmp_path: Path) -> None:
    def monitors() -> list[AttentionMonitor]:
        return [AttentionMonitor(modules="net.blocks.0"), AttentionMonitor(modules="net.blocks.1")]

    trainer = quiet(callbacks=monitors())
    with pytest.warns(AttentionWarning):
        trainer.fit(Scripted([0.6] * 2, layers=2), loader(1))
    trainer.save_checkpoint(tmp_path / "both.ckpt")
    resumed = monitors()
    quiet(callbacks=resumed, max_epochs=2).fit(
        Scripted([0.6] * 2, layers=2), loader(1), ckpt_path=tmp_path / "both.ckpt"
    )
    assert [[event.layer for event in monitor.events] for monitor in resumed] == [["net.blocks.0"], ["net.blocks.1"]]


def test_a_pickled_monitor_keeps_its_events_and_nothing_of_the_run() -> None:
    monitor = AttentionMonitor(on_saturation="stop")
    fit(Scripted([0.6]), monitor, 1)
    copied = pickle.loads(pickle.dumps(monitor))
    assert (copied.events, copied.state_key) == (monitor.events, monitor.state_key)
    assert [step for step, _ in copied.history] == [0]
    fit(Scripted([0.3, 0.3]), copied, 2)
    assert len(copied.history) == 3

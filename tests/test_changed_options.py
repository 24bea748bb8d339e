"""A fit that goes on from a checkpoint with other options of the monitor."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_monitor import AttentionMonitor, SaturationRule
from attn_monitor.callback import OPTIONS_CHANGED
from attn_monitor.events import AttentionWarning
from tests.models import LIGHTNING_ADVICE, loader, quiet
from tests.scripted import Scripted

pytestmark = [*LIGHTNING_ADVICE, pytest.mark.filterwarnings("ignore:.*the trainer has 2 AttentionMonitors")]

RATIOS = [0.3, 0.6, 0.6, 0.6]


def left(path: Path, *monitors: AttentionMonitor, layers: int = 1) -> None:
    """Save a checkpoint of two steps, the second of which opens an event."""
    trainer = quiet(callbacks=list(monitors), max_epochs=2)
    with pytest.warns(AttentionWarning, match="newly saturated"):
        trainer.fit(Scripted(RATIOS, layers=layers), loader(1))
    trainer.save_checkpoint(path)


def resume(path: Path, *monitors: AttentionMonitor, layers: int = 1) -> list[str]:
    """Train two steps more, and return what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(callbacks=list(monitors), max_epochs=4).fit(Scripted(RATIOS, layers=layers), loader(1), ckpt_path=path)
    return [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_steps": 1},
        {"saturation": SaturationRule(threshold=0.55)},
        {"history_size": 7, "on_saturation": "stop", "adaptive_steps": 0, "statistics": ["entropy"]},
    ],
    ids=["cadence", "threshold", "several"],
)
def test_what_is_remembered_goes_on_under_other_options(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = AttentionMonitor(), AttentionMonitor(**options)
    left(tmp_path / "half.ckpt", first)
    said = resume(tmp_path / "half.ckpt", second)
    assert second.events == first.events
    assert [step for step, _ in second.history] == [0, 1, 2, 3]
    assert said.count(OPTIONS_CHANGED) == 1
    assert not [text for text in said if "newly saturated" in text]
    assert OPTIONS_CHANGED not in resume(tmp_path / "half.ckpt", AttentionMonitor())


def test_a_shorter_history_keeps_the_latest(tmp_path: Path) -> None:
    left(tmp_path / "half.ckpt", AttentionMonitor())
    second = AttentionMonitor(history_size=3)
    resume(tmp_path / "half.ckpt", second)
    assert [step for step, _ in second.history] == [1, 2, 3]


def test_of_two_monitors_each_goes_on_with_its_own(tmp_path: Path) -> None:
    both = [AttentionMonitor(modules=f"net.blocks.{n}") for n in (0, 1)]
    left(tmp_path / "both.ckpt", *both, layers=2)
    for every in ((None, 1), (1, 1)):  # one has changed, or both
        heirs = [AttentionMonitor(modules=f"net.blocks.{n}", every_n_steps=every[n]) for n in (0, 1)]
        said = resume(tmp_path / "both.ckpt", *heirs, layers=2)
        assert [heir.events for heir in heirs] == [first.events for first in both]
        assert [{event.layer for event in heir.events} for heir in heirs] == [{"net.blocks.0"}, {"net.blocks.1"}]
        assert OPTIONS_CHANGED in said


def test_of_two_monitors_of_the_same_modules_one_may_change(tmp_path: Path) -> None:
    both = [AttentionMonitor(), AttentionMonitor(saturation=SaturationRule(threshold=0.4))]
    left(tmp_path / "both.ckpt", *both)
    heirs = [AttentionMonitor(every_n_steps=1), AttentionMonitor(saturation=SaturationRule(threshold=0.4))]
    said = resume(tmp_path / "both.ckpt", *heirs)
    assert [heir.events for heir in heirs] == [first.events for first in both]
    assert said.count(OPTIONS_CHANGED) == 1


def _two_heirs(path: Path) -> list[AttentionMonitor]:
    left(path, AttentionMonitor())
    return [AttentionMonitor(every_n_steps=1), AttentionMonitor(every_n_steps=1, history_size=5)]


def _two_donors(path: Path) -> list[AttentionMonitor]:
    left(path, AttentionMonitor(), AttentionMonitor(history_size=5))
    return [AttentionMonitor(every_n_steps=1)]


def _other_modules(path: Path) -> list[AttentionMonitor]:
    left(path, AttentionMonitor())
    return [AttentionMonitor(modules="net.*")]


@pytest.mark.parametrize(
    ("before", "held"), [(_two_heirs, "1 monitor"), (_two_donors, "2 monitors"), (_other_modules, "1 monitor")]
)
def test_where_it_is_not_certain_nothing_is_taken_and_told(tmp_path: Path, before: Any, held: str) -> None:
    heirs = before(tmp_path / "half.ckpt")
    said = resume(tmp_path / "half.ckpt", *heirs)
    assert [[step for step, _ in heir.history] for heir in heirs] == [[2, 3]] * len(heirs)
    assert [text for text in said if "the checkpoint" in text and "saturated" not in text] == [
        f"the checkpoint holds the memory of {held} with other options, and it is not certain that it is this one's, "
        "so events and history begin anew; to go on with it, give one monitor the `modules` it had"
    ] * len(heirs)


def test_a_checkpoint_without_a_monitor_is_nothing_to_speak_of(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(Scripted(RATIOS), loader(1))
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    monitor = AttentionMonitor()
    assert not [
        text for text in resume(tmp_path / "bare.ckpt", monitor) if "the checkpoint" in text and "saturated" not in text
    ]
    assert [step for step, _ in monitor.history] == [2, 3]


def test_an_error_in_it_does_not_end_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path / "half.ckpt", AttentionMonitor())
    monitor = AttentionMonitor(every_n_steps=1)
    monkeypatch.setattr(monitor, "_same_modules", 7)
    said = resume(tmp_path / "half.ckpt", monitor)
    assert [text for text in said if text.startswith("on_load_checkpoint failed: TypeError")]
    assert [step for step, _ in monitor.history] == [2, 3]


def test_a_damaged_state_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    left(path, first := AttentionMonitor())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"][first.state_key] = {"version": 99}
    torch.save(checkpoint, path)
    said = resume(path, monitor := AttentionMonitor(every_n_steps=1))
    assert [text for text in said if text.startswith("the monitor's state in the checkpoint is ignored")]
    assert OPTIONS_CHANGED not in said
    assert [step for step, _ in monitor.history] == [2, 3]


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_both_packages_hand_over_a_checkpoint_whose_key_is_another(tmp_path: Path, package: str) -> None:
    pl = importlib.import_module(package)
    asked: list[list[str]] = []

    class Asked(pl.Callback):  # type: ignore[misc, name-defined] # the package is chosen at run time
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            asked.append(list(checkpoint["callbacks"]))

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined] # as above
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0], batch[0], batch[0])[0].square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def trainer(monitor: AttentionMonitor, epochs: int) -> Any:
        return pl.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[monitor, Asked()],
        )

    first, second = AttentionMonitor(every_n_steps=1), AttentionMonitor(every_n_steps=1, history_size=9)
    half = trainer(first, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(3, 5, 6)), batch_size=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        half.fit(Module(), data)
        half.save_checkpoint(tmp_path / "half.ckpt")
        trainer(second, 2).fit(Module(), data, ckpt_path=tmp_path / "half.ckpt")
    assert asked == [[first.state_key]]
    assert [step for step, _ in second.history] == [0, 1]
    assert OPTIONS_CHANGED in [str(warning.message) for warning in caught]

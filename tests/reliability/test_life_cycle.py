"""Whatever Lightning does around a step, the numbers of the step are those of its own logits, computed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks as lightning_callbacks
import torch
from lightning.fabric import Fabric
from pytorch_lightning.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.tuner.tuning import Tuner
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionProbe, AttentionStatistics
from tests.models import LIGHTNING_ADVICE, HandWritten, Lit, Net, batches, by_hand, loader, quiet, read_events
from tests.reliability.standing import left, standing

pytestmark = LIGHTNING_ADVICE
LAYER = "net.blocks.0"


class Truth(Callback):
    """Keeps the logits of each optimizer step with their gradients, and what the loss was multiplied by."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Tensor]] = {}
        self.scales: dict[int, float] = {}
        self.step = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.step = trainer.fit_loop.epoch_loop._batches_that_stepped
        pl_module.net.blocks[0].kept = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales[self.step] = (scaler.get_scale() if scaler else 1.0) / trainer.accumulate_grad_batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        block = pl_module.net.blocks[0]
        self.steps.setdefault(self.step, []).extend(block.kept)
        block.kept = None

    def wanted(self, step: int) -> dict[str, Tensor]:
        """Return the statistics of a step by their definitions."""
        logits = self.steps[step]
        gradients = [each.grad for each in logits if each.grad is not None]
        assert len(gradients) == len(logits)
        return by_hand(torch.cat(logits), torch.cat(gradients).double() / self.scales[step] / len(logits))


def agree(found: AttentionStatistics, wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare a record with numbers computed by hand."""
    measured = found.measured()
    for name, expected in wanted.items():
        torch.testing.assert_close(measured[name].double(), expected, rtol=tolerance, atol=1e-9, msg=f"{name} differs")


def right(monitor: AttentionMonitor, truth: Truth, steps: int, tolerance: float = 1e-5) -> None:
    """Assert that the history has all steps, with the right numbers."""
    assert [step for step, _ in monitor.history] == list(range(steps))
    for step, record in monitor.history:
        assert list(record) == [LAYER]
        agree(record[LAYER], truth.wanted(step), tolerance)


def mixed() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"precision": "32-true"}, 3),
        ({"precision": "bf16-mixed"}, 3),
        ({"precision": "bf16-true"}, 3),
        ({"precision": "64-true"}, 3),
        ({"plugins": mixed}, 3),
        ({"fast_dev_run": 2}, 2),
        ({"overfit_batches": 2, "max_epochs": 2}, 4),
        ({"accumulate_grad_batches": 2}, 2),
        ({"max_epochs": 2, "callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]}, 4),
        ({"gradient_clip_val": 1e-3}, 3),
        ({"max_epochs": 4, "callbacks": lambda: [StochasticWeightAveraging(1e-2, 0.5)]}, 12),
        pytest.param(
            {"max_epochs": 2, "callbacks": lambda: [lightning_callbacks.EMAWeightAveraging(decay=0.9)]},
            6,
            marks=pytest.mark.skipif(
                not hasattr(lightning_callbacks, "EMAWeightAveraging"),
                reason="this Lightning has no EMAWeightAveraging",
            ),
        ),
        ({"max_steps": 2, "max_epochs": -1}, 2),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else str(given),
)
@pytest.mark.filterwarnings("ignore:.*swa_utils:UserWarning", "ignore:Swapping scheduler:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval")
def test_records_are_those_of_the_logits(settings: dict[str, Any], steps: int) -> None:
    monitor, truth = AttentionMonitor(every_n_steps=1), Truth()
    given = {name: value() if callable(value) else value for name, value in settings.items()}
    more = given.pop("callbacks", [])
    model = Lit("hand")
    before = standing(model)
    quiet(callbacks=[monitor, truth, *more], **given).fit(model, loader(3))
    right(monitor, truth, steps)
    behind = left(before, standing(model))
    behind.pop("attributes", None)  # Lightning's own
    assert behind == {}


def test_no_step_leaves_no_record(tmp_path: Path) -> None:
    monitor = AttentionMonitor()
    trainer = quiet(callbacks=[monitor], max_steps=0, logger=CSVLogger(tmp_path))
    trainer.fit(Lit("hand"), loader(3))
    assert (trainer.global_step, list(monitor.history), monitor.events) == (0, [], [])
    assert not any(key.startswith("attn_") for key in trainer.callback_metrics)


def test_a_resumed_run_has_the_numbers_of_its_own_logits(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[AttentionMonitor(every_n_steps=1)])
    model = Lit("hand")
    trainer.fit(model, loader(3))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    monitor, truth = AttentionMonitor(every_n_steps=1), Truth()
    quiet(callbacks=[monitor, truth], max_epochs=2).fit(Lit("hand"), loader(3), ckpt_path=tmp_path / "half.ckpt")
    assert [step for step, _ in monitor.history] == [0, 1, 2, 3, 4, 5]
    for step, record in list(monitor.history)[3:]:  # what is before came with the checkpoint
        agree(record[LAYER], truth.wanted(step))


class Sized(Lit):
    """Has a batch size to be found."""

    def __init__(self) -> None:
        super().__init__("hand")
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader(8).dataset, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(1)


def test_the_search_for_a_batch_size_leaves_no_trace(tmp_path: Path) -> None:
    monitor, truth, model = AttentionMonitor(every_n_steps=1), Truth(), Sized()
    trainer = quiet(callbacks=[monitor, truth], default_root_dir=tmp_path)
    found = Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=2)
    assert found == model.batch_size > 2
    assert (list(monitor.history), monitor.events) == ([], [])
    truth.steps.clear()
    trainer.fit(model)
    right(monitor, truth, 24 // found)  # 24 samples


class Swapping(Lit):
    """Gets another attention, under the same name, when the second epoch starts."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.blocks[0] = HandWritten()


def test_a_module_that_is_swapped_between_epochs_is_found() -> None:
    monitor, truth = AttentionMonitor(every_n_steps=1), Truth()
    quiet(callbacks=[monitor, truth], max_epochs=2).fit(Swapping("hand"), loader(3))
    right(monitor, truth, 6)


class Built(Lit):
    """Makes its network when Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__("hand")
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()


@pytest.mark.parametrize("compiled", [None, "eager", "aot_eager"])
def test_a_network_made_or_compiled_late_has_the_numbers_of_its_probe(compiled: str | None) -> None:
    torch._dynamo.reset()

    class Compiled(Built):
        def configure_model(self) -> None:
            super().configure_model()
            if compiled is not None and not hasattr(self.net, "_orig_mod"):
                self.net = torch.compile(self.net, backend=compiled)

    nets: list[nn.Module] = []

    class Copy(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            nets.append(copy.deepcopy(getattr(pl_module.net, "_orig_mod", pl_module.net)))

    monitor = AttentionMonitor(every_n_steps=1)
    quiet(callbacks=[Copy(), monitor]).fit(Compiled(), loader(2))
    for (_, record), net, batch in zip(monitor.history, nets, batches(2), strict=True):
        with AttentionProbe(net) as probe:
            (net(batch) ** 2).mean().backward()
        wanted = probe.compute()["blocks.0"].measured()
        for name, value in record[LAYER].measured().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7, equal_nan=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_has_the_numbers_of_all_its_batches(stage: str, inference_mode: bool) -> None:
    model = Lit("hand")
    kept: list[Tensor] = []
    attention: Any = model.net.blocks[0]

    def keep(module: Any, args: tuple[Tensor, ...]) -> None:
        q, k, _ = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in module.qkv(args[0]).chunk(3, -1))
        kept.append((q @ k.mT / q.shape[-1] ** 0.5).clone())

    attention.register_forward_pre_hook(keep)
    monitor = AttentionMonitor(stages=(stage,))
    getattr(quiet(callbacks=[monitor], inference_mode=inference_mode), stage)(model, loader(3))
    assert len(kept) == 3
    agree(monitor.evaluations[stage][LAYER], by_hand(torch.cat(kept)))


def test_every_logger_gets_the_same_numbers(tmp_path: Path) -> None:
    boards = [TensorBoardLogger(tmp_path, name=name) for name in ("one", "two")]
    monitor, truth = AttentionMonitor(every_n_steps=1), Truth()
    quiet(callbacks=[monitor, truth], logger=boards).fit(Lit("hand"), loader(3))
    for board in boards:
        for point in read_events(board.log_dir).Scalars(f"attn_entropy_normalized/{LAYER}"):
            wanted = float(truth.wanted(point.step)["entropy_normalized"].mean())
            assert point.value == pytest.approx(wanted, rel=1e-5)


def loop(model: nn.Module, step: Callable[[Tensor], None], probe: AttentionProbe) -> list[Any]:
    """Train by hand; return the record of every batch."""
    found = []
    for batch in batches(3):
        with probe:
            step(batch)
        found.append(probe.compute())
        probe.reset()
    return found


@pytest.mark.parametrize("fabric", [False, True])
def test_a_loop_of_ones_own_measures_what_lightning_does(fabric: bool) -> None:
    lit = Lit("hand")
    net: Any = copy.deepcopy(lit.net)
    monitor = AttentionMonitor(every_n_steps=1)
    quiet(callbacks=[monitor]).fit(lit, loader(3))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run: Any = net
    backward: Any = Tensor.backward
    if fabric:
        engine: Any = Fabric(accelerator="cpu", devices=1)
        run, optimizer = engine.setup(net, optimizer)
        backward = engine.backward

    def step(batch: Tensor) -> None:
        loss = (run(batch) ** 2).mean()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    for record, (_, wanted) in zip(loop(net, step, AttentionProbe(net)), monitor.history, strict=True):
        for name, value in wanted[LAYER].measured().items():
            torch.testing.assert_close(record["blocks.0"].measured()[name], value, rtol=1e-6, atol=1e-8, equal_nan=True)

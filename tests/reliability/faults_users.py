"""Faults of the user's code, and of those who sit at the keyboard."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback

from attn_monitor import AttentionMonitor
from tests.reliability.expectations import FAULTY, alone, goes_on, right, subject, survives, watching
from tests.reliability.registry import Verdict, fault
from tests.reliability.standing import HOOKS, standing
from tests.reliability.sweeps import Sweep
from tests.reliability.trials import STEPS, Subject, attempt, clean, in_steps, records

INTERRUPTS = 60
"""At how many places of our own code an observed step is interrupted."""


def ends_alike(script: Callable[[Subject, int], None], error: str, folder: Path) -> AttentionMonitor:
    """Assert that an error of the user's ends the training as it would without the monitor, and return the monitor."""
    unwatched = attempt(subject(script), [])
    monitor = watching()
    trial = attempt(subject(script), [monitor], default_root_dir=folder)
    assert trial.error == error
    assert trial.same_as(unwatched)
    clean(trial)
    right(monitor, last=FAULTY)
    assert list(folder.rglob("*flight*")), "the flight record was not written"
    goes_on(monitor)
    return monitor


@fault(
    "an exception in `training_step`",
    whose="the user's",
    sees="the own exception; the flight record is written",
    lost="the step that was not finished",
    quick=True,
)
def training_step(folder: Path) -> Verdict:
    def script(model: Subject, step: int) -> None:
        if step == FAULTY:
            raise ValueError("the user's own")

    ends_alike(script, "ValueError: the user's own", folder)
    return Verdict()


@fault(
    "an exception inside of an attention module, and in the backward pass",
    whose="the user's",
    sees="the own exception; the flight record is written",
    lost="the step that was not finished",
)
def inside(folder: Path) -> Verdict:
    def raises(*_: Any) -> None:
        raise ValueError("the user's own")

    def forward(model: Subject, step: int) -> None:
        if step == FAULTY:
            model.net.blocks[1].register_forward_hook(raises)

    def backward(model: Subject, step: int) -> None:
        if step == FAULTY:
            model.net.blocks[1].register_forward_hook(lambda *a: a[2].register_hook(raises) and None)

    for name, script in (("forward", forward), ("backward", backward)):
        unwatched = attempt(subject(script), [])
        monitor = watching()
        model = subject(script)
        trial = attempt(model, [monitor], default_root_dir=folder / name)
        assert trial.error == "ValueError: the user's own"
        assert trial.same_as(unwatched)
        assert trial.left == unwatched.left  # the user's own hook
        assert trial.kept == unwatched.kept
        goes_on(monitor)
    return Verdict(2, 2)


@fault(
    "an exception in the function given as `on_saturation`",
    whose="the user's",
    sees="the own exception",
    lost="nothing; the step was finished",
)
def on_saturation(folder: Path) -> Verdict:
    called: list[int] = []

    def act(trainer: Any, pl_module: Any, events: Any) -> None:
        called.append(len(events))
        raise ValueError("the user's own")

    monitor = watching(on_saturation=act)
    trial = attempt(subject(gain=40.0), [monitor], default_root_dir=folder)
    assert trial.error == "ValueError: the user's own"
    assert called == [len(monitor.events)]
    assert [step for step, _ in monitor.history] == [0]
    clean(trial)
    one_step = attempt(subject(gain=40.0), [], max_steps=1)
    assert all(map(torch.equal, trial.weights, one_step.weights))
    return Verdict()


@fault(
    "Ctrl-C at any line of ours in an observed step",
    whose="the user's",
    sees="Lightning's usual end",
    lost="the step that was not finished; interrupted in a backward pass, its batch may stay in memory until the next",
)
def interrupted(folder: Path) -> Verdict:
    look = Sweep()
    attempt(subject(), in_steps(look, [FAULTY], watching()), default_root_dir=folder)
    points = sorted(random.Random(7).sample(range(1, look.lines + 1), INTERRUPTS))
    for point in points:
        monitor = interrupt(point, folder)
        assert [step for step, _ in monitor.history][:FAULTY] == list(range(FAULTY))
    goes_on(monitor)
    return Verdict(len(points), 1)


def interrupt(point: int, folder: Path) -> AttentionMonitor:
    """Interrupt an observed step after so many lines, and assert that nothing is left."""
    sweep = Sweep(KeyboardInterrupt, at=point)
    monitor = watching()
    model = subject()
    trial = attempt(model, in_steps(sweep, [FAULTY], monitor), default_root_dir=folder)
    assert sweep.raised, f"line {point} was not reached"
    assert trial.error == "SystemExit: 1", f"at {sweep.raised}: {trial.error}"
    assert trial.left == {}, f"at {sweep.raised}"
    assert len(trial.losses) in (FAULTY, FAULTY + 1)
    assert all(map(torch.equal, trial.losses, alone().losses))
    if trial.kept:  # a batch, by no object that Python knows of, until there is another backward pass
        assert trial.kept == 1, f"at {sweep.raised}"
        goes_on(watching())
        assert not any(reference() is not None for reference in model.tensors), f"at {sweep.raised}"
    return monitor


class _Remover(Callback):
    """Removes all hooks of the model."""

    def __init__(self, where: str) -> None:
        self.where = where

    def remove(self, module: Any) -> None:
        for part in module.modules():
            for kind in HOOKS:
                getattr(part, kind).clear()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != FAULTY:
            return
        if self.where == "before":
            self.remove(pl_module)
        else:
            pl_module.net.blocks[1].register_forward_hook(lambda *_: self.remove(pl_module), prepend=True)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.where == "backward" and trainer.global_step == FAULTY:
            self.remove(pl_module)


@fault(
    "another callback removes all hooks of the model, before or in the middle of a forward pass",
    whose="the user's",
    sees="nothing, or a warning that a layer was not seen",
    lost="the layers whose hooks are gone, in that record",
)
def hooks_removed(folder: Path) -> Verdict:
    for where in ("before", "forward"):
        monitor = watching()
        unwatched = attempt(subject(), [_Remover(where)])
        model = subject()
        trial = attempt(model, [monitor, _Remover(where)])
        assert trial.error == ""
        assert trial.same_as(unwatched)
        after = standing(model)
        assert after["function modes"] == after["watchers"] == after["held eager"] == 0
        assert not any(count for count in after["hooks"].values())
        assert trial.kept == 0
        assert len(trial.said) <= 1
        right(monitor, but=[FAULTY])
    return Verdict(2, 2)


@fault(
    "two monitors on one trainer",
    whose="the user's",
    sees="one warning that the tags of the second have a prefix",
)
def two_monitors(folder: Path) -> Verdict:
    first, second = watching(), watching(history_size=STEPS)
    trial = survives(None, first, second)
    assert len(trial.said) == 1
    assert "2 AttentionMonitors" in trial.said[0]
    right(first)
    right(second)
    return Verdict()


@fault(
    "nan or inf in all weights",
    whose="the user's",
    sees="a warning with the first layer and head; the flight record is written",
)
def not_finite(folder: Path) -> Verdict:
    for number, value in enumerate((float("nan"), float("inf"))):

        def spoil(model: Subject, step: int, value: float = value) -> None:
            if step == FAULTY:
                for weight in model.parameters():
                    weight.data.fill_(value)

        unwatched = attempt(subject(spoil), [])
        monitor = watching()
        trial = attempt(subject(spoil), [monitor], default_root_dir=folder / str(number))
        assert trial.error == ""
        assert trial.same_as(unwatched)
        clean(trial)
        assert 1 <= len(trial.said) <= 6, trial.said
        assert any("finite" in text or "nan" in text for text in trial.said)
        for stats in records(monitor)[FAULTY].values():
            assert int(stats.nonfinite.sum()) > 0
        right(monitor, last=FAULTY, but=range(FAULTY, 9))
        goes_on(watching())
    return Verdict(2, 2)


@fault(
    "warnings are errors",
    whose="the user's",
    sees="the warning, as an exception",
    lost="nothing; the step was finished",
)
def strict_warnings(folder: Path) -> Verdict:
    import warnings

    class Strict(Callback):
        def on_train_start(self, *_: Any) -> None:
            warnings.simplefilter("error")

    monitor = watching()
    trial = attempt(subject(gain=40.0), [Strict(), monitor], default_root_dir=folder)
    assert trial.error.startswith("AttentionWarning: ")
    clean(trial)
    return Verdict(1, 0)

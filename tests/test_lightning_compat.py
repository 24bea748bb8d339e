"""The private places of Lightning, compared with what Lightning does."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from pytorch_lightning.callbacks import Callback

from attn_monitor import lightning_compat as compat
from tests.models import LIGHTNING_ADVICE, Lit, loader, quiet

pytestmark = LIGHTNING_ADVICE


class Ask(Callback):
    """Notes the answers after every batch."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.open: list[bool] = []
        self.factors: list[float] = []
        self.waits: list[str] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.factors.append(compat.loss_factor(trainer, pl_module))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(compat.logged_step(trainer))
        self.open.append(compat.accumulating(trainer))
        self.waits.append(compat.stopping_waits(trainer))
        assert compat.callback_metrics(trainer) is trainer.callback_metrics


def test_steps_and_micro_batches() -> None:
    ask = Ask()
    trainer = quiet(callbacks=[ask], accumulate_grad_batches=3, max_epochs=2)
    trainer.fit(Lit("hand"), loader(4))
    assert ask.steps == [0, 0, 0, 1, 2, 2, 2, 3]
    assert ask.open == [True, True, False, False] * 2
    assert ask.factors == pytest.approx([1 / 3] * 8)
    assert trainer.global_step == 4


def test_what_stopping_waits_for() -> None:
    ask = Ask()
    quiet(callbacks=[ask], max_epochs=2, min_epochs=2, min_steps=3).fit(Lit("hand"), loader(2))
    assert ask.waits == ["min_epochs=2 and min_steps=3"] * 4
    ask = Ask()
    quiet(callbacks=[ask]).fit(Lit("hand"), loader(1))
    assert ask.waits == [""]


def test_the_interval_is_the_trainers() -> None:
    assert compat.log_interval(quiet(log_every_n_steps=7)) == 7
    assert compat.log_interval(quiet(log_every_n_steps=0)) == 0


@pytest.mark.parametrize(("precision", "scale"), [("32-true", 1.0), ("bf16-mixed", 1.0)])
def test_without_a_scaler_the_factor_is_that_of_accumulation(precision: str, scale: float) -> None:
    ask = Ask()
    quiet(callbacks=[ask], precision=precision, accumulate_grad_batches=2).fit(Lit("hand"), loader(2))
    assert ask.factors == [scale / 2] * 2


def test_callbacks_of_all_installed_packages_are_found() -> None:
    found = compat.installed_callbacks()
    packages = [importlib.import_module(name) for name in compat.PACKAGES]
    assert found == tuple(package.Callback for package in packages)
    assert all(issubclass(compat.LightningCallback, callback) for callback in found)


def alone(blocked: list[str], code: str) -> subprocess.CompletedProcess[str]:
    block = "; ".join(f"sys.modules[{name!r}] = None" for name in blocked)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; {block}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocked", "kept"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")]
)
def test_one_package_is_enough(blocked: str, kept: str) -> None:
    code = f"import {kept} as pl; from attn_monitor import AttentionMonitor\n"
    done = alone([blocked], code + "print(isinstance(AttentionMonitor(), pl.Callback))")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.slow
def test_without_lightning_the_error_says_what_to_do_and_the_probe_works() -> None:
    code = """
from attn_monitor import AttentionProbe
try:
    from attn_monitor import AttentionMonitor
except ImportError as error:
    print(error)
"""
    done = alone(["lightning", "pytorch_lightning"], code)
    assert "neither `pytorch_lightning` nor `lightning` can be imported. Install one" in done.stdout, done.stderr

"""One small training, watched or alone, and all that a fault could have changed of it."""

from __future__ import annotations

import copy
import gc
import signal
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from attn_monitor import AttentionMonitor, AttentionStatistics
from attn_monitor.events import AttentionWarning
from tests.models import Lit, loader, quiet
from tests.reliability.standing import left, standing

STEPS = 5
"""Optimizer steps of a trial."""
HINTS = ("has no logger", "scale audit")
"""What a small training is told of anyway."""

Script = Callable[["Subject", int], None]


class Subject(Lit):
    """Three attentions of different kinds with dropout; `script` runs in each training step."""

    def __init__(self, script: Script | None = None, gain: float = 1.0) -> None:
        super().__init__("hand", "sdpa", "mha", dropout=0.2, gain=gain)
        self.script = script
        self.tensors: list[weakref.ref[Tensor]] = []
        for block in self.net.blocks:
            block.register_forward_hook(self.note)

    def note(self, module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        """Remember a batch or an activation, without keeping it."""
        self.tensors += [weakref.ref(args[0]), weakref.ref(out)]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        """Run the script, then train."""
        if self.script is not None:
            self.script(self, batch_idx)
        return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Trial:
    """What came of a training.

    Attributes:
        losses: Of every step.
        weights: As they were at the end.
        random: The state of the random numbers at the end.
        error: What ended it, by type and text; empty if nothing did.
        said: What the monitor said, hints left out.
        left: What was left behind on the model or in the process.
        kept: How many tensors of the training were still alive.
        metrics: What `trainer.callback_metrics` held at the end.
    """

    losses: list[Tensor]
    weights: list[Tensor]
    random: Tensor
    error: str = ""
    said: list[str] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)
    kept: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def same_as(self, other: Trial) -> bool:
        """Tell whether losses, weights, random numbers and the error are those of another, to the bit."""
        mine, theirs = [*self.losses, *self.weights, self.random], [*other.losses, *other.weights, other.random]
        return (
            self.error == other.error
            and len(mine) == len(theirs)
            and all(torch.equal(_bits(one), _bits(two)) for one, two in zip(mine, theirs, strict=True))
        )


def _bits(tensor: Tensor) -> Tensor:
    """View floats as whole numbers, so that nan equals nan."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def attempt(
    model: Subject,
    callbacks: Sequence[Any],
    *,
    during: AbstractContextManager[Any] | None = None,
    steps: int = STEPS,
    ckpt_path: Any = None,
    **settings: Any,
) -> Trial:
    """Train, whatever happens.

    Args:
        model: The model.
        callbacks: Of the trainer.
        during: Is entered around the fit.
        steps: How many batches there are.
        ckpt_path: What to resume from.
        settings: Of the trainer.
    """
    before = standing(model)
    error = ""
    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores Ctrl-C after the first
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet(callbacks=list(callbacks), **settings)
        try:
            with during or nullcontext():
                trainer.fit(model, loader(steps), ckpt_path=ckpt_path)
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
        finally:
            signal.signal(signal.SIGINT, handler)
    random = torch.get_rng_state()
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    del trainer
    model.trainer = None  # it keeps the batch in which it was interrupted
    gc.collect()
    said = [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]
    return Trial(
        losses=list(model.losses),
        weights=[tensor.detach().clone() for tensor in model.state_dict().values()],
        random=random,
        error=error,
        said=[text for text in said if not any(hint in text for hint in HINTS)],
        left=left(before, standing(model)),
        kept=sum(reference() is not None for reference in model.tensors),
        metrics=metrics,
    )


def twins(**options: Any) -> tuple[Subject, Subject]:
    """Return two models that are alike."""
    model = Subject(**options)
    twin = Subject(**options)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    return model, twin


def clean(trial: Trial) -> None:
    """Assert that nothing was left behind."""
    assert trial.left == {}
    assert trial.kept == 0, f"{trial.kept} tensors of the training are still alive"


Records = dict[int, dict[str, AttentionStatistics]]


def records(monitor: AttentionMonitor) -> Records:
    """Return the history by step."""
    return {step: dict(record) for step, record in monitor.history}


def same_records(one: Records, other: Records) -> bool:
    """Tell whether two histories hold the same numbers to the bit."""
    if one.keys() != other.keys() or any(one[step].keys() != other[step].keys() for step in one):
        return False
    pairs = [(one[step][layer].measured(), other[step][layer].measured()) for step in one for layer in one[step]]
    return all(
        a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=0, equal_nan=True) for name in a)
        for a, b in pairs
    )


class _Opening(Callback):
    """Stands before the monitors and enters a context when a step begins."""

    def __init__(self, context: AbstractContextManager[Any], steps: Collection[int]) -> None:
        self.context, self.steps = context, steps
        self.inside = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.steps:
            self.context.__enter__()
            self.inside = True

    def close(self) -> None:
        if self.inside:
            self.inside = False
            self.context.__exit__(None, None, None)


class _Closing(Callback):
    """Stands behind the monitors and leaves the context when the step ends, or the training."""

    def __init__(self, opening: _Opening) -> None:
        self.opening = opening

    def on_train_batch_end(self, *_: Any) -> None:
        self.opening.close()

    def on_exception(self, *_: Any) -> None:
        self.opening.close()


def in_steps(context: AbstractContextManager[Any], steps: Collection[int], *monitors: Any) -> list[Any]:
    """Return callbacks that have a context around some steps, and around all that the monitors do in them."""
    opening = _Opening(context, steps)
    return [opening, *monitors, _Closing(opening)]


def with_patches(*patches: Any) -> AbstractContextManager[Any]:
    """Return a context that can be entered again and again, with patches in place."""
    return _Patches(patches)


class _Patches(AbstractContextManager[None]):
    def __init__(self, patches: Sequence[Any]) -> None:
        self.patches = patches

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self.patches):  # several may hold copies of the same dictionary
            patch.stop()

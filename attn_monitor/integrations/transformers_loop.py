"""The Trainer of transformers as the loop that the monitor serves, and its reporting as loggers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback, WandbCallback

from attn_monitor.guarding import UsersError
from attn_monitor.ranks import RankReduction


class TransformersLoop:
    """See `attn_monitor.loop.Loop`.

    Args:
        trainer: The trainer.
        control: What callbacks steer it by.
        metrics: Where the latest values go.
    """

    without_loggers = "the Trainer reports to nothing; events, history and metrics work without"

    def __init__(self, trainer: Trainer, control: TrainerControl, metrics: dict[str, Tensor]) -> None:
        self.trainer = trainer
        self.metrics = metrics
        self._control = control

    @property
    def step(self) -> int:
        """The x value that the Trainer logs its loss at."""
        return int(self.trainer.state.global_step)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first of all."""
        return bool(self.trainer.state.is_world_process_zero)

    @property
    def loggers(self) -> Sequence[Any]:
        """What the Trainer reports to, with the methods of Lightning's loggers."""
        return [logger for callback in self.callbacks if (logger := self._logger(callback)) is not None]

    @property
    def callbacks(self) -> Sequence[Any]:
        """The callbacks."""
        return list(self.trainer.callback_handler.callbacks)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizer."""
        optimizer = self.trainer.optimizer
        return [] if optimizer is None else [optimizer]

    @property
    def root_directory(self) -> str:
        """The Trainer's `output_dir`."""
        return str(self.trainer.args.output_dir)

    @property
    def writes_nothing(self) -> bool:
        """Never: the Trainer has no mode in which it is only tried out."""
        return False

    @property
    def should_stop(self) -> bool:
        """Whether the training was asked to end."""
        return bool(self._control.should_training_stop)

    def stop(self) -> str:
        """Ask the Trainer to end."""
        self._control.should_training_stop = True
        return ""

    def save_checkpoint(self, name: str) -> str:
        """Have the Trainer save a checkpoint after this step, under its own name for it and its own limit of them."""
        self._control.should_save = True
        return f"the Trainer's own, checkpoint-{self.step}"

    def call(self, action: Callable[[Any, Any, Any], None], model: Any, events: Any) -> None:
        """Call a function of the user's with the Trainer."""
        try:
            action(self.trainer, model, events)
        except Exception as error:
            raise UsersError(error) from error

    def any_rank(self, flag: bool) -> bool:
        """Tell whether a flag is up on any rank."""
        ranks = self.rank_reduction()
        return flag if ranks is None else ranks.any(flag)[0]

    def rank_reduction(self) -> RankReduction | None:
        """Return what pools the records of all processes."""
        if self.trainer.args.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return None
        mesh: Any = getattr(self.trainer.accelerator, "torch_device_mesh", None)
        parallel = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
        return RankReduction(duplicate=parallel and mesh["tp"].get_local_rank() > 0)

    def _logger(self, callback: TrainerCallback) -> Any:
        if isinstance(callback, TensorBoardCallback):
            return _TensorBoard(callback) if callback.tb_writer is not None else None
        if isinstance(callback, WandbCallback):
            return _Wandb(callback)
        if isinstance(callback, tuple(set(INTEGRATION_TO_CALLBACK.values()))):
            return _Reporting(callback, self.trainer)
        return None


class _TensorBoard:
    """The writer of the Trainer, which gets the tags as they are, pictures and the Attention tab's data included."""

    def __init__(self, callback: TensorBoardCallback) -> None:
        self.experiment = callback.tb_writer
        self.log_dir = str(self.experiment.log_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for tag, value in metrics.items():
            self.experiment.add_scalar(tag, value, step)

    def save(self) -> None:
        self.experiment.flush()


class _Wandb:
    """The W&B run of the Trainer, with the x axis that the Trainer defines for its own values."""

    def __init__(self, callback: WandbCallback) -> None:
        self._wandb = callback._wandb
        self.experiment = self._wandb.run

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._wandb.log({**metrics, "train/global_step": step})

    def log_image(self, key: str, images: Sequence[Any], step: int) -> None:
        self._wandb.log({key: [self._wandb.Image(image) for image in images], "train/global_step": step})

    def save(self) -> None:
        """Do nothing: W&B uploads by itself."""


class _Reporting:
    """Any other integration: it gets the scalars as the Trainer's own values come to it."""

    def __init__(self, callback: TrainerCallback, trainer: Trainer) -> None:
        self._callback = callback
        self._trainer = trainer
        self.experiment = callback

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        trainer = self._trainer
        self._callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(metrics), model=trainer.model)

    def save(self) -> None:
        """Do nothing: an integration writes when it likes."""


def resumed_from() -> str:
    """Return the checkpoint that the calling Trainer resumes from, empty if none is known."""
    frame = sys._getframe(1)
    while frame is not None:
        given = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(frame.f_locals.get("self"), Trainer) and isinstance(given, str):
            return given
        frame = frame.f_back  # type: ignore[assignment] # ends with None, which the loop asks for
    return ""


def calling_trainer() -> Trainer:
    """Return the Trainer that calls a callback now.

    A callback is not told which Trainer it serves, but its other callbacks, through which it reports, and the scale of
    the loss are known to the Trainer only. It is a few calls above.

    Raises:
        UsersError: If no Trainer does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
        frame = frame.f_back  # type: ignore[assignment] # ends with None, which the loop asks for
    text = (
        "AttentionMonitorCallback expects to be called by transformers.Trainer, and no Trainer was found above "
        "the call. In a loop of your own use attn_monitor.AttentionProbe."
    )
    raise UsersError(RuntimeError(text))

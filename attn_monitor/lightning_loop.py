"""Lightning's trainer as the loop that the monitor serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_monitor import lightning_compat as compat
from attn_monitor.guarding import UsersError
from attn_monitor.ranks import RankReduction

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class LightningLoop:
    """See `Loop`.

    Args:
        trainer: The trainer.
    """

    without_loggers = "the trainer has no logger; events, history and callback_metrics work without one"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def step(self) -> int:
        """The x value that `self.log` would use now."""
        return compat.logged_step(self._trainer)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the global rank 0."""
        return bool(self._trainer.is_global_zero)

    @property
    def loggers(self) -> Sequence[Any]:
        """The loggers."""
        return self._trainer.loggers

    @property
    def callbacks(self) -> Sequence[Any]:
        """The callbacks."""
        return compat.callbacks_of(self._trainer)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The dictionary behind `trainer.callback_metrics`."""
        return compat.callback_metrics(self._trainer)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers."""
        return self._trainer.optimizers

    @property
    def root_directory(self) -> str:
        """The trainer's `default_root_dir`."""
        return str(self._trainer.default_root_dir)

    @property
    def writes_nothing(self) -> bool:
        """Whether this is a `fast_dev_run`."""
        return bool(getattr(self._trainer, "fast_dev_run", False))

    @property
    def should_stop(self) -> bool:
        """Whether the training was asked to end."""
        return self._trainer.should_stop

    def stop(self) -> str:
        """Ask the trainer to end."""
        self._trainer.should_stop = True
        return compat.stopping_waits(self._trainer)

    def save_checkpoint(self, name: str) -> str:
        """Save a checkpoint in the folder `checkpoints` of the run, which may be an address."""
        path = f"{compat.run_directory(self._trainer)}/checkpoints/{name}.ckpt"
        try:
            self._trainer.save_checkpoint(path)
        except Exception:
            # Lightning ends with a barrier, at which the other ranks wait: the first alone writes, and may fail to.
            self._trainer.strategy.barrier()
            raise
        return path

    def call(self, action: Callable[[Any, Any, Any], None], model: Any, events: Any) -> None:
        """Call a function of the user's with the trainer."""
        try:
            action(self._trainer, model, events)
        except Exception as error:
            raise UsersError(error) from error

    def any_rank(self, flag: bool) -> bool:
        """Tell whether a flag is up on any rank."""
        return compat.any_rank(self._trainer, flag)

    def rank_reduction(self) -> RankReduction | None:
        """Return what pools the records of the trainer's processes."""
        return compat.rank_reduction(self._trainer)

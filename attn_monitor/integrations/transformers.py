"""The callback for the Trainer of transformers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from attn_monitor.guarding import guarded
from attn_monitor.integrations.transformers_loop import TransformersLoop, calling_trainer, resumed_from
from attn_monitor.monitoring import Monitoring
from attn_monitor.phrases import error_line
from attn_monitor.stages import TRAIN

STATE_FILE = "attn_monitor_state.pt"
"""What a checkpoint holds of the monitor."""


class AttentionMonitorCallback(Monitoring, TrainerCallback):
    """Watches the attention of a model while transformers' Trainer trains it: `AttentionMonitor` for that Trainer.

    Takes the options of `attn_monitor.AttentionMonitor` but for `stages` (only training is observed), and logs the same
    tags, through whatever the Trainer reports to: TensorBoard gets all of it, with pictures, events and the data of the
    Attention tab; W&B gets the scalars under the same names, and pictures; any other integration gets the scalars as
    it gets the loss. The x of a value is `state.global_step`, as it is for the Trainer's own.

    The first step of a training is observed, and then every `logging_steps`. Numbers are those of the whole optimizer
    step, over all its micro-batches and processes, of the gradients that this step's loss has, whatever mixed precision
    multiplied it by. A model that is compiled (`torch_compile=True`) runs observed steps eagerly.

    The Trainer tells its callbacks nothing of an exception. After one, hooks of an observed step may be left on the
    model until the next training begins; `detach()` removes them.

    A user's `on_saturation` function is called with the Trainer, the model and the events.

    Args:
        **options: See `attn_monitor.AttentionMonitor`.

    Attributes:
        events: Every event so far, oldest first.
        history: The latest records, `(step, {layer: AttentionStatistics})`, oldest first.
        metrics: The latest values by their tags.

    Raises:
        ValueError: If an argument is out of its range; when training begins, if `modules` matches no module.
        TypeError: If an argument has the wrong type.

    Example:
        >>> from attn_monitor.integrations.transformers import AttentionMonitorCallback
        >>> monitor = AttentionMonitorCallback(every_n_steps=10, on_saturation="stop")
        >>> monitor.events
        []

        Then `Trainer(model, args, callbacks=[monitor], ...).train()`, and `tensorboard --logdir` its output folder.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.metrics: dict[str, torch.Tensor] = {}
        self._trainer: weakref.ref[Trainer] | None = None

    def detach(self) -> None:
        """Leave nothing behind on the model; harmless at any time."""
        self._end_run()

    @guarded(again=True)
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Check the choice of modules, and continue from a checkpoint."""
        self._end_run()
        self._trainer = weakref.ref(calling_trainer())
        if state.global_step > 0:
            folder = resumed_from()
            self._restore((Path(folder) if folder else self._checkpoint(args, state)) / STATE_FILE)
        self._start_fit(self._loop(control), model)

    @guarded(again=True)
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Observe this optimizer step if it is one to log."""
        loop = self._loop(control)
        scaler = getattr(loop.trainer.accelerator, "scaler", None)
        # What else the Trainer multiplies a loss by makes it a part of the step's loss, whose gradient is wanted.
        self._loss_factor = float(scaler.get_scale()) if scaler is not None else 1.0
        by_steps = args.logging_strategy == IntervalStrategy.STEPS
        self._begin_step(loop, model, int(state.logging_steps) if by_steps else 0)

    @guarded()
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the gradients of an observed step, as the Trainer clipped them."""
        if self._pooling(TRAIN):
            loop = self._loop(control)
            scaled = getattr(loop.trainer.accelerator, "scaler", None) is not None and not args.max_grad_norm > 0
            for optimizer in loop.optimizers:
                self.flight_recorder.keep_gradients(optimizer, scaled=scaled)

    @guarded()
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Leave the model alone again and make the record."""
        if self._step_is_due:
            loop = self._loop(control)
            with self._meeting("on_step_end"):
                self._end_batch(TRAIN, loop)
            if self._step_is_due:
                self._finish_step(loop, model)

    @guarded()
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Keep the loss that the Trainer logs, the mean since the last time."""
        if logs and "loss" in logs:
            self.flight_recorder.keep_loss(state.global_step, torch.tensor(float(logs["loss"])), copied=True)

    @guarded()
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save what is remembered of each head beside the checkpoint."""
        folder = self._checkpoint(args, state)
        if state.is_world_process_zero and folder.is_dir():
            try:
                torch.save(self.state_dict(), folder / STATE_FILE)
            except Exception as error:  # a full disk is the Trainer's to tell of
                self._notices.add(f"saving the monitor's state failed: {error_line(error)}")

    @guarded()
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave nothing behind."""
        loop = self._loop(control)
        self._finish_fit(loop)
        self._end_run()
        self._notices.say(loop.is_global_zero)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trainer": None}

    def _loop(self, control: TrainerControl) -> TransformersLoop:
        trainer = self._trainer() if self._trainer is not None else None
        return TransformersLoop(trainer or calling_trainer(), control, self.metrics)

    @staticmethod
    def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
        """Return the folder of the latest checkpoint of this step; a hyperparameter search has one for each run."""
        root, name = Path(str(args.output_dir)), f"checkpoint-{state.global_step}"
        found = [folder for folder in (root / name, *root.glob(f"*/{name}")) if folder.is_dir()]
        return max(found, key=lambda folder: folder.stat().st_mtime, default=root / name)

    def _restore(self, path: Path) -> None:
        if not path.is_file():
            self._notices.add(f"the checkpoint holds nothing of the monitor ({path.name} is missing), it starts afresh")
            return
        try:
            self.load_state_dict(torch.load(path, weights_only=True))
        except Exception as error:
            self._notices.add(f"the monitor's state in the checkpoint is ignored: {error}")

"""The hooks of validation, test and prediction: observe every batch of the stage, one record per run of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_monitor.lightning_compat import LightningCallback

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class EvaluationHooks(LightningCallback):
    """Sends Lightning's nine evaluation hooks through three methods of the subclass."""

    def start_stage(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare to observe a run of the stage."""
        raise NotImplementedError

    def start_batch(self, stage: str, trainer: Trainer) -> None:
        """Observe from here on."""
        raise NotImplementedError

    def end_batch(self, stage: str, trainer: Trainer) -> None:
        """Stop to observe."""
        raise NotImplementedError

    def end_stage(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the record of the run."""
        raise NotImplementedError

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare, unless Lightning only tries out the validation loop."""
        if not trainer.sanity_checking:
            self.start_stage("validate", trainer, pl_module)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Observe this batch."""
        if not trainer.sanity_checking:
            self.start_batch("validate", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Leave the model alone between batches."""
        self.end_batch("validate", trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the record."""
        if not trainer.sanity_checking:
            self.end_stage("validate", trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare."""
        self.start_stage("test", trainer, pl_module)

    def on_test_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Observe this batch."""
        self.start_batch("test", trainer)

    def on_test_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Leave the model alone between batches."""
        self.end_batch("test", trainer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the record."""
        self.end_stage("test", trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare."""
        self.start_stage("predict", trainer, pl_module)

    def on_predict_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Observe this batch."""
        self.start_batch("predict", trainer)

    def on_predict_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Leave the model alone between batches."""
        self.end_batch("predict", trainer)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the record."""
        self.end_stage("predict", trainer, pl_module)

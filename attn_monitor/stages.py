"""The probe and the publisher of every stage: observing its batches, and the record of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attn_monitor.capture.naming import Selection
from attn_monitor.catalog import FACTORS, GRADIENTS
from attn_monitor.evaluation import PREFIXES, EvaluationHooks
from attn_monitor.judge import EVIDENCE, Judge
from attn_monitor.lightning_compat import callbacks_of, logged_step
from attn_monitor.notices import Notices
from attn_monitor.observer import Observer
from attn_monitor.probe import AttentionProbe
from attn_monitor.publishing import Publisher
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.settings import describe

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

TRAIN = "train"
METHODS = {TRAIN: "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The method of the module that runs a batch of each stage."""


class ObservedStages(EvaluationHooks):
    """Observes the stages that the subclass is set to; its attributes are documented there."""

    modules: Selection
    statistics: frozenset[str]
    max_queries: int | None
    gradients: bool
    per_call: bool
    saturation: SaturationRule
    stages: tuple[str, ...]
    custom_scalars: bool
    evaluations: dict[str, Mapping[str, AttentionStatistics]]
    _judge: Judge
    _notices: Notices
    _observers: dict[str, Observer]
    _publishers: dict[str, Publisher]

    def _current_loss_factor(self) -> float:
        """Return by what the loss of the present backward pass was multiplied."""
        raise NotImplementedError

    def start_stage(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare to observe a run of the stage.

        Raises:
            ValueError: If the chosen modules match none of the model's.
        """
        if stage not in self.stages:
            return
        if stage not in self._observers:
            training = stage == TRAIN
            probe = AttentionProbe(
                pl_module,
                modules=self.modules,
                statistics=self._recorded | (EVIDENCE if training else set()),
                max_queries=self.max_queries,
                gradients=self.gradients and training,
                per_call=self.per_call,
                grad_scale=self._current_loss_factor if training else 1.0,
            )
            probe.check_modules()
            self._observers[stage] = Observer(probe, METHODS[stage], self._notices.add)
            chosen = self.statistics if training else self.statistics - GRADIENTS
            prefix = self._own_prefix(trainer) + PREFIXES.get(stage, "")
            layout = self.custom_scalars and stage == self.stages[0]  # one a run
            self._publishers[stage] = Publisher(
                chosen,
                self.saturation,
                prefix,
                self._notices.add,
                layout=layout,
                heads=self._judge.tracker.heads if training else None,
            )
        if not trainer.loggers:
            self._notices.add("the trainer has no logger; events, history and callback_metrics work without one")
        self._notices.say(trainer.is_global_zero)

    def start_batch(self, stage: str, trainer: Trainer) -> None:
        """Observe from here on."""
        if stage in self._observers:
            self._observers[stage].begin()
            self._notices.say(trainer.is_global_zero)

    def end_batch(self, stage: str, trainer: Trainer) -> None:
        """Stop to observe."""
        if self._pooling(stage):
            self._observers[stage].end()
            self._notices.say(trainer.is_global_zero)

    def end_stage(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the record of a run of an evaluation stage."""
        if not self._pooling(stage):
            return
        record = self._observers[stage].collect()
        if record is not None:
            self._audit(stage, pl_module, record)
            self.evaluations[stage] = record
        statistics = record or {}
        above = sum(
            int((rule.ratio(stats) > rule.limit(stats)).sum())
            for rule, stats in ((self.saturation.of(layer), stats) for layer, stats in statistics.items())
        )
        self._publishers[stage].publish(trainer, logged_step(trainer), statistics, above)
        self._notices.say(trainer.is_global_zero)

    # -- details ---------------------------------------------------------------------------------------------------

    def _own_prefix(self, trainer: Trainer) -> str:
        """Return what keeps this monitor's tags apart from those of the ones before it; the first has plain ones."""
        monitors = [callback for callback in callbacks_of(trainer) if isinstance(callback, ObservedStages)]
        number = monitors.index(self) + 1 if self in monitors else 1
        if number == 1:
            return ""
        self._notices.add(
            f"the trainer has {len(monitors)} AttentionMonitors; the tags of this one start with monitor{number}_, and "
            "the Attention tab and the report show the first one only. One monitor may have several `modules`"
        )
        return f"monitor{number}_"

    @property
    def _recorded(self) -> frozenset[str]:
        """The statistics that records are made of."""
        return self.statistics | set(FACTORS) | self.saturation.requires

    def _pooling(self, stage: str) -> bool:
        return stage in self._observers and self._observers[stage].pooling

    def _discard(self) -> None:
        for observer in self._observers.values():
            observer.discard()

    def _audit(self, stage: str, pl_module: LightningModule, statistics: Mapping[str, AttentionStatistics]) -> None:
        """Say once what a record lacks."""
        observer = self._observers[stage]
        self._notices.add_layers("seen, but not measured", observer.skipped)
        self._notices.add_layers("good to know", observer.notes)
        if observer.records == 1 and not statistics and not observer.skipped:
            found = ", ".join(observer.probe.owners) or "none"
            where = f"modules={describe(self.modules)}" if self.modules is not None else type(pl_module).__name__
            self._notices.add(
                f"no attention was seen in {where} while {METHODS[stage]} ran (modules with attention: {found}). "
                "Attention by a custom kernel can be shown with attn_monitor.observe_attention"
            )

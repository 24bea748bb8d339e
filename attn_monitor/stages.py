"""The probe and the publisher of every stage: observing its batches, and the record of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from attn_monitor.capture.naming import Selection
from attn_monitor.catalog import FACTORS, GRADIENTS
from attn_monitor.guarding import UsersError
from attn_monitor.judge import EVIDENCE, Judge
from attn_monitor.loop import Loop
from attn_monitor.notices import Notices
from attn_monitor.observer import Observer
from attn_monitor.probe import AttentionProbe
from attn_monitor.publishing import Publisher
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.settings import describe
from attn_monitor.tags import STAGE_PREFIXES

TRAIN = "train"


class ObservedStages:
    """Observes the stages that the subclass is set to; its attributes are documented there."""

    methods: ClassVar[Mapping[str, str]] = {}
    """The method of the module that runs a batch of each stage, where it is not called as a module."""
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
    _loss_factor: float

    def _start_stage(self, stage: str, loop: Loop, model: nn.Module) -> None:
        """Prepare to observe a run of the stage.

        Raises:
            UsersError: If the chosen modules match none of the model's, or choosing them raises.
        """
        if stage not in self.stages:
            return
        if stage not in self._observers:
            training = stage == TRAIN
            probe = AttentionProbe(
                model,
                modules=self.modules,
                statistics=self._recorded | (EVIDENCE if training else set()),
                max_queries=self.max_queries,
                gradients=self.gradients and training,
                per_call=self.per_call,
                grad_scale=self._current_loss_factor if training else 1.0,
            )
            try:
                probe.check_modules()
            except Exception as error:  # a choice that matches nothing, or a function of the user's that raises
                raise UsersError(error) from error
            method = self.methods.get(stage, "")
            self._observers[stage] = Observer(probe, method, self._notices.add, loop.rank_reduction())
            self._publishers[stage] = Publisher(
                self.statistics if training else self.statistics - GRADIENTS,
                self.saturation,
                self._own_prefix(loop) + STAGE_PREFIXES.get(stage, ""),
                self._notices.add,
                layout=self.custom_scalars and stage == self.stages[0],  # one a run
                heads=self._judge.tracker.heads if training else None,
            )
        if not loop.loggers:
            self._notices.add(loop.without_loggers)
        self._notices.say(loop.is_global_zero)

    def _begin_batch(self, stage: str, loop: Loop) -> None:
        """Observe from here on."""
        if stage in self._observers:
            self._observers[stage].begin()
            self._notices.say(loop.is_global_zero)

    def _end_batch(self, stage: str, loop: Loop) -> None:
        """Stop to observe."""
        if self._pooling(stage):
            self._observers[stage].end()
            self._notices.say(loop.is_global_zero)

    def _finish_stage(self, stage: str, loop: Loop, model: nn.Module) -> None:
        """Make the record of a run of an evaluation stage."""
        observer = self._observers.get(stage)
        if observer is None or not (observer.pooling or observer.ranks is not None):
            return  # with several processes one that had no batch is still waited for
        record = observer.collect()
        if record is not None:
            self._audit(stage, model, record)
            self.evaluations[stage] = record
        statistics = record or {}
        above = sum(
            int((rule.ratio(stats) > rule.limit(stats)).sum())
            for rule, stats in ((self.saturation.of(layer), stats) for layer, stats in statistics.items())
        )
        lost = None if record is None else observer.skipped
        self._publishers[stage].publish(loop, loop.step, statistics, above, lost=lost)
        self._notices.say(loop.is_global_zero)

    # -- details ---------------------------------------------------------------------------------------------------

    @property
    def _recorded(self) -> frozenset[str]:
        """The statistics that records are made of."""
        return self.statistics | set(FACTORS) | self.saturation.requires

    def _pooling(self, stage: str) -> bool:
        return stage in self._observers and self._observers[stage].pooling

    def _current_loss_factor(self) -> float:
        """Return by what the loss of the present backward pass was multiplied."""
        return self._loss_factor

    def _discard(self) -> None:
        """Drop what was observed of a step that did not end."""
        for observer in self._observers.values():
            observer.discard()

    def _audit(self, stage: str, model: nn.Module, statistics: Mapping[str, AttentionStatistics]) -> None:
        """Say once what a record lacks."""
        observer = self._observers[stage]
        self._notices.add_layers("seen, but not measured", observer.skipped)
        self._notices.add_layers("good to know", observer.notes)
        if observer.records == 1 and not statistics and not observer.skipped:
            found = ", ".join(observer.probe.owners) or "none"
            where = f"modules={describe(self.modules)}" if self.modules is not None else type(model).__name__
            self._notices.add(
                f"no attention was seen in {where} while {self.methods.get(stage, 'it')} ran (modules with attention: "
                f"{found}). Attention by a custom kernel can be shown with attn_monitor.observe_attention"
            )

    def _own_prefix(self, loop: Loop) -> str:
        """Return what keeps this monitor's tags apart from those of the ones before it; the first has plain ones."""
        monitors = [callback for callback in loop.callbacks if isinstance(callback, ObservedStages)]
        number = monitors.index(self) + 1 if self in monitors else 1
        if number == 1:
            return ""
        self._notices.add(
            f"the trainer has {len(monitors)} AttentionMonitors; the tags of this one start with monitor{number}_, and "
            f"the Attention tab and the report show it as a run of its own, (monitor {number}). One monitor may have "
            "several `modules`"
        )
        return f"monitor{number}_"

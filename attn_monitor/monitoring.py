"""All that a callback does for a training loop: observing steps, judging records, showing them, acting on events.

The callbacks of Lightning and of transformers say when; what happens then is here, once for both.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from attn_monitor.cadence import Cadence
from attn_monitor.capture.naming import Selection
from attn_monitor.capture.selection import checked_selection
from attn_monitor.catalog import GRADIENTS, HEADLINE, resolve_statistics
from attn_monitor.events import AttentionWarning, SaturationEvent
from attn_monitor.flight_recorder import FlightRecorder
from attn_monitor.history import history_from, history_state
from attn_monitor.judge import Judge, Judgement
from attn_monitor.loop import Loop
from attn_monitor.notices import Notices, surviving
from attn_monitor.observer import Observer
from attn_monitor.phrases import error_line
from attn_monitor.publishing import Publisher
from attn_monitor.qk_clip import Clipper, QKClip
from attn_monitor.records import AttentionStatistics
from attn_monitor.response import Action, Responder
from attn_monitor.saturation import SaturationRule
from attn_monitor.settings import check_action, check_count, check_flag, check_max_queries
from attn_monitor.stages import TRAIN, ObservedStages
from attn_monitor.tags import CLIPPED_HEADS

DEFAULT_RULE = SaturationRule()


class Monitoring(ObservedStages):
    """The settings, which `AttentionMonitor` documents, and the memory of one monitor."""

    def __init__(
        self,
        *,
        modules: Selection = None,
        statistics: Iterable[str] | None = None,
        every_n_steps: int | None = None,
        max_queries: int | None = None,
        gradients: bool = True,
        per_call: bool = False,
        saturation: SaturationRule = DEFAULT_RULE,
        on_saturation: Action = "warn",
        history_size: int = 256,
        custom_scalars: bool = False,
        adaptive_steps: int = 32,
        save_checkpoint: bool = False,
        flight_recorder: int = 64,
        mitigation: QKClip | None = None,
    ) -> None:
        super().__init__()
        modules = checked_selection(modules)
        check_max_queries(max_queries)
        check_action(on_saturation)
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps, least=1)
        check_count("history_size", history_size, least=0)
        check_flag("gradients", gradients)
        check_flag("per_call", per_call)
        check_flag("custom_scalars", custom_scalars)
        check_count("adaptive_steps", adaptive_steps, least=0)
        check_flag("save_checkpoint", save_checkpoint)
        check_count("flight_recorder", flight_recorder, least=0)
        if not isinstance(saturation, SaturationRule):
            raise TypeError(f"`saturation` expects a SaturationRule, got {saturation!r}. Write SaturationRule(...).")
        if mitigation is not None and not isinstance(mitigation, QKClip):
            raise TypeError(f"`mitigation` expects a QKClip or None, got {mitigation!r}. Write QKClip(...).")
        if mitigation is not None and max_queries is not None:
            raise ValueError("`mitigation` needs the largest logit, which `max_queries` does not give. Drop one.")
        self.modules = modules
        self.statistics = resolve_statistics(statistics, HEADLINE)
        self.every_n_steps = every_n_steps
        self.max_queries = max_queries
        self.gradients = gradients
        self.per_call = per_call
        self.saturation = saturation
        self.on_saturation = on_saturation
        self.stages: tuple[str, ...] = (TRAIN,)
        self.custom_scalars = custom_scalars
        self.adaptive_steps = adaptive_steps
        self.save_checkpoint = save_checkpoint
        self.mitigation = mitigation
        if not gradients:
            if statistics is not None and (unmeasured := sorted(self.statistics & GRADIENTS)):
                raise ValueError(f"`statistics` names {unmeasured}, which gradients=False does not measure.")
            self.statistics -= GRADIENTS
        self.history: deque[tuple[int, Mapping[str, AttentionStatistics]]] = deque(maxlen=history_size)
        self.evaluations: dict[str, Mapping[str, AttentionStatistics]] = {}
        self._notices = Notices()
        self.flight_recorder = FlightRecorder(flight_recorder, self._notices.add)
        self._judge = Judge(saturation)
        self._cadence = Cadence(adaptive_steps)
        self._responder = Responder(on_saturation, save_checkpoint, self._notices)
        self._restored = False
        self._resuming = False
        self._forget_run()

    def _forget_run(self) -> None:
        """Start without anything that belongs to a model, a loop or a logger."""
        self._observers: dict[str, Observer] = {}
        self._publishers: dict[str, Publisher] = {}
        self._clipper: Clipper | None = None
        self._module: weakref.ref[nn.Module] | None = None
        self._loss_factor = 1.0
        self._given_up = False

    def __getstate__(self) -> dict[str, Any]:
        clean = object.__new__(type(self))
        clean.__dict__.update(self.__dict__)
        clean._forget_run()  # hooks, tensors, writers and the model stay with the running fit
        return clean.__dict__

    @property
    def events(self) -> list[SaturationEvent]:
        """Every event so far, oldest first."""
        return self._judge.tracker.events

    def state_dict(self) -> dict[str, Any]:
        """Return the events, the history and what is remembered of each head, as plain values and tensors."""
        try:
            return {
                **self._judge.state_dict(),
                "cadence": self._cadence.state_dict(),
                "flight": self.flight_recorder.state_dict(),
                "history": history_state(self.history),
            }
        except Exception as error:  # the checkpoint of the user's model is worth more
            self._notices.add(f"the checkpoint holds nothing of the monitor: {error_line(error)}")
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint; a state that does not fit is ignored with a warning."""
        try:
            judge, cadence = Judge(self.saturation), Cadence(self.adaptive_steps)
            judge.load_state_dict(state_dict)
            cadence.load_state_dict(state_dict["cadence"])
        except Exception as error:  # a damaged state must neither end the fit nor be half restored
            self._notices.add(f"the monitor's state in the checkpoint is ignored: {error}")
        else:
            self._judge, self._cadence = judge, cadence
            self._restored = self._resuming = True
        try:
            self.flight_recorder.load_state_dict(state_dict.get("flight", {}))
        except Exception as error:
            self._notices.add(f"the flight record in the checkpoint is ignored: {error}")
        try:
            history = history_from(state_dict["history"]) if "history" in state_dict else []
        except Exception as error:
            self._notices.add(f"the history in the checkpoint is ignored: {error}")
        else:
            self.history.clear()
            self.history.extend(history)

    # -- a fit ------------------------------------------------------------------------------------------------------

    def _start_fit(self, loop: Loop, model: nn.Module) -> None:
        """Check the choice of modules, and start afresh for another model."""
        another = self._module is not None and self._module() is not model
        self._forget_run()
        self._notices.forget_said()
        self._cadence.start()
        if another and not self._restored:
            self._judge.forget()
            self._cadence.forget()
            self.flight_recorder.memory.forget()
        self._module = weakref.ref(model)
        if TRAIN in self.stages:
            self._start_stage(TRAIN, loop, model)
            self.flight_recorder.start(self._own_prefix(loop))
            if self.mitigation is not None:
                self._clipper = Clipper(self.mitigation, self._observers[TRAIN].probe)

    def _begin_step(self, loop: Loop, model: nn.Module, interval: int) -> None:
        """Observe what is to come if its optimizer step is one to log.

        Args:
            loop: The loop.
            model: The model.
            interval: Every how many steps the loop logs, unless the user chose a number for the monitor.
        """
        if TRAIN not in self._observers:
            return
        every = interval if self.every_n_steps is None else self.every_n_steps
        if self._cadence.due(loop.step, every):
            first = not self._pooling(TRAIN)
            self._begin_batch(TRAIN, loop)  # before all else: other processes count on it
            if first:
                self.flight_recorder.begin_step()
            if self._clipper is not None:
                self._clipper.begin(model)

    @property
    def _step_is_due(self) -> bool:
        """Whether the present step is to have a record, if only an empty one as it was given up."""
        return self._pooling(TRAIN) or self._given_up

    @contextmanager
    def _meeting(self, name: str) -> Iterator[None]:
        """Survive an error on the way to the record, for which the other processes wait in any case.

        Args:
            name: Of the hook.
        """
        try:
            yield
        except AttentionWarning:  # where warnings are errors
            raise
        except Exception as error:
            self._hook_failed(name, error)

    def _finish_step(self, loop: Loop, model: nn.Module) -> None:
        """Make the record of an optimizer step that was observed, judge it, show it, and act on it.

        Args:
            loop: The loop.
            model: The model.
        """
        step, self._given_up = loop.step, False
        record = self._observers[TRAIN].collect() if self._pooling(TRAIN) else None  # the ranks meet here
        judgement = Judgement(near=self._cadence.near)
        clipped: dict[str, float] = {}
        with surviving(self._notices.add, f"clipping at step {step}"):
            clipped = self._clip(model, record or {}, step)  # and here
        with surviving(self._notices.add, f"judging the record of step {step}"):
            if record is not None:
                self._forget_absent(record)
            judgement = self._judged(step, record or {})
        with surviving(self._notices.add, f"showing the record of step {step}"):  # what fails here swallows no event
            self._show(loop, model, record, judgement, clipped)
        self._cadence.near = judgement.near
        self._observe_alike()  # and here, whatever became of the record
        self._responder.respond(loop, model, judgement, step)

    def _show(
        self,
        loop: Loop,
        model: nn.Module,
        record: Mapping[str, AttentionStatistics] | None,
        judgement: Judgement,
        clipped: Mapping[str, float],
    ) -> None:
        """Keep and publish a record that was judged."""
        step = loop.step
        if record is not None:
            self._audit(TRAIN, model, record)
        # The model-wide tags must exist even without a record, or EarlyStopping ends the run.
        statistics = {layer: stats.only(self._recorded) for layer, stats in (record or {}).items()}
        if record is not None:
            self.history.append((step, statistics))
        lost = None if record is None else self._observers[TRAIN].skipped
        open_heads = self._judge.tracker.open_heads
        notes = [*judgement.findings, *map(str, judgement.forecasts)]
        with surviving(self._notices.add, f"publishing the record of step {step}"):
            self._publishers[TRAIN].publish(
                loop, step, statistics, open_heads, judgement.changes, more=clipped, lost=lost, notes=notes
            )
        changed = [*judgement.changes.opened, *judgement.changes.escalated]
        self.flight_recorder.record(loop, model, record or {}, self.saturation, changed, self.events)
        self._cadence.urgent |= self.flight_recorder.wants_next

    def _finish_fit(self, loop: Loop) -> None:
        """Let go of the model."""
        self._discard()
        self.flight_recorder.finish(loop, self.saturation, self.events)

    def _abandon(self, loop: Loop, exception: BaseException) -> None:
        """Leave nothing behind of a run that an exception ended, but for what the flight recorder writes."""
        self._end_run()
        self.flight_recorder.finish(loop, self.saturation, self.events, exception)
        with suppress(AttentionWarning):  # where warnings are errors, the exception is still what the user gets
            self._notices.say(loop.is_global_zero)

    # -- details ----------------------------------------------------------------------------------------------------

    def _judged(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> Judgement:
        """Judge a record, but for the extra one that a resumed fit starts with: an unbroken run would not have it."""
        resuming, self._resuming = self._resuming, False
        if resuming and self._cadence.only_first:
            return Judgement(near=self._cadence.near)
        try:
            return self._judge.take(step, statistics)
        except Exception as error:  # an error of ours must not end the training
            self._notices.add(f"judging the record of step {step} failed: {error_line(error)}")
            return Judgement()

    def _clip(self, model: nn.Module, record: Mapping[str, AttentionStatistics], step: int) -> dict[str, float]:
        """Rescale the weights of heads whose logits run away, if the user wants that, and return what to log of it."""
        if self._clipper is None:
            return {}
        ranks = self._observers[TRAIN].ranks
        agree = None if ranks is None else ranks.all
        clipped = self._clipper.apply(model, record, agree, step)
        self._notices.add_layers("QK-Clip leaves alone", clipped.refused)
        self._notices.add_layers("QK-Clip", clipped.notes)
        self._cadence.urgent |= bool(clipped.waiting)  # their weights are found in the next observed step
        return {CLIPPED_HEADS: float(len(clipped.heads))}

    def _observe_alike(self) -> None:
        """Have every rank observe the same steps, even if one of them could not judge the record."""
        ranks = self._observers[TRAIN].ranks
        if ranks is not None:
            self._cadence.near, self._cadence.urgent = ranks.any(self._cadence.near, self._cadence.urgent)

    def _forget_absent(self, statistics: Mapping[str, AttentionStatistics]) -> None:
        """Drop the memory of layers from a checkpoint that this model does not have."""
        if not self._restored:
            return
        self._restored = False
        if unknown := sorted(self._judge.tracker.layers - statistics.keys()):
            self._judge.forget(unknown)
            self._notices.add(f"the checkpoint remembers layers that this model did not run: {unknown}")

    def _discard(self) -> None:
        """Drop what was observed of a step that did not end."""
        self._given_up = False
        if self._clipper is not None:
            self._clipper.end()
        super()._discard()

    def _hook_failed(self, name: str, error: Exception) -> None:
        """Report an error of ours and leave nothing behind; what fails in that as well is given up."""
        text = f"{name} failed: {error_line(error)}"
        with suppress(Exception):
            self._notices.add(text)
        for stage, observer in self._observers.items():
            pooling = observer.pooling
            with suppress(Exception):
                observer.fail(text)
            # Where processes meet it goes on pooling, and the record is lost as a whole.
            if stage == TRAIN and pooling and not observer.pooling:
                self._given_up = True
                self._cadence.give_up()

    def _end_run(self) -> None:
        self._discard()
        self._observers.clear()
        self._publishers.clear()
        self._clipper = None

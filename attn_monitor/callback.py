"""The Lightning callback: when to observe, at which step to log, what to do about an event."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attn_monitor.cadence import Cadence
from attn_monitor.capture.naming import Selection
from attn_monitor.capture.selection import checked_selection
from attn_monitor.catalog import GRADIENTS, HEADLINE, resolve_statistics
from attn_monitor.events import AttentionWarning, SaturationEvent
from attn_monitor.flight_recorder import FlightRecorder
from attn_monitor.judge import Judge, Judgement
from attn_monitor.lightning_compat import accumulating, log_interval, logged_step, loss_factor
from attn_monitor.notices import Notices
from attn_monitor.observer import Observer
from attn_monitor.publishing import Publisher
from attn_monitor.qk_clip import Clipper, QKClip
from attn_monitor.records import AttentionStatistics
from attn_monitor.response import Action, Responder
from attn_monitor.saturation import SaturationRule
from attn_monitor.settings import check_action, check_count, check_flag, check_max_queries, check_stages, describe
from attn_monitor.stages import TRAIN, ObservedStages
from attn_monitor.tags import CLIPPED_HEADS

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_DEFAULT_RULE = SaturationRule()


class AttentionMonitor(ObservedStages):
    """Watches the attention of a model while it trains, warns of heads that saturate and logs why.

    The model needs no change, and training stays the same to the bit. The first training step of a fit is always
    observed, then every step that Lightning logs. On the steps between nothing of the monitor is on the model.

    **Logged metrics**, at the same x as `self.log`, to every logger and to `trainer.callback_metrics`:

    | key | meaning | unit |
    |---|---|---|
    | `attn_<statistic>/<layer>` | mean over the layer's heads | see below |
    | `attn_<statistic>_max/<layer>` | worst head, where larger is worse | see below |
    | `attn_<statistic>_min/<layer>` | worst head, where smaller is worse | see below |
    | `attn_monitor/saturated_heads` | heads with an open event | heads |
    | `attn_monitor/observed_layers` | layers in this record | layers |
    | `attn_monitor/saturation_ratio_max` | largest saturation ratio of any head | 1 |

    Statistics logged by default: `logit_std`, `logit_row_std`, `logit_max` (logits, a pure number),
    `entropy_normalized` (0 one-hot .. 1 uniform), `jacobian_trace` (0 saturated .. 1 uniform), `grad_logits_norm` (norm
    of the loss gradient; per head, pooled over the optimizer step). `entropy` is in nats. TensorBoard also gets a
    picture and a histogram of all heads for each of them, every per-head number as a tensor, a page for the events of a
    step, and a summary. W&B and MLflow get the pictures too.

    Evaluation stages are opt-in. Each run of one makes a record of its own from all batches of all its dataloaders,
    with tags that start with `val_`, `test_` or `predict_`; it holds no gradients and opens no events (its
    `saturated_heads` counts the heads above the limit). Observing them turns off the fused fast path of
    `nn.TransformerEncoder`, which changes the outputs of padded positions.

    Args:
        modules: Which modules' attention to watch: a name, a glob, a module type, a predicate `(name, module) ->
            bool`, or a list of these. `None`: all that is found.
        statistics: The statistics to log, `None` for the default above.
        every_n_steps: Observe every so many optimizer steps, `None` for the trainer's `log_every_n_steps`.
        max_queries: Look at that many query rows of a call only, one at random from each of as many stretches: faster,
            and the statistics are estimates, whose largest relative error is logged as
            `attn_monitor/sampling_error_max`.
        gradients: Whether to measure gradients.
        per_call: Whether a module that is called several times per forward gets a record for each call.
        saturation: When a head counts as saturated.
        on_saturation: What to do beside warning: `"warn"` nothing; `"stop"` stop the training, or `"raise"`
            `AttentionSaturationError`, after the step that made an event critical; or call a function `(trainer,
            pl_module, events)` with all events that are new or became critical. An event is critical once the model as
            a whole passes little gradient through its attention, see docs/events.md.
        stages: Where to observe, of `"train"`, `"validate"`, `"test"` and `"predict"`.
        history_size: How many records `history` keeps.
        custom_scalars: Whether TensorBoard gets a layout for its custom scalars, with a band from mean to worst head
            for every layer. A run has one layout, so a run that has one keeps it.
        adaptive_steps: While a head is above 80 % of its limit, observe every step: at most so many extra ones in a
            row, and in the long run one in eleven. 0 for none; with several processes there are none.
        save_checkpoint: Whether to save a checkpoint when the first head is flagged, and when the first event is
            critical, in the folder `checkpoints` of the run.
        flight_recorder: How many observations of every head are kept, with loss, learning rates and gradient norms,
            and written to the folder of the run at a critical event, an exception, or a loss that is nan or inf; 0 for
            none.
        mitigation: `QKClip(...)` to rescale the query and key weights of heads whose logits run away.

    Attributes:
        events: Every event so far, oldest first.
        history: The latest training records, `(step, {layer: AttentionStatistics})`, oldest first.
        evaluations: The latest record of each evaluation stage, `{stage: {layer: AttentionStatistics}}`.
        flight_recorder: The `FlightRecorder`.

    Raises:
        ValueError: If an argument is out of its range; on fit start, if `modules` matches no module.
        TypeError: If an argument has the wrong type.

    Example:
        >>> from attn_monitor import AttentionMonitor, SaturationRule
        >>> monitor = AttentionMonitor(every_n_steps=10, saturation=SaturationRule(patience=2), on_saturation="stop")
        >>> monitor.events
        []

        Then `Trainer(callbacks=[monitor]).fit(model)`, and `tensorboard --logdir lightning_logs`.
    """

    def __init__(
        self,
        *,
        modules: Selection = None,
        statistics: Iterable[str] | None = None,
        every_n_steps: int | None = None,
        max_queries: int | None = None,
        gradients: bool = True,
        per_call: bool = False,
        saturation: SaturationRule = _DEFAULT_RULE,
        on_saturation: Action = "warn",
        stages: Iterable[str] = (TRAIN,),
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
        self.stages = check_stages(stages)
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
        self._state_key = self._generate_state_key(
            modules=describe(modules),
            statistics=sorted(self.statistics),
            every_n_steps=every_n_steps,
            sampling=(max_queries, gradients, per_call),
            saturation=saturation,
            on_saturation=describe(on_saturation),
            stages=self.stages,
            history_size=history_size,
            adaptive_steps=adaptive_steps,
            mitigation=mitigation,
        )
        self._forget_run()

    def _forget_run(self) -> None:
        """Start without anything that belongs to a model, a trainer or a logger."""
        self._observers: dict[str, Observer] = {}
        self._publishers: dict[str, Publisher] = {}
        self._clipper: Clipper | None = None
        self._module: weakref.ref[LightningModule] | None = None
        self._losses = 0
        self._loss_factor = 1.0

    def _forget_log(self) -> None:
        """Let go of the model's `log` methods, which Lightning hangs on every callback at the start of a run."""
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        clean = object.__new__(type(self))
        clean.__dict__.update(self.__dict__)
        clean._forget_run()  # hooks, tensors, writers and the model stay with the running fit
        clean._forget_log()
        return clean.__dict__

    @property
    def events(self) -> list[SaturationEvent]:
        """Every event so far, oldest first."""
        return self._judge.tracker.events

    @property
    def state_key(self) -> str:
        """Tells monitors of different settings apart in a checkpoint."""
        return self._state_key

    def state_dict(self) -> dict[str, Any]:
        """Return the events and what is remembered of each head, as plain values."""
        return {
            **self._judge.state_dict(),
            "cadence": self._cadence.state_dict(),
            "flight": self.flight_recorder.state_dict(),
        }

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

    # -- training ---------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the choice of modules, and start afresh for another model."""
        another = self._module is not None and self._module() is not pl_module
        self._forget_run()
        self._notices.forget_said()
        self._cadence.start()
        if another and not self._restored:
            self._judge.forget()
            self._cadence.forget()
            self.flight_recorder.memory.forget()
        self._module = weakref.ref(pl_module)
        if TRAIN in self.stages:
            self.start_stage(TRAIN, trainer, pl_module)
            self.flight_recorder.start()
            if self.mitigation is not None:
                self._clipper = Clipper(self.mitigation, self._observers[TRAIN].probe)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Observe this batch if its optimizer step is one to log."""
        if TRAIN in self._observers and self._due(trainer):
            self.start_batch(TRAIN, trainer)
            if self._clipper is not None:
                self._clipper.begin(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Note by what Lightning multiplied the loss of this backward pass."""
        if self._pooling(TRAIN):
            self._loss_factor = loss_factor(trainer, pl_module)
            self._losses += pl_module.automatic_optimization

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Expect backward passes outside of Lightning, whose loss nothing multiplies."""
        self._loss_factor = 1.0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measure the gradients of an observed step, as they are before clipping."""
        if self._pooling(TRAIN):
            self.flight_recorder.keep_gradients(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the model alone again; after the last batch of the optimizer step make the record."""
        self.flight_recorder.keep_loss(trainer, pl_module, outputs)
        if not self._pooling(TRAIN):
            return
        self.end_batch(TRAIN, trainer)
        if self._clipper is not None:
            self._clipper.end()
        if accumulating(trainer):
            return
        step = logged_step(trainer)
        record = self._observers[TRAIN].collect(losses=max(self._losses, 1))
        self._losses = 0
        if record is not None:
            self._audit(TRAIN, pl_module, record)
            self._forget_absent(record)
        judgement = self._judged(step, record or {})
        self._cadence.near = judgement.near and trainer.world_size == 1  # ranks must observe the same steps
        clipped = self._clip(pl_module, record or {})
        # The model-wide tags must exist even without a record, or EarlyStopping ends the run.
        statistics = {layer: stats.only(self._recorded) for layer, stats in (record or {}).items()}
        if record is not None:
            self.history.append((step, statistics))
        self._publishers[TRAIN].publish(
            trainer, step, statistics, self._judge.tracker.open_heads, judgement.changes, more=clipped
        )
        changed = [*judgement.changes.opened, *judgement.changes.escalated]
        self.flight_recorder.record(trainer, pl_module, record or {}, self.saturation, changed, self.events)
        self._cadence.urgent |= self.flight_recorder.wants_next
        self._responder.respond(trainer, pl_module, judgement, step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop an optimizer step that the end of the epoch cut short."""
        self._discard()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the model."""
        self._discard()
        self.flight_recorder.finish(trainer, self.saturation, self.events)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind, but for what the flight recorder writes."""
        self._end_run()
        self.flight_recorder.finish(trainer, self.saturation, self.events, exception)
        with suppress(AttentionWarning):  # where warnings are errors, the exception is still what the user gets
            self._notices.say(trainer.is_global_zero)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._end_run()
        self._notices.say(trainer.is_global_zero)

    # -- details ----------------------------------------------------------------------------------------------------

    def _due(self, trainer: Trainer) -> bool:
        every = log_interval(trainer) if self.every_n_steps is None else self.every_n_steps
        return self._cadence.due(logged_step(trainer), every)

    def _judged(self, step: int, statistics: Mapping[str, AttentionStatistics]) -> Judgement:
        """Judge a record, but for the extra one that a resumed fit starts with: an unbroken run would not have it."""
        resuming, self._resuming = self._resuming, False
        if resuming and self._cadence.only_first:
            return Judgement(near=self._cadence.near)
        try:
            return self._judge.take(step, statistics)
        except Exception as error:  # an error of ours must not end the training
            self._notices.add(f"judging the record of step {step} failed: {type(error).__name__}: {error}")
            return Judgement()

    def _clip(self, pl_module: LightningModule, record: Mapping[str, AttentionStatistics]) -> dict[str, float]:
        """Rescale the weights of heads whose logits run away, if the user wants that, and return what to log of it."""
        if self._clipper is None:
            return {}
        clipped = self._clipper.apply(pl_module, record)
        self._notices.add_layers("QK-Clip leaves alone", clipped.refused)
        self._notices.add_layers("QK-Clip", clipped.notes)
        self._cadence.urgent |= bool(clipped.waiting)  # their weights are found in the next observed step
        return {CLIPPED_HEADS: float(len(clipped.heads))}

    def _current_loss_factor(self) -> float:
        return self._loss_factor

    def _discard(self) -> None:
        self._losses = 0
        if self._clipper is not None:
            self._clipper.end()
        super()._discard()

    def _end_run(self) -> None:
        self._forget_log()
        self._discard()
        self._observers.clear()
        self._publishers.clear()
        self._clipper = None

    def _forget_absent(self, statistics: Mapping[str, AttentionStatistics]) -> None:
        """Drop the memory of layers from a checkpoint that this model does not have."""
        if not self._restored:
            return
        self._restored = False
        if unknown := sorted(self._judge.tracker.layers - statistics.keys()):
            self._judge.forget(unknown)
            self._notices.add(f"the checkpoint remembers layers that this model did not run: {unknown}")

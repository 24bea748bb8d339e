"""The Lightning callback: when to observe, and what of it is Lightning's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from attn_monitor.capture.naming import Selection
from attn_monitor.evaluation import EvaluationHooks
from attn_monitor.guarding import guarded
from attn_monitor.lightning_compat import accumulating, callbacks_of, log_interval, loss_factor, still_scaled
from attn_monitor.lightning_loop import LightningLoop
from attn_monitor.monitoring import DEFAULT_RULE, Monitoring
from attn_monitor.phrases import count
from attn_monitor.qk_clip import QKClip
from attn_monitor.response import Action
from attn_monitor.saturation import SaturationRule
from attn_monitor.settings import check_stages, describe
from attn_monitor.stages import TRAIN

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

OPTIONS_CHANGED = (
    "the monitor's options have changed since the checkpoint; what it remembers goes on under the new ones "
    "(Lightning's warning that a monitor with the old ones is missing needs nothing done)"
)
NOT_TAKEN = (
    "the checkpoint holds the memory of {} with other options, and it is not certain that it is this one's, so events "
    "and history begin anew; to go on with it, give one monitor the `modules` it had"
)


class AttentionMonitor(Monitoring, EvaluationHooks):
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
            row, and in the long run one in eleven. 0 for none.
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

    methods: ClassVar = {
        TRAIN: "training_step",
        "validate": "validation_step",
        "test": "test_step",
        "predict": "predict_step",
    }

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
        stages: Iterable[str] = (TRAIN,),
        history_size: int = 256,
        custom_scalars: bool = False,
        adaptive_steps: int = 32,
        save_checkpoint: bool = False,
        flight_recorder: int = 64,
        mitigation: QKClip | None = None,
    ) -> None:
        # Named once more, for editors and for LightningCLI, which reads this signature.
        super().__init__(
            modules=modules,
            statistics=statistics,
            every_n_steps=every_n_steps,
            max_queries=max_queries,
            gradients=gradients,
            per_call=per_call,
            saturation=saturation,
            on_saturation=on_saturation,
            history_size=history_size,
            custom_scalars=custom_scalars,
            adaptive_steps=adaptive_steps,
            save_checkpoint=save_checkpoint,
            flight_recorder=flight_recorder,
            mitigation=mitigation,
        )
        self.stages = check_stages(stages)
        watched = describe(self.modules)
        self._same_modules = self._generate_state_key(modules=watched).removesuffix("}") + ","
        self._state_key = self._generate_state_key(
            modules=watched,
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

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("log", "log_dict"):  # the model's, which Lightning hangs on every callback
            state.pop(name, None)
        return state

    @property
    def state_key(self) -> str:
        """Tells monitors of different settings apart in a checkpoint."""
        return self._state_key

    @guarded()
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with what a monitor of the same modules and other options has left: Lightning takes it for another."""
        states = checkpoint.get("callbacks") or {}
        if self.state_key in states:
            return
        monitors = [other for other in callbacks_of(trainer) if isinstance(other, AttentionMonitor)]
        own = {monitor.state_key for monitor in monitors}
        name = type(self).__qualname__
        left = [key for key in states if str(key).startswith(f"{name}{{") and key not in own]
        fitting = [key for key in left if key.startswith(self._same_modules)]
        rivals = [other for other in monitors if other._same_modules == self._same_modules]
        if len(fitting) == 1 and all(other is self or other.state_key in states for other in rivals):
            self.load_state_dict(deepcopy(states[fitting[0]]))
            if self._restored:
                self._notices.add(OPTIONS_CHANGED)
        elif left:
            self._notices.add(NOT_TAKEN.format(count(len(left), "monitor")))

    # -- training ---------------------------------------------------------------------------------------------------

    @guarded(again=True)
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the choice of modules, and start afresh for another model."""
        self._start_fit(LightningLoop(trainer), pl_module)

    @guarded(again=True)
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Observe this batch if its optimizer step is one to log."""
        self._loss_factor = 1.0
        self._begin_step(LightningLoop(trainer), pl_module, log_interval(trainer))

    @guarded()
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Note by what Lightning multiplied the loss of this backward pass."""
        if self._pooling(TRAIN):
            self._loss_factor = loss_factor(trainer, pl_module)
            self._observers[TRAIN].losses += pl_module.automatic_optimization

    @guarded()
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Expect backward passes outside of Lightning, whose loss nothing multiplies."""
        self._loss_factor = 1.0

    @guarded()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measure the gradients of an observed step, as they are before clipping."""
        if self._pooling(TRAIN):
            self.flight_recorder.keep_gradients(optimizer, scaled=still_scaled(trainer, optimizer))

    @guarded()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the model alone again; after the last batch of the optimizer step make the record."""
        loop = LightningLoop(trainer)
        with self._meeting("on_train_batch_end"):
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            # Under automatic optimization it is a copy, which Lightning divided by the number of batches.
            automatic = pl_module.automatic_optimization
            self.flight_recorder.keep_loss(
                loop.step, loss, batches=trainer.accumulate_grad_batches if automatic else 1, copied=automatic
            )
            self._end_batch(TRAIN, loop)
        if not self._step_is_due or accumulating(trainer):
            return
        self._finish_step(loop, pl_module)

    @guarded()
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop an optimizer step that the end of the epoch cut short."""
        self._discard()

    @guarded()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the model."""
        self._finish_fit(LightningLoop(trainer))

    @guarded()
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind, but for what the flight recorder writes."""
        self._abandon(LightningLoop(trainer), exception)

    @guarded()
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._end_run()
        self._notices.say(trainer.is_global_zero)

    # -- evaluation -------------------------------------------------------------------------------------------------

    @guarded(again=True)
    def start_stage(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare to observe a run of the stage."""
        self._start_stage(stage, LightningLoop(trainer), pl_module)

    @guarded(again=True)
    def start_batch(self, stage: str, trainer: Trainer) -> None:
        """Observe from here on."""
        self._begin_batch(stage, LightningLoop(trainer))

    @guarded()
    def end_batch(self, stage: str, trainer: Trainer) -> None:
        """Stop to observe."""
        self._end_batch(stage, LightningLoop(trainer))

    @guarded()
    def end_stage(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the record of a run of an evaluation stage."""
        self._finish_stage(stage, LightningLoop(trainer), pl_module)

    # -- details ----------------------------------------------------------------------------------------------------

    def _end_run(self) -> None:
        for name in ("log", "log_dict"):  # the model's, which Lightning hangs on every callback
            vars(self).pop(name, None)
        super()._end_run()

"""The flight recorder: the last observations of a training, written to its folder when something goes wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_monitor.events import SaturationEvent, listed
from attn_monitor.flight_memory import FlightMemory
from attn_monitor.flight_records import Beginning, FlightRecord, Observation, flight_name, to_json, write_flight
from attn_monitor.gradient_norms import GradientNorms
from attn_monitor.lightning_compat import logged_step
from attn_monitor.nonfinite import Turn, broken_heads, where_it_began
from attn_monitor.notices import surviving
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tags import EVENTS_FILE

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

MOST_FILES, MOST_FOR_EVENTS = 8, 4
"""How many files a fit leaves in a folder at most, and how many of them for critical events alone."""
MOST_WAITING = 4096
"""How many losses wait to be read at most, one a batch."""
_EVENT, _LOSS, _LOGITS, _EXCEPTION = "critical event", "loss not finite", "logits not finite", "exception"
_LONGEST = 4000


class FlightRecorder:
    """Keeps the last observations of every head with loss, learning rates and gradient norms, for the moment of need.

    They are written as `attn_monitor_flight_<step>.json` into the folder of every logger that has one, else into the
    trainer's `default_root_dir`: when an event is or becomes critical, when the loss or a logit turns nan or inf, and
    when an exception ends the fit. `attn-monitor report` shows them. A fit leaves 8 files at most, 4 of them for
    critical events alone; after that the latest is replaced. `fast_dev_run` writes nothing.

    On a step that is not observed the recorder keeps a reference to the loss, and nothing else. With the next record
    these losses are read, all at once, so that the step of the first one that is not finite is known if it is among
    the last 4,096 batches. Gradient norms are those of observed steps. Of several processes the first one writes, and
    what it writes is its own: nan in another one reaches its loss with the next update.

    An observation takes 56 bytes a head: 64 observations of 12 x 12 heads take 0.5 MB, of 80 x 64 heads 18 MB, and no
    model takes more than 34 MB. A checkpoint holds the same.

    Args:
        size: How many observations are kept; 0 keeps and writes nothing.
        report: Takes what went wrong, in words.

    Attributes:
        memory: What is kept.
        began: Where numbers that are not finite began in this fit, `None` if all are finite.
        wants_next: Whether the next step should be observed, as a loss was not finite and all logits were; never with
            several processes.
    """

    def __init__(self, size: int = 64, report: Callable[[str], None] = lambda _: None) -> None:
        self.size = size
        self.memory = FlightMemory(size)
        self.began: Beginning | None = None
        self.wants_next = False
        self._report = report
        self._forget_fit()

    def _forget_fit(self) -> None:
        """Let go of what belongs to a running fit."""
        self._running = False
        self._waiting: deque[tuple[int, Tensor, int]] = deque(maxlen=MOST_WAITING)
        self._norms = GradientNorms()
        self._rates: dict[int, list[Any]] = {}
        self._files: dict[int, tuple[list[str], list[Path]]] = {}
        self._told = False
        self._turn: Turn | None = None
        self._logits_broken = False

    def __getstate__(self) -> dict[str, Any]:
        clean = object.__new__(type(self))
        clean.__dict__.update(self.__dict__)
        clean._forget_fit()  # tensors on a device, and optimizers by their address
        return clean.__dict__

    @property
    def paths(self) -> list[Path]:
        """The files of this fit."""
        return [path for _, paths in self._files.values() for path in paths]

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, as plain values and tensors; nothing if `size` is 0."""
        return self.memory.state_dict() if self.size else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; a state that does not fit is ignored, and told of."""
        if not self.size or not state:
            return
        try:
            self.memory.load_state_dict(state)
        except ValueError as error:
            self._report(f"the flight record in the checkpoint is ignored: {error}")

    def start(self) -> None:
        """Begin a fit."""
        self._forget_fit()
        self.began, self.wants_next = None, False
        self._running = self.size > 0

    def keep_loss(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """Keep the loss of a batch, without looking at it.

        Args:
            trainer: The trainer.
            pl_module: The module.
            outputs: What Lightning hands to `on_train_batch_end`.
        """
        if not self._running:
            return
        with surviving(self._report, "keeping a loss"):
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                return
            if pl_module.automatic_optimization:  # a copy, which Lightning divided by the number of batches
                self._waiting.append((logged_step(trainer), loss.detach(), trainer.accumulate_grad_batches))
            else:
                self._waiting.append((logged_step(trainer), loss.detach().clone(), 1))

    def keep_gradients(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Measure the gradients that an optimizer is about to step with, without waiting for the device."""
        if not self._running:
            return
        with surviving(self._report, "measuring the gradients"):
            self._rates[id(optimizer)] = _rates(optimizer)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            # Such an optimizer divides by the scale itself, in its step.
            scaled = scaler is not None and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
            self._norms.take(optimizer, scaled=scaled)

    def record(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        statistics: Mapping[str, AttentionStatistics],
        rule: SaturationRule,
        changed: Sequence[SaturationEvent] = (),
        events: Sequence[SaturationEvent] = (),
    ) -> None:
        """Take in an observed step, and write what is kept if it brought anything critical.

        Args:
            trainer: The trainer.
            pl_module: The module whose modules the layers are named after.
            statistics: The record.
            rule: Gives the saturation ratios.
            changed: The events that are new or became critical.
            events: Every event so far.
        """
        if not self._running:
            return
        step, turned = logged_step(trainer), None
        with surviving(self._report, "reading the losses"):
            turned = self._read_losses()
        with surviving(self._report, "keeping an observation"):
            self.memory.add(self._observation(trainer, pl_module, step, statistics), statistics, rule)
        self._norms.clear()
        self._rates.clear()
        reasons = [_EVENT] if any(event.severity == "critical" for event in changed) else []
        with surviving(self._report, "looking for nan and inf"):
            reasons += self._not_finite(step, statistics, turned)
        # A request of one process alone would have it observe a step that the others do not.
        self.wants_next = turned is not None and not self._logits_broken and trainer.world_size == 1
        if reasons:
            self._write(trainer, step, reasons, rule, events)

    def finish(
        self,
        trainer: Trainer,
        rule: SaturationRule,
        events: Sequence[SaturationEvent] = (),
        error: BaseException | None = None,
    ) -> None:
        """End a fit: read the last losses, and write what is kept if one was not finite or an exception is the end.

        Args:
            trainer: The trainer.
            rule: As in `record`.
            events: As in `record`.
            error: The exception.
        """
        if not self._running:
            return
        with surviving(self._report, "ending the flight record"):
            reasons = [] if error is None else [_EXCEPTION]
            turned = self._read_losses()
            known = [*(step for step, _ in self.memory.losses), *(one.step for one in self.memory.observations)]
            step = max(known, default=0) if error is None else logged_step(trainer)
            if turned is not None:
                earlier = self.began if self._logits_broken else None
                self.began = where_it_began(turned, None, {}, self.memory.largest_logit(), earlier=earlier)
                self._tell(step)
                reasons.append(_LOSS)
            if reasons and known:
                self._write(trainer, step, reasons, rule, events, error)
        self._running = False
        self._waiting.clear()
        self._norms.clear()
        self._rates.clear()

    # -- details ------------------------------------------------------------------------------------------------------

    def _read_losses(self) -> Turn | None:
        """Read the losses that wait, and return the first that is not finite though the one before it was."""
        waiting, self._waiting = self._waiting, deque(maxlen=MOST_WAITING)
        values = _numbers([loss for _, loss, _ in waiting])
        steps: dict[int, list[float]] = {}
        for (step, _, batches), value in zip(waiting, values, strict=True):
            steps.setdefault(step, []).append(value * batches)
        turned = None
        for index, (step, parts) in enumerate(steps.items()):
            loss = sum(parts) / len(parts)
            if math.isfinite(loss):
                self._turn = None
            elif self._turn is None:
                self._turn = Turn(step, loss, exact=index > 0 or len(waiting) < MOST_WAITING)
                turned = turned or self._turn
            self.memory.add_loss(step, loss)
        return turned

    def _observation(
        self, trainer: Trainer, pl_module: LightningModule, step: int, statistics: Mapping[str, AttentionStatistics]
    ) -> Observation:
        norm, layer_norms = self._norms.read(pl_module, statistics)
        rates = [self._rates.get(id(optimizer)) or _rates(optimizer) for optimizer in trainer.optimizers]
        return Observation(
            step=step,
            loss=self.memory.loss_of(step),
            learning_rates=[[float(rate) for rate in group] for group in rates],
            grad_norm=norm,
            layer_grad_norms=layer_norms,
        )

    def _not_finite(self, step: int, statistics: Mapping[str, AttentionStatistics], turned: Turn | None) -> list[str]:
        """Return what turned nan or inf, after finding out where it began."""
        broken = bool(broken_heads(statistics))
        logits_turned = broken and not self._logits_broken
        earlier = self.began if self._logits_broken else None
        self._logits_broken = broken if statistics else self._logits_broken
        if turned is None and not logits_turned:
            return []
        largest = self.memory.largest_logit()
        self.began = where_it_began(turned or self._turn, step, statistics, largest, earlier=earlier)
        if turned is None:  # of logits alone the event tells
            return [_LOGITS]
        self._tell(step)
        return [_LOSS, *([_LOGITS] if logits_turned else [])]

    def _tell(self, step: int) -> None:
        """Tell of the first loss that is not finite, once a fit."""
        if self.began is not None and not self._told:
            self._told = True
            self._report(f"{self.began.text}; what led to it is in {flight_name(step)}")

    def _write(
        self,
        trainer: Trainer,
        step: int,
        reasons: Sequence[str],
        rule: SaturationRule,
        events: Sequence[SaturationEvent],
        error: BaseException | None = None,
    ) -> None:
        """Write what is kept, in place of what was written at the same step."""
        new = step not in self._files
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        if new and set(reasons) == {_EVENT} and len(self._files) >= MOST_FOR_EVENTS:
            return
        with surviving(self._report, "writing the flight record"):
            if new and len(self._files) >= MOST_FILES:
                _, (_, latest) = self._files.popitem()
                for path in latest:
                    path.unlink(missing_ok=True)
            known, paths = self._files.setdefault(step, ([], []))
            known += [reason for reason in reasons if reason not in known]
            text = to_json(
                FlightRecord(
                    step=step,
                    reasons=known,
                    written=datetime.now().astimezone().isoformat(timespec="seconds"),
                    diagnosis=_diagnosis(events),
                    began=self.began,
                    exception="" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST],
                    limit=rule.default_limit,
                    heads=self.memory.heads,
                    head_dims=self.memory.head_dims,
                    observations=self.memory.observations,
                    losses=list(self.memory.losses),
                    tables={name: table.numpy() for name, table in self.memory.tables().items()},
                )
            )
            paths[:] = [write_flight(folder, text, step) for folder in _folders(trainer)]


def _diagnosis(events: Sequence[SaturationEvent]) -> list[str]:
    """Return what the critical events say, all events if there is none."""
    told = [event for event in events if event.severity == "critical"] or events
    return [line.removeprefix("  ") for line in listed(told, where=EVENTS_FILE)]


def _folders(trainer: Trainer) -> list[Path]:
    """Return where the loggers write, or where the trainer does."""
    own = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
    found = [folder for folder in own if isinstance(folder, str)] or [str(trainer.default_root_dir)]
    return [Path(folder) for folder in dict.fromkeys(found) if "://" not in folder]


def _rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the learning rates of an optimizer as they are now, those on a device as copies."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates if rate is not None]


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors of one entry, waiting for each device once."""
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    values = [math.nan] * len(tensors)
    for indices in places.values():
        found = torch.stack([tensors[index].reshape(()) for index in indices]).tolist()
        for index, value in zip(indices, found, strict=True):
            values[index] = float(value)
    return values

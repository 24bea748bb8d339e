"""The flight recorder: the last observations of a training, written to its folder when something goes wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor.events import SaturationEvent, listed
from attn_monitor.flight_memory import FlightMemory
from attn_monitor.flight_records import Beginning, FlightRecord, Observation, flight_name, to_json, write_flight
from attn_monitor.gradient_norms import GradientNorms
from attn_monitor.loop import Loop
from attn_monitor.nonfinite import Turn, broken_heads, where_it_began
from attn_monitor.notices import surviving
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tags import EVENTS_FILE

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
    when an exception ends the fit. What an update with nan makes nan afterwards leaves no file of its own.
    `attn-monitor report` shows them. A fit leaves 8 files at most, 4 of them for critical events alone; after that the
    latest is replaced. `fast_dev_run` writes nothing, nor can a folder that is an address be written to; the
    checkpoints then hold what there is. The files of a second monitor of the same training start with `monitor2_`, as
    its tags do.

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
        wants_next: Whether the next step should be observed, as a loss was not finite and all logits were.
    """

    def __init__(self, size: int = 64, report: Callable[[str], None] = lambda _: None) -> None:
        self.size = size
        self.memory = FlightMemory(size)
        self.began: Beginning | None = None
        self.wants_next = False
        self._report = report
        self._prefix = ""
        self._forget_fit()

    def _forget_fit(self) -> None:
        """Let go of what belongs to a running fit."""
        self._running = False
        self._waiting: deque[tuple[int, Tensor, int]] = deque(maxlen=MOST_WAITING)
        self._norms = GradientNorms()
        self._rates: dict[int, list[Any]] = {}
        self._files: dict[int, tuple[list[str], list[Path]]] = {}
        self._told: set[str] = set()
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

    def start(self, prefix: str = "") -> None:
        """Begin a fit.

        Args:
            prefix: Stands before the names of the files, to tell several monitors of one training apart.
        """
        self._forget_fit()
        self._prefix = prefix
        self.began, self.wants_next = None, False
        self._running = self.size > 0

    def begin_step(self) -> None:
        """Let go of the gradients of an observed step that did not end."""
        self._norms.clear()
        self._rates.clear()

    def keep_loss(self, step: int, loss: object, *, batches: int = 1, copied: bool = False) -> None:
        """Keep the loss of a batch, without looking at it.

        Args:
            step: The x value.
            loss: The loss; what is no tensor with one element is passed over.
            batches: By how many batches of the optimizer step it is divided.
            copied: Whether nobody else writes to it.
        """
        if not self._running:
            return
        with surviving(self._report, "keeping a loss"):
            if isinstance(loss, Tensor) and loss.numel() == 1:
                kept = loss.detach() if copied else loss.detach().clone()
                self._waiting.append((step, kept, batches))

    def keep_gradients(self, optimizer: torch.optim.Optimizer, *, scaled: bool = False) -> None:
        """Measure the gradients that an optimizer is about to step with, without waiting for the device.

        Args:
            optimizer: The optimizer.
            scaled: Whether they still carry the factor of a `GradScaler`.
        """
        if not self._running:
            return
        with surviving(self._report, "measuring the gradients"):
            self._rates[id(optimizer)] = _rates(optimizer)
            self._norms.take(optimizer, scaled=scaled)

    def record(
        self,
        loop: Loop,
        model: nn.Module,
        statistics: Mapping[str, AttentionStatistics],
        rule: SaturationRule,
        changed: Sequence[SaturationEvent] = (),
        events: Sequence[SaturationEvent] = (),
    ) -> None:
        """Take in an observed step, and write what is kept if it brought anything critical.

        Args:
            loop: The loop.
            model: The model whose modules the layers are named after.
            statistics: The record.
            rule: Gives the saturation ratios.
            changed: The events that are new or became critical.
            events: Every event so far.
        """
        if not self._running:
            return
        step, turned = loop.step, None
        with surviving(self._report, "reading the losses"):
            turned = self._read_losses()
        with surviving(self._report, "keeping an observation"):
            self.memory.add(self._observation(loop, model, step, statistics), statistics, rule)
        self._norms.clear()
        self._rates.clear()
        echo, reasons = self._logits_broken, list[str]()
        with surviving(self._report, "looking for nan and inf"):
            reasons = self._not_finite(step, statistics, turned)
            echo = echo or (self._turn is not None and not reasons)
        if any(event.severity == "critical" and not (echo and event.kind == "nonfinite") for event in changed):
            reasons.insert(0, _EVENT)
        self.wants_next = turned is not None and not self._logits_broken
        if reasons:
            self._write(loop, step, reasons, rule, events)
        if _LOSS in reasons or (_LOGITS in reasons and self.memory.loss_of(step) is None):
            self._tell(loop, step)

    def finish(
        self,
        loop: Loop,
        rule: SaturationRule,
        events: Sequence[SaturationEvent] = (),
        error: BaseException | None = None,
    ) -> None:
        """End a fit: read the last losses, and write what is kept if one was not finite or an exception is the end.

        Args:
            loop: The loop.
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
            step = max(known, default=0) if error is None else loop.step
            if turned is not None:
                earlier = self.began if self._logits_broken else None
                self.began = where_it_began(turned, None, {}, self.memory.largest_logit(), earlier=earlier)
                reasons.append(_LOSS)
            if reasons and known:
                self._write(loop, step, reasons, rule, events, error)
            if turned is not None:
                self._tell(loop, step)
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
        self, loop: Loop, model: nn.Module, step: int, statistics: Mapping[str, AttentionStatistics]
    ) -> Observation:
        norm, layer_norms = self._norms.read(model, statistics)
        rates = [self._rates.get(id(optimizer)) or _rates(optimizer) for optimizer in loop.optimizers]
        return Observation(
            step=step,
            loss=self.memory.loss_of(step),
            learning_rates=[[float(rate) for rate in group] for group in rates],
            grad_norm=norm,
            layer_grad_norms=layer_norms,
        )

    def _not_finite(self, step: int, statistics: Mapping[str, AttentionStatistics], turned: Turn | None) -> list[str]:
        """Return what turned nan or inf, after finding out where it began.

        An update with nan makes all heads nan: after a loss that was told of, that is nothing new.
        """
        broken = bool(broken_heads(statistics))
        logits_turned = broken and not self._logits_broken
        earlier = self.began if self._logits_broken else None
        self._logits_broken = broken if statistics else self._logits_broken
        if turned is None and not logits_turned:
            return []
        largest = self.memory.largest_logit()
        began = where_it_began(turned or self._turn, step, statistics, largest, earlier=earlier)
        if turned is None and self._turn is not None and began.basis != "logits":
            return []
        self.began = began
        if turned is None:
            return [_LOGITS]
        return [_LOSS, *([_LOGITS] if logits_turned else [])]

    def _tell(self, loop: Loop, step: int) -> None:
        """Tell of the first loss that is not finite, once a fit, and of the file if one was written.

        Of logits alone it tells where that loss is not known, and no more of them after such a loss.
        """
        about = _LOSS if self.began is not None and self.began.loss else _LOGITS
        if self.began is None or about in self._told or _LOSS in self._told:
            return
        self._told.add(about)
        _, paths = self._files.get(step, ((), ()))
        where = f"; what led to it is in {paths[0].name}" if paths else ""
        if not loop.writes_nothing and not _folders(loop):
            where = f"; what led to it is in the next checkpoint alone, as no file of it is written to {_logs(loop)[0]}"
        self._report(f"{self.began.text}{where}")

    def _write(
        self,
        loop: Loop,
        step: int,
        reasons: Sequence[str],
        rule: SaturationRule,
        events: Sequence[SaturationEvent],
        error: BaseException | None = None,
    ) -> None:
        """Write what is kept, in place of what was written at the same step."""
        new = step not in self._files
        folders = _folders(loop)
        if not folders or not loop.is_global_zero or loop.writes_nothing:
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
            name = flight_name(step, self._prefix)
            paths[:] = [write_flight(folder, text, name) for folder in folders]


def _diagnosis(events: Sequence[SaturationEvent]) -> list[str]:
    """Return what the critical events say, all events if there is none."""
    told = [event for event in events if event.severity == "critical"] or events
    return [line.removeprefix("  ") for line in listed(told, where=EVENTS_FILE)]


def _logs(loop: Loop) -> list[str]:
    """Return where the loggers write, or where the run does: folders and addresses."""
    own = [getattr(logger, "log_dir", None) for logger in loop.loggers]
    found = [folder for folder in own if isinstance(folder, str)] or [loop.root_directory]
    return list(dict.fromkeys(found))


def _folders(loop: Loop) -> list[Path]:
    return [Path(folder) for folder in _logs(loop) if "://" not in folder]


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

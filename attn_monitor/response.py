"""What is done about a judgement: warn, stop, raise, call the user's function, save a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attn_monitor.events import AttentionSaturationError, SaturationEvent
from attn_monitor.judge import Judgement
from attn_monitor.lightning_compat import any_rank, run_directory, stopping_waits
from attn_monitor.notices import Notices, event_lines

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

EventHandler = Callable[[Any, Any, Sequence[SaturationEvent]], None]
"""Called with the trainer, the module and the events."""
Action = Literal["warn", "stop", "raise"] | EventHandler


class Responder:
    """Does what the user wants done, alike on every rank.

    Args:
        action: What to do beside warning, see `AttentionMonitor.on_saturation`.
        save_checkpoint: Whether to save one when the first head is flagged, and one when the first is critical.
        notices: Where what is to be said goes.
    """

    def __init__(self, action: Action, save_checkpoint: bool, notices: Notices) -> None:
        self._action = action
        self._save = save_checkpoint
        self._notices = notices
        self._saved: set[str] = set()

    def respond(self, trainer: Trainer, pl_module: LightningModule, judgement: Judgement, step: int) -> None:
        """Warn of what is new and act on it.

        Raises:
            AttentionSaturationError: If an event became critical and the action is to raise.
        """
        changes = judgement.changes
        affected = [*changes.opened, *changes.escalated]
        critical = [event for event in affected if event.severity == "critical"]
        if self._save:
            self._save_checkpoints(trainer, bool(affected), bool(critical), step)
        acting = self._action in ("stop", "raise") and any_rank(trainer, bool(critical))
        raising = acting and self._action == "raise"
        stopping = acting and self._action == "stop" and not trainer.should_stop
        for text in judgement.findings:
            self._notices.add(text)
        self._tell([str(forecast) for forecast in judgement.forecasts])
        told = critical if raising or stopping else []
        self._tell(event_lines("", [event for event in changes.opened if event not in told], "newly saturated"))
        if not (raising or stopping):
            self._tell(event_lines("", changes.escalated, "now critical"))
        if stopping:
            trainer.should_stop = True
            waits = stopping_waits(trainer)
            start = f"training stops{f' as soon as {waits} allow it' if waits else ''}, "
            elsewhere = [f"{start}attention is critical on another process, whose events are there"]
            self._tell(event_lines(start, critical, "critical") or elsewhere)
        self._notices.say(trainer.is_global_zero)
        if raising:
            raise AttentionSaturationError(critical)
        if callable(self._action) and affected:
            self._action(trainer, pl_module, affected)

    def _tell(self, lines: list[str]) -> None:
        if lines:
            self._notices.add("\n".join(lines))

    def _save_checkpoints(self, trainer: Trainer, flagged: bool, critical: bool, step: int) -> None:
        """Save the training as it is after this step, once when a head is flagged and once when one is critical."""
        occasion = "critical" if any_rank(trainer, critical) else "flagged" if any_rank(trainer, flagged) else ""
        if not occasion or occasion in self._saved:
            return
        self._saved.add(occasion)
        try:
            path = f"{run_directory(trainer)}/checkpoints/attn_monitor-{occasion}-step={step}.ckpt"  # may be a URL
            trainer.save_checkpoint(path)
            self._notices.add(f"step {step}: checkpoint saved, {path}")
        except Exception as error:
            self._notices.add(f"saving a checkpoint at step {step} failed: {type(error).__name__}: {error}")

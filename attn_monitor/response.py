"""What is done about a judgement: warn, stop, raise, call the user's function, save a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from attn_monitor.events import AttentionSaturationError, SaturationEvent
from attn_monitor.judge import Judgement
from attn_monitor.loop import Loop
from attn_monitor.notices import Notices
from attn_monitor.phrases import error_line

EventHandler = Callable[[Any, Any, Sequence[SaturationEvent]], None]
"""Called with the trainer, the model and the events."""
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
        self._latest = ""
        self._refused = False

    def respond(self, loop: Loop, model: Any, judgement: Judgement, step: int) -> None:
        """Warn of what is new and act on it.

        The user's function comes last: what it raises is the user's, reaches the user, and costs nothing of the record.

        Raises:
            AttentionSaturationError: If an event became critical and the action is to raise.
        """
        changes = judgement.changes
        affected = [*changes.opened, *changes.escalated]
        critical = [event for event in affected if event.severity == "critical"]
        if self._save:
            self._save_checkpoints(loop, judgement, bool(affected), bool(critical), step)
        acting = self._action in ("stop", "raise") and loop.any_rank(bool(critical))
        raising = acting and self._action == "raise"
        stopping = acting and self._action == "stop" and not loop.should_stop
        for text in judgement.findings:
            self._notices.add(text)
        self._notices.add_forecasts(judgement.forecasts)
        acting_on = critical if raising or stopping else []
        self._notices.add_events([event for event in affected if event not in acting_on], open_now=changes.open_heads)
        if stopping:
            waits = loop.stop()
            start = f"training stops{f' as soon as {waits} allow it' if waits else ''}, "
            self._notices.add_events(critical, start)
            if not critical:
                self._notices.add(f"{start}attention is critical on another process, whose events are there")
        self._notices.say(loop.is_global_zero)
        if raising:
            raise AttentionSaturationError(critical)
        if callable(self._action) and affected:
            loop.call(self._action, model, affected)

    def _save_checkpoints(self, loop: Loop, judgement: Judgement, flagged: bool, critical: bool, step: int) -> None:
        """Save the training as it is after this step, once when a head is flagged and once when one is critical.

        Not while logits are nan or inf: the weights may be as well, and nobody wants to continue from those.
        """
        occasion = "critical" if loop.any_rank(critical) else "flagged" if loop.any_rank(flagged) else ""
        if not occasion or occasion in self._saved:
            return
        if loop.any_rank(judgement.broken):
            if not self._refused:
                self._refused = True
                self._notices.add(
                    f"step {step}: no checkpoint is saved while logits are nan or inf, since the weights may be too; "
                    + (f"the last one before is {self._latest}" if self._latest else "none was saved before")
                )
            return
        self._saved.add(occasion)
        try:
            path = loop.save_checkpoint(f"attn_monitor-{occasion}-step={step}")
            self._latest = path
            self._notices.add(f"step {step}: checkpoint saved, {path}")
        except Exception as error:
            self._notices.add(f"saving a checkpoint at step {step} failed: {error_line(error)}")

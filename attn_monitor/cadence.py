"""Which training steps are observed: the first, every n-th, and more of them while a head is near its limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PRICE = 10
"""Each step without an extra observation earns one, an extra observation costs so many."""


class Cadence:
    """Decides step by step.

    Extra observations come from an allowance of `extra` steps, which every step without one refills by a tenth. So at
    most `extra` come in a row, and in the long run at most one step in eleven is an extra one.

    Args:
        extra: The allowance, 0 for none.

    Attributes:
        near: Whether a head was near its limit in the last observation.
        urgent: Whether the next step must be observed, whatever the allowance.
        only_first: Whether the step is observed only because it is the first of a fit.
    """

    def __init__(self, extra: int) -> None:
        self.near = False
        self.urgent = False
        self.only_first = False
        self._extra = extra
        self._left = extra * _PRICE
        self._first: int | None = None
        self._decided: tuple[int, bool] | None = None

    def due(self, step: int, every: int) -> bool:
        """Tell whether the step is observed; batches of one optimizer step get one answer.

        Args:
            step: The optimizer steps finished before this one.
            every: Observe every so many steps, 0 for never.
        """
        if self._decided is None or self._decided[0] != step:
            self._decided = step, self._decide(step, every)
        return self._decided[1]

    def give_up(self) -> None:
        """Leave the rest of this step alone: what is left of its batches is not the step."""
        if self._decided is not None:
            self._decided = self._decided[0], False

    def start(self) -> None:
        """Begin a fit: its first step is observed."""
        self._first = None
        self._decided = None

    def forget(self) -> None:
        """Start afresh with another model."""
        self.near, self.urgent, self._left = False, False, self._extra * _PRICE

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain Python values."""
        return {"near": self.near, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory."""
        self.near, self._left = bool(state["near"]), min(int(state["left"]), self._extra * _PRICE)

    def _decide(self, step: int, every: int) -> bool:
        first, self._first = self._first is None, step if self._first is None else self._first
        regular = self.urgent or (every > 0 and (step + 1) % every == 0)
        extra = not regular and self.near and every > 0 and self._left >= _PRICE
        if extra:
            self._left -= _PRICE
        elif not regular:
            self._left = min(self._left + 1, self._extra * _PRICE)
        self.urgent = False
        self.only_first = first and not (regular or extra)
        return first or regular or extra

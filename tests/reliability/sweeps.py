"""Raise at a chosen place of the monitor's own code, while a step is observed."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attn_monitor

PACKAGE = str(Path(attn_monitor.__file__).parent)
STEP = 2
"""The step in which is raised; it is observed, and so was one before and is one after."""


@cache
def exits(code: CodeType) -> frozenset[int]:
    """Return where `with` blocks of a function are left, and `__exit__` is about to be called.

    A tracing function is asked there, but Python handles no signal there: it looks for them behind calls and in loops.
    What is raised there keeps `__exit__` from being called, which Ctrl-C can't do.
    """
    steps = list(dis.get_instructions(code))
    return frozenset(
        one.offset
        for one, two, three in zip(steps, steps[1:], steps[2:], strict=False)
        if one.opname == "LOAD_CONST" and one.argval is None and two.opname == three.opname in ("LOAD_CONST", "DUP_TOP")
        if two.opname == "DUP_TOP" or two.argval is three.argval is None
    )


class Sweep(AbstractContextManager[None]):
    """Follows what our own code does in one step, and raises at one place of it.

    Args:
        error: What to raise; `None` to only look.
        at: The number of the line, counted as they are run, at which to raise.
        function: The function to raise in when it is entered, instead of `at`.
        only: Count lines of functions of this name only.

    Attributes:
        lines: How many lines of ours were run.
        functions: What was entered, in its order.
        raised: Whether the place was reached.
    """

    def __init__(
        self,
        error: Callable[[], BaseException] | None = None,
        *,
        at: int = -1,
        function: CodeType | None = None,
        only: str = "",
    ) -> None:
        self.error, self.at, self.function, self.only = error, at, function, only
        self.lines = 0
        self.functions: dict[CodeType, None] = {}
        self.raised = ""  # the place, once there

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self.functions.setdefault(frame.f_code)
        if frame.f_code is self.function and not self.raised and self.error is not None:
            self._raise(frame)
        counted = self.function is None and self.only in ("", frame.f_code.co_name)
        return self._line if counted else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lasti not in exits(frame.f_code):
            self.lines += 1
            if self.lines == self.at and self.error is not None:
                self._raise(frame)
        return self._line

    def _raise(self, frame: FrameType) -> None:
        name = frame.f_code.co_filename.removeprefix(PACKAGE).lstrip("/")
        self.raised = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        assert self.error is not None
        raise self.error()

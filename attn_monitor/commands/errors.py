"""How a command ends: its status, and what the user reads instead of a traceback."""

from __future__ import annotations

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """A mistake or a failure that one line can tell.

    Args:
        message: What was expected, what came, what to do.
        status: What the process answers: `FAILED`, or `USAGE` for a wrong command line.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

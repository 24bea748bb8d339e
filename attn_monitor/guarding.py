"""The last guard around what a loop calls: an error of ours must not end a training, one of the user's must."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from attn_monitor.events import AttentionSaturationError, AttentionWarning

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class UsersError(Exception):
    """Carries what a function of the user's raised through code of ours.

    Attributes:
        original: What it raised.
    """

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class Guarded(Protocol):
    """Whoever has guarded hooks."""

    def _hook_failed(self, name: str, error: Exception) -> None:
        """Report an error of ours and leave nothing behind; must not raise."""


def guarded(*, again: bool = False) -> Callable[[_Hook], _Hook]:
    """Return a decorator for a hook, which lets pass what is meant for the user and reports every other error.

    Meant for the user are `AttentionSaturationError`, an `AttentionWarning` where warnings are errors, and what a
    `UsersError` carries.

    Args:
        again: Whether a hook that failed is tried once more, since other processes count on what it does.
    """

    def decorate(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def run(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            left = 2 if again else 1
            while True:
                left -= 1
                try:
                    return hook(self, *args, **kwargs)
                except (AttentionSaturationError, AttentionWarning):
                    raise
                except UsersError as carried:
                    theirs = carried.original
                    break
                except Exception as error:
                    if not left:
                        self._hook_failed(hook.__name__, error)
                        return None
            raise theirs

        return run  # type: ignore[return-value] # the same signature

    return decorate

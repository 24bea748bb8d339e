"""Hooks on the user's modules, of which copies of the model get nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def nothing(*_: Any) -> None:
    """What becomes of a hook in a copied or unpickled model."""


def _inert() -> Callable[..., None]:
    return nothing


class Hook:
    """A hook that is inert in copies of the model: they must not report to this monitor.

    Args:
        function: What is called, with what torch hands to the hook.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *call: Any) -> None:
        """Call the function."""
        self.function(*call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()

"""Checks of settings: what was expected, what came, what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

STAGES = ("train", "validate", "test", "predict")
ACTIONS = ("warn", "stop", "raise")


def check_count(name: str, value: object, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` expects a whole number, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"`{name}` expects a whole number of at least {least}, got {value}.")


def check_max_queries(max_queries: object) -> None:
    """Raise where `max_queries` is neither `None` nor a positive integer."""
    if max_queries is None:
        return
    if isinstance(max_queries, bool) or not isinstance(max_queries, int):
        raise TypeError(f"`max_queries` expects a positive integer or None, got {max_queries!r}.")
    if max_queries < 1:
        raise ValueError(f"`max_queries` expects a positive integer or None, got {max_queries}.")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` expects True or False, got {value!r}.")


def check_action(action: object) -> None:
    """Raise unless `action` is something `on_saturation` can do."""
    expected = f"`on_saturation` expects one of {list(ACTIONS)} or a callable (trainer, pl_module, events)"
    if isinstance(action, type):
        raise TypeError(f"{expected}, got the class {action.__name__}. Pass an instance or a function.")
    if callable(action):
        if not takes(action, 3):
            raise TypeError(f"{expected}, got {describe(action)}, which cannot be called with three arguments.")
    elif not isinstance(action, str):
        advice = ' Leave it out, or write "warn", to be warned only.' if action is None else ""
        raise TypeError(f"{expected}, got {action!r} of type {type(action).__name__}.{advice}")
    elif action not in ACTIONS:
        raise ValueError(f"{expected}, got {action!r}.")


def takes(function: Callable[..., Any], count: int) -> bool:
    """Tell whether a function can be called with that many arguments, as far as it says what it takes.

    Example:
        >>> takes(lambda name, module: True, 2), takes(lambda module: True, 2), takes(print, 2)
        (True, False, True)
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C do not say
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def check_stages(stages: Iterable[str]) -> tuple[str, ...]:
    """Return the stages in their usual order.

    Raises:
        TypeError: If `stages` is a single string or no collection.
        ValueError: If it is empty or holds an unknown stage.
    """
    if isinstance(stages, str):
        raise TypeError(f"`stages` expects a collection of stage names, got {stages!r}. Write stages=({stages!r},).")
    if not isinstance(stages, Iterable):
        raise TypeError(f"`stages` expects a collection of some of {list(STAGES)}, got {stages!r}.")
    chosen: list[object] = list(stages)
    if odd := [stage for stage in chosen if not isinstance(stage, str)]:
        raise TypeError(f"`stages` expects names of stages, some of {list(STAGES)}, got {odd[0]!r}.")
    if unknown := [stage for stage in chosen if stage not in STAGES]:
        raise ValueError(f"`stages` expects some of {list(STAGES)}, got {unknown[0]!r}.")
    if not chosen:
        raise ValueError(f"`stages` is empty, so nothing would ever be observed. Choose from {list(STAGES)}.")
    return tuple(stage for stage in STAGES if stage in chosen)


def describe(setting: object) -> str:
    """Return a text for a setting that is the same in every process: functions by name and place, not by address."""
    if isinstance(setting, (list, tuple)):
        return f"[{', '.join(describe(item) for item in setting)}]"
    if isinstance(setting, str) or setting is None:
        return repr(setting)
    name = f"{getattr(setting, '__module__', '')}.{getattr(setting, '__qualname__', type(setting).__qualname__)}"
    code = getattr(setting, "__code__", None)
    return f"{name}:{code.co_firstlineno}" if code is not None else name

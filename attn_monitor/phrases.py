"""Phrases that many texts share. Needs nothing."""

from __future__ import annotations

from collections.abc import Sequence


def error_line(error: BaseException) -> str:
    r"""Return an error in one line: what torch has to say besides can be pages.

    Example:
        >>> error_line(ValueError("no data\nand more")), error_line(KeyboardInterrupt())
        ('ValueError: no data', 'KeyboardInterrupt')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def count(number: int, noun: str) -> str:
    """Return how many there are, with the noun in its number.

    Example:
        >>> count(1, "head"), count(2, "head")
        ('1 head', '2 heads')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int, noun: str = "") -> str:
    """Return the first names, and how many others there are.

    Args:
        names: All of them.
        most: How many are listed.
        noun: What the others are called.

    Example:
        >>> some(["a", "b", "c"], 2), some(["a", "b", "c"], 1, "layer")
        ('a, b and 1 more', 'a and 2 more layers')
    """
    others = len(names) - most
    more = count(others, f"more {noun}") if noun else f"{others} more"
    return f"{', '.join(names[:most])}{f' and {more}' if others > 0 else ''}"

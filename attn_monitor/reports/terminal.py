"""What goes to a terminal: text it can show, and a bar that tells how far a long task is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    r"""Return text that cannot steer a terminal: what is not printable is escaped, the ends of lines too.

    Example:
        >>> printable("layer \x1b[31mred")
        'layer \\x1b[31mred'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def say(text: str, *, error: bool = False) -> None:
    """Print lines, with escapes for what the terminal should not or, by its encoding, cannot show."""
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = "\n".join(map(printable, text.split("\n")))
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


@contextmanager
def progress_bar(task: str, size: int) -> Iterator[Callable[[int], object]]:
    """Show on a terminal how many of `size` bytes are done, and nothing elsewhere; the result takes further bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # ships no hints

    with tqdm(total=size, desc=task, unit="B", unit_scale=True, leave=False, disable=None, file=sys.stderr) as bar:
        yield bar.update

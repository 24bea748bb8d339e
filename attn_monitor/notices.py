"""What the monitor has to say: collected where it happens, said once a run, where nothing of ours is caught."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from attn_monitor.events import AttentionWarning, SaturationEvent, listed


@contextmanager
def surviving(report: Callable[[str], None], doing: str) -> Iterator[None]:
    """Report an error instead of raising it: what the monitor does must not end a training."""
    try:
        yield
    except Exception as error:
        report(f"{doing} failed: {type(error).__name__}: {error}")


class Notices:
    """Texts that wait to be said, and the memory of those that were."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._said: set[str] = set()
        self._layers: set[tuple[str, str]] = set()

    def add(self, text: str) -> None:
        """Have something to say."""
        self._waiting.append(text)

    def add_layers(self, start: str, texts: Mapping[str, str]) -> None:
        """Have something to say about layers, in one text; each layer once for each start."""
        new = {layer: text for layer, text in texts.items() if (start, layer) not in self._layers}
        self._layers.update((start, layer) for layer in new)
        if new:
            self.add(f"{start}: {', '.join(f'{layer} ({text})' for layer, text in new.items())}")

    def say(self, aloud: bool) -> None:
        """Warn of everything that waits and was not said before; drop it if not `aloud`."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            if text not in self._said:
                self._said.add(text)
                if aloud:
                    # Without a place: a line of this package would tell the user nothing.
                    message = AttentionWarning(f"AttentionMonitor: {text}")
                    warnings.warn_explicit(message, AttentionWarning, filename="attn_monitor", lineno=1)

    def forget_said(self) -> None:
        """Start a run in which everything may be said again."""
        self._said.clear()
        self._layers.clear()


def event_lines(start: str, events: Sequence[SaturationEvent], what: str) -> list[str]:
    """Return the lines of a warning of events, the worst heads first."""
    noun = "head is" if len(events) == 1 else "heads are"
    return [f"{start}{len(events)} {noun} {what}:", *listed(events)] if events else []

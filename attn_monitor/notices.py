"""What the monitor has to say: collected where it happens, said once a run, where nothing of ours is caught."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from attn_monitor.events import (
    LISTED_ALOUD,
    AttentionWarning,
    SaturationEvent,
    Topic,
    by_topic,
    heading,
    listed,
    worst_first,
)
from attn_monitor.forecast import Forecast
from attn_monitor.phrases import count, error_line, some

_News = TypeVar("_News")
_LISTED_LAYERS = 5
"""How many layers are named for one reason."""
_LISTED_REASONS = 5
"""How many reasons a text about layers has."""


@contextmanager
def surviving(report: Callable[[str], None], doing: str) -> Iterator[None]:
    """Report an error instead of raising it: what the monitor does must not end a training."""
    try:
        yield
    except Exception as error:
        report(f"{doing} failed: {error_line(error)}")


class Notices:
    """Texts that wait to be said, and the memory of those that were.

    Nothing is said twice. Of events and forecasts the first of a topic are told in full, and further ones in a line
    each time their number has doubled: a model has thousands of heads, and one cause often takes most of them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, str]] = []  # what it is about, and the text
        self._said: set[str] = set()
        self._layers: set[tuple[str, str, str]] = set()
        self._events: dict[Topic, _Doubling[SaturationEvent]] = {}
        self._heads: dict[Topic, set[tuple[str, int]]] = {}  # those that were told of or counted
        self._remedies: set[tuple[Topic, str]] = set()
        self._advice: set[str] = set()
        self._forecasts: _Doubling[Forecast] = _Doubling()

    def add(self, text: str) -> None:
        """Have something to say."""
        self._waiting.append((_without_details(text), text))

    def add_layers(self, start: str, texts: Mapping[str, str]) -> None:
        """Have something to say about layers, in one text; of each layer once for each start and kind of reason."""
        new = {layer: text for layer, text in texts.items() if (start, layer, _kind(text)) not in self._layers}
        self._layers.update((start, layer, _kind(text)) for layer, text in new.items())
        if new:
            text = f"{start}: {_by_reason(new)}"
            self._waiting.append((text, text))

    def add_events(self, events: Sequence[SaturationEvent], start: str = "", open_now: int | None = None) -> None:
        """Have something to say about events.

        Args:
            events: Those that are new or became critical at one step.
            start: What follows from them, if anything; then they are told in full whatever was told before.
            open_now: How many heads have an open event, if that is known.
        """
        for topic, found in by_topic(events).items():
            counted = self._events.setdefault(topic, _Doubling())
            first = not counted.total
            news = counted.take(found, start != "")
            if first or start:
                self.add("\n".join([f"{start}{heading(topic, len(news))}:", *listed(news, most=LISTED_ALOUD)]))
            elif news:
                self.add(self._further(topic, news, counted, open_now))
            self._heads.setdefault(topic, set()).update(map(_head, news))
            self._remedies.update((topic, event.remedy) for event in worst_first(news)[:LISTED_ALOUD])
            start = ""

    def add_forecasts(self, forecasts: Sequence[Forecast]) -> None:
        """Have something to say about heads on their way to the limit."""
        first = not self._forecasts.total
        news = self._forecasts.take(forecasts)
        soonest = sorted(news, key=lambda forecast: forecast.expected)
        told = soonest[: LISTED_ALOUD if first else 1]
        if not told:
            return
        lines = []
        for remedy in dict.fromkeys(forecast.remedy for forecast in told):
            group = [forecast for forecast in told if forecast.remedy == remedy]
            lines += [forecast.line for forecast in group]
            if remedy not in self._advice:
                lines.append(f"  {group[0].advice}")
            self._advice.add(remedy)
        if more := len(news) - len(told):
            lines.append(f"  and {more} more {'head is' if more == 1 else 'heads are'} on the way to the limit")
        self.add("\n".join(lines))

    def say(self, aloud: bool) -> None:
        """Warn of everything that waits and was not said before; drop it if not `aloud`."""
        waiting, self._waiting = self._waiting, []
        for about, text in waiting:
            if about not in self._said:
                self._said.add(about)
                if aloud:
                    # Without a place: a line of this package would tell the user nothing.
                    message = AttentionWarning(text)
                    warnings.warn_explicit(message, AttentionWarning, filename="attn_monitor", lineno=1)

    def forget_said(self) -> None:
        """Start a run in which everything may be said again."""
        for memory in (self._said, self._layers, self._events, self._heads, self._remedies, self._advice):
            memory.clear()
        self._forecasts = _Doubling()

    def _further(
        self,
        topic: Topic,
        news: Sequence[SaturationEvent],
        counted: _Doubling[SaturationEvent],
        open_now: int | None,
    ) -> str:
        """Return a line of events that came after the first; another if the worst of them needs something else."""
        worst = worst_first(news)[0]
        heads, known_heads = set(map(_head, news)), self._heads.get(topic, set())
        told = heading(topic, len(heads - known_heads), more=True, again=len(heads & known_heads))
        recovered = open_now is not None and open_now < len(heads | known_heads)
        still = f", {count(open_now or 0, 'head')} flagged now" if recovered else ""
        which = "at" if len(news) == 1 else "the worst at"
        text = f"{told} ({counted.total} events so far{still}), {which} step {worst.latest}: "
        known = (topic, worst.remedy) in self._remedies
        return text + worst.finding + ("" if known or not worst.explanation else f"\n  {worst.explanation}")


def _head(event: SaturationEvent) -> tuple[str, int]:
    return event.layer, event.head


class _Doubling(Generic[_News]):
    """Keeps news back until there are as many as all that were told before.

    Attributes:
        total: How many there were so far.
    """

    def __init__(self) -> None:
        self.total = 0
        self._told = 0
        self._waiting: list[_News] = []

    def take(self, news: Sequence[_News], now: bool = False) -> list[_News]:
        """Take in news, and return what is to be told `now`, or since their number has doubled."""
        self.total += len(news)
        self._waiting += news
        if not now and self.total < 2 * self._told:
            return []
        self._told = self.total
        told, self._waiting = self._waiting, []
        return told


def _by_reason(texts: Mapping[str, str]) -> str:
    """Return layers with what is said of them, those of which the same is said together; a model may have hundreds."""
    groups: dict[str, list[str]] = {}
    for layer, text in texts.items():
        groups.setdefault(text, []).append(layer)
    shown = list(groups.items())[:_LISTED_REASONS]
    parts = [f"{some(layers, _LISTED_LAYERS)} ({text})" for text, layers in shown]
    if others := len(texts) - sum(len(layers) for _, layers in shown):
        parts.append(f"and {count(others, 'more layer')} for other reasons")
    return "; ".join(parts)


def _kind(reason: str) -> str:
    """Return what a reason is about: numbers in it, such as those of heads and tokens, make no other one."""
    return re.sub(r"\d+", "#", reason)


def _without_details(text: str) -> str:
    """Return what a text is about: an error that comes back at other steps, or in other words, is the same."""
    failure = re.match(r".*? failed[^:]*: \w+", text)
    return re.sub(r"\d+", "#", failure[0]) if failure else text

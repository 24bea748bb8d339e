"""What a run told of its heads: events as they are stored, in an order for readers, and counted in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from attn_monitor.views import settle

EventRecord = Mapping[str, object]


def read_events(path: Path, notes: list[str]) -> list[EventRecord]:
    """Return the events of a file; a run that was resumed at an earlier step takes back what it told of later ones.

    Args:
        path: The file.
        notes: Takes, in words, what of it could not be read.
    """
    steps: list[tuple[int, dict[object, EventRecord]]] = []
    damaged = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        notes.append(f"{path} could not be read: {error.strerror or error}")
        return []
    for line in filter(str.strip, lines):
        event = _parsed(line)
        step = event.get("step")
        if not (isinstance(step, int) and isinstance(event.get("layer"), str) and isinstance(event.get("head"), int)):
            damaged += 1
            continue
        if not steps or steps[-1][0] != step:
            steps.append((step, {}))
        steps[-1][1][(*place(event), event.get("kind"), str(event.get("state")))] = event
    if damaged:
        notes.append(f"{path}: {count(range(damaged), 'line')} without an event left out")
    return worst_first([event for _, events in settle(steps) for event in events.values()])


def _parsed(line: str) -> EventRecord:
    try:
        event = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def worst_first(events: Iterable[EventRecord]) -> list[EventRecord]:
    """Return events with the worst head first among those that say the same of one step, as the log does."""
    groups = groupby(events, lambda event: (event.get("step"), event.get("state")))
    return [event for _, group in groups for event in sorted(group, key=_badness, reverse=True)]


def _badness(event: EventRecord) -> float:
    """Return the ratio by its limit; where none could be stored, it was not finite."""
    ratio, limit = number(event, "ratio"), number(event, "threshold")
    if math.isnan(ratio):
        return math.inf
    return ratio / limit if limit > 0 else ratio


def number(event: EventRecord, name: str) -> float:
    """Return a number of an event, nan where there is none."""
    value = event.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def event_lines(events: Sequence[EventRecord]) -> list[str]:
    """Return which event came first, and how many heads there were; nothing where no head was flagged."""
    opened = [event for event in worst_first(events) if event.get("state") == "opened"]
    if not opened:
        return []
    flagged = {place(event) for event in opened}
    critical = {place(event) for event in events if event.get("severity") == "critical"}
    return [
        f"  first event: {opened[0].get('message') or _plain(opened[0])}",
        f"  {count(flagged, 'head')} flagged, {len(critical)} of them critical, {len(open_heads(events))} still open "
        "at the end",
    ]


def _plain(event: EventRecord) -> str:
    return f"step {event.get('step')}: head {event.get('head')} of {event.get('layer')}"


def place(event: EventRecord) -> tuple[object, object]:
    """Return the layer and the head of an event."""
    return event.get("layer"), event.get("head")


def open_heads(events: Iterable[EventRecord]) -> set[tuple[object, object]]:
    """Return the heads that have an event of some kind which did not end."""
    last = {(place(event), event.get("kind")): event.get("state") for event in events}
    return {head for (head, _), state in last.items() if state != "ended"}


def count(things: Iterable[object], noun: str) -> str:
    """Return how many there are, with the noun in its number."""
    number = len(list(things))
    return f"{number} {noun}{'' if number == 1 else 's'}"

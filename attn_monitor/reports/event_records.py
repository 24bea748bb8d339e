"""What a run told of its heads: events as they are stored, in an order for readers, and counted in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attn_monitor.stored_events import EventRecord, names_a_head, parsed, worst_first
from attn_monitor.views import settle


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
        event = parsed(line)
        step = event.get("step")
        if not (isinstance(step, int) and names_a_head(event)):
            damaged += 1
            continue
        if not steps or steps[-1][0] != step:
            steps.append((step, {}))
        steps[-1][1][(*place(event), event.get("kind"), str(event.get("state")))] = event
    if damaged:
        notes.append(f"{path}: {count(range(damaged), 'line')} without an event left out")
    return worst_first([event for _, events in settle(steps) for event in events.values()])


def event_lines(events: Sequence[EventRecord]) -> list[str]:
    """Return which event came first, and how many heads there were; nothing where no head was flagged."""
    opened = [event for event in worst_first(events) if event.get("state") == "opened"]
    if not opened:
        return []
    flagged = {place(event) for event in opened}
    critical = {place(event) for event in events if event.get("severity") == "critical"}
    critically = ", critical" if opened[0].get("severity") == "critical" else ""
    return [
        f"  first event{critically}: {opened[0].get('message') or _plain(opened[0])}",
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

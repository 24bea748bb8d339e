"""What a run told: events as they are stored, in an order for readers and counted in words, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attn_monitor.phrases import count
from attn_monitor.stored_events import EventRecord, NoteRecord, is_note, names_a_head, parsed, worst_first
from attn_monitor.tags import NOTES_FILE
from attn_monitor.views import settle

_LISTED = 5
"""How many notes a summary lists."""


def read_events(path: Path, notes: list[str]) -> list[EventRecord]:
    """Return the events of a file; a run that was resumed at an earlier step takes back what it told of later ones.

    Args:
        path: The file.
        notes: Takes, in words, what of it could not be read.
    """

    def what(event: EventRecord) -> object:
        return (*place(event), event.get("kind"), str(event.get("state")))

    return worst_first(_read(path, names_a_head, what, "an event", notes))


def read_notes(path: Path, notes: list[str]) -> list[NoteRecord]:
    """Return the notes of a file, as `read_events` does its events."""
    return _read(path, is_note, lambda note: note.get("note"), "a note", notes)


def _read(
    path: Path,
    wanted: Callable[[Mapping[str, object]], bool],
    what: Callable[[Mapping[str, object]], object],
    noun: str,
    notes: list[str],
) -> list[Mapping[str, object]]:
    """Return the records of a file; of one step, the last of each `what`."""
    steps: list[tuple[int, dict[object, Mapping[str, object]]]] = []
    damaged = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        notes.append(f"{path} could not be read: {error.strerror or error}")
        return []
    for line in filter(str.strip, lines):
        record = parsed(line)
        step = record.get("step")
        if not (isinstance(step, int) and wanted(record)):
            damaged += 1
            continue
        if not steps or steps[-1][0] != step:
            steps.append((step, {}))
        steps[-1][1][what(record)] = record
    if damaged:
        notes.append(f"{path}: {count(damaged, 'line')} without {noun} left out")
    return [record for _, records in settle(steps) for record in records.values()]


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
        f"  {count(len(flagged), 'head')} flagged, {len(critical)} of them critical, "
        f"{len(open_heads(events))} still open at the end",
    ]


def note_lines(notes: Sequence[NoteRecord], *, events: bool) -> list[str]:
    """Return what was said beside the events, if there were `events`: the first of it, and how much more there is."""
    if not notes:
        return []
    lines = [f"    step {note.get('step')}: {_without_step(note)}" for note in notes[:_LISTED]]
    more = [f"    and {len(notes) - _LISTED} more, all in {NOTES_FILE}"] if len(notes) > _LISTED else []
    return ["  noted beside them:" if events else "  but noted:", *lines, *more]


def _without_step(note: NoteRecord) -> str:
    """Return the text of a note, without the step that some begin with."""
    return str(note.get("note")).removeprefix(f"step {note.get('step')}: ")


def _plain(event: EventRecord) -> str:
    return f"step {event.get('step')}: head {event.get('head')} of {event.get('layer')}"


def place(event: EventRecord) -> tuple[object, object]:
    """Return the layer and the head of an event."""
    return event.get("layer"), event.get("head")


def open_heads(events: Iterable[EventRecord]) -> set[tuple[object, object]]:
    """Return the heads that have an event of some kind which did not end."""
    last = {(place(event), event.get("kind")): event.get("state") for event in events}
    return {head for (head, _), state in last.items() if state != "ended"}

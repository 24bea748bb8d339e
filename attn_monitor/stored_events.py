"""Events and notes as a run stores them: JSON that is read back whatever became of it, in an order for readers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

EventRecord = Mapping[str, object]
NoteRecord = Mapping[str, object]
"""What was said of a step beside its events: `step` and `note`, the text in one line."""


def note_records(step: int, notes: Sequence[str]) -> list[str]:
    """Return what was said of a step as JSON, one object per note."""
    return [json.dumps({"step": step, "note": _in_one_line(note)}) for note in notes]


def is_note(record: Mapping[str, object]) -> bool:
    """Tell whether a record is a note."""
    return isinstance(record.get("note"), str) and isinstance(record.get("step"), int)


def _in_one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def parsed(text: str) -> dict[str, object]:
    """Return an event that was written as JSON, nothing for anything else: a broken record hides no other."""
    try:
        event = json.loads(text, parse_constant=lambda _: None)  # a browser knows no NaN
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def names_a_head(event: EventRecord) -> bool:
    """Tell whether an event says which head it is of."""
    return isinstance(event.get("layer"), str) and isinstance(event.get("head"), int)


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

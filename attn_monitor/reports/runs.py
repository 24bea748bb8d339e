"""What a directory of runs holds: event files and CSV files become `RunData`. Needs neither torch nor Lightning."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.util.tensor_util import make_ndarray

from attn_monitor.flight_records import FLIGHT_FILE
from attn_monitor.phrases import error_line
from attn_monitor.reports.event_files import Damage, read_records
from attn_monitor.reports.event_records import read_events, read_notes
from attn_monitor.reports.flight import Flight, read_flights
from attn_monitor.scales import RATIO
from attn_monitor.stored_events import EventRecord, NoteRecord
from attn_monitor.tags import EVENTS_FILE, HEAD_DIM_TAG, LAYERS_TAG, NOTE_RECORDS_TAG, NOTES_FILE, PLUGIN, RECORDS_TAG
from attn_monitor.views import PREFIX, RunData, Series, assemble, is_users, run_name, series, stages, threshold_of

_EVENT_FILE = re.compile(r"\.tfevents\.(\d+)")
_CSV = "metrics.csv"
_MONITOR = r"(?P<prefix>(?:monitor\d+_)?)"
_PARTED = re.compile(_MONITOR + "(.*)", re.DOTALL)
_TOLD = {name: re.compile(_MONITOR + re.escape(name)) for name in (EVENTS_FILE, NOTES_FILE)}
_DATED, _NAMES = (RECORDS_TAG, NOTE_RECORDS_TAG), (LAYERS_TAG, HEAD_DIM_TAG)
_TENSOR = re.compile(rf"(?P<prefix>{PREFIX}){PLUGIN}/(?P<name>\w+)")
_OWN_SCALAR = re.compile(
    rb"\x09.{8}(?:\x10[\x80-\xff]*[\x00-\x7f])?"  # wall time, step
    rb"\x2a[\x80-\xff]*[\x00-\x7f]\x0a[\x80-\xff]*[\x00-\x7f]\x0a[\x80-\xff]*[\x00-\x7f]"  # summary, value, tag
    + PREFIX.encode()
    + rb"attn_(?!monitor/)",
    re.DOTALL,
)
"""How a record begins that holds one of our scalars: they say less than the tables and are most of the records."""
_SCALAR_SIZE = 512

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run.

    Attributes:
        name: The path from the directory that was asked for, or that one's own name.
        event_files: TensorBoard's, oldest first.
        csv: That of Lightning's CSVLogger.
        events: The events as plain text, by what stands before the tags of their monitor.
        flights: What the flight recorder left.
        notes: The notes as plain text, like `events`.
    """

    name: str
    event_files: Sequence[Path]
    csv: Path | None
    events: Mapping[str, Path] = field(default_factory=dict)
    flights: Sequence[Path] = ()
    notes: Mapping[str, Path] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes there are to read."""
        paths = [*self.event_files, self.csv, *self.events.values(), *self.notes.values(), *self.flights]
        return sum(path.stat().st_size for path in paths if path is not None)


@dataclass(frozen=True, slots=True)
class ScalarRun:
    """A run without the numbers of single heads: the scalars are all there is.

    Attributes:
        name: As in `RunFiles`.
        source: Where they were read.
        scalars: Ours, by tag.
        others: The user's own, by tag.
        events: What was opened, became critical or ended, oldest first, of one step the worst head first.
        notes: What was said beside them, oldest first.
    """

    name: str
    source: str
    scalars: Mapping[str, Series]
    others: Mapping[str, Series]
    events: Sequence[EventRecord] = ()
    notes: Sequence[NoteRecord] = ()


@dataclass(slots=True)
class Findings:
    """What was found in a directory.

    Attributes:
        runs: The runs with per-head tables, a stage each.
        scalar_runs: The runs with nothing but scalars of ours.
        flights: What the flight recorder left, run by run and oldest first.
        foreign: The names of the runs without anything of ours.
        notes: What was lost on the way, in words.
    """

    runs: list[RunData] = field(default_factory=list)
    scalar_runs: list[ScalarRun] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_runs(directory: Path) -> list[RunFiles]:
    """Return the runs in a directory and below, in the order of their names: `version_2` before `version_10`.

    Raises:
        FileNotFoundError: If there is no such directory.
        NotADirectoryError: If it is something else.
        PermissionError: If it cannot be read.
    """
    if not directory.exists():
        raise FileNotFoundError(f"no directory {directory}: give the one that holds the event files of a run")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file: give the directory it is in")
    os.listdir(directory)  # walking would pass over what it may not read
    return sorted(_runs_below(directory), key=lambda run: _natural(run.name))


def _runs_below(directory: Path) -> Iterator[RunFiles]:
    own = directory.resolve().name
    if not own or (directory / own).exists():  # a run below may have that name
        own = "."
    for folder, _, names in os.walk(directory):
        here = Path(folder)
        known = [name for name in names if (_EVENT_FILE.search(name) or name == _CSV) and (here / name).is_file()]
        flights = [here / name for name in names if FLIGHT_FILE.fullmatch(name) and (here / name).is_file()]
        if known or flights:
            yield RunFiles(
                name=own if here == directory else here.relative_to(directory).as_posix(),
                event_files=[here / name for name in sorted(known, key=_age) if name != _CSV],
                csv=here / _CSV if _CSV in known else None,
                events=_told(here, names, EVENTS_FILE),
                flights=sorted(flights),
                notes=_told(here, names, NOTES_FILE),
            )


def _told(folder: Path, names: Iterable[str], kind: str) -> dict[str, Path]:
    """Return the files of one kind, by what stands before the tags of their monitor."""
    found = {name: match["prefix"] for name in sorted(names) if (match := _TOLD[kind].fullmatch(name))}
    return {prefix: folder / name for name, prefix in found.items() if (folder / name).is_file()}


def _age(name: str) -> tuple[int, list[tuple[int, str]]]:
    match = _EVENT_FILE.search(name)
    return (int(match.group(1)) if match else 0), _natural(name)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_runs(found: Iterable[RunFiles], progress: Progress = lambda _: None) -> Findings:
    """Read runs.

    Args:
        found: What `find_runs` returned.
        progress: Takes numbers of bytes, as they are read.
    """
    findings = Findings()
    for files in found:
        _try_to_read(files, findings, progress)
    return findings


def _try_to_read(files: RunFiles, findings: Findings, progress: Progress) -> None:
    """Read a run; whatever was written there, it must not hide the others."""
    try:
        _read_run(files, findings, progress)
    except Exception as error:
        findings.notes.append(f"{files.name} could not be read, {error_line(error)}")


def _read_run(files: RunFiles, findings: Findings, progress: Progress) -> None:
    stored, notes = _Stored(), list[str]()
    for path in files.event_files:
        _read_event_file(path, stored, notes, progress, skip=_OWN_SCALAR)
    if not stages(stored.tensors):
        stored, notes = _Stored(), []
        for path in files.event_files:  # once more: our scalars, which were passed over, may be all there is
            _read_event_file(path, stored, notes, lambda _: None, skip=None)
    source = "event files"
    if files.csv is not None:
        if not stages(stored.tensors) and all(map(is_users, stored.scalars)):
            stored, source = _read_csv(files.csv, notes), _CSV
        progress(files.csv.stat().st_size)
    progress(sum(path.stat().st_size for path in (*files.events.values(), *files.notes.values())))
    flights = read_flights(files.name, files.flights, notes)
    progress(sum(path.stat().st_size for path in files.flights))
    scalars = {tag: series(points) for tag, points in stored.scalars.items()}
    users = {tag: points for tag, points in scalars.items() if is_users(tag)}
    own = {tag: points for tag, points in scalars.items() if not is_users(tag)}
    if prefixes := stages(stored.tensors):
        findings.runs += [
            assemble(files.name, stored.tensors, users, threshold=stored.thresholds.get(prefix), prefix=prefix)
            for prefix in prefixes
        ]
    elif own:
        findings.scalar_runs += _scalar_runs(files, source, own, users, notes)
    elif not flights:
        findings.foreign.append(files.name)
    findings.flights += flights
    findings.notes += notes


def _scalar_runs(
    files: RunFiles, source: str, own: Mapping[str, Series], users: Mapping[str, Series], notes: list[str]
) -> Iterator[ScalarRun]:
    """Yield the scalars monitor by monitor, without what stands before the tags of the second one on."""
    parted: dict[str, dict[str, Series]] = {}
    for tag, points in own.items():
        prefix, rest = _PARTED.fullmatch(tag).groups()  # type: ignore[union-attr] # it matches every text
        parted.setdefault(prefix, {})[rest] = points
    for prefix, scalars in sorted(parted.items(), key=lambda item: _natural(item[0])):
        events = read_events(files.events[prefix], notes) if prefix in files.events else []
        told = read_notes(files.notes[prefix], notes) if prefix in files.notes else []
        yield ScalarRun(run_name(files.name, prefix), source, scalars, users, events, told)


@dataclass(slots=True)
class _Stored:
    """The values of a run by tag, in the order they were written."""

    tensors: dict[str, list[tuple[int, NDArray[Any]]]] = field(default_factory=dict)
    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    thresholds: dict[str, float | None] = field(default_factory=dict)
    """By stage."""
    plugins: dict[str, str] = field(default_factory=dict)
    """By tag: only its first event need say so."""
    newest: dict[str, int] = field(default_factory=dict)
    """The last step of the tables by stage."""

    def add_tensor(self, tag: str, prefix: str, step: int, array: NDArray[Any]) -> None:
        """Take in an array; a run that was resumed at an earlier step takes back what it told of later ones."""
        if tag.removeprefix(prefix) not in _NAMES:
            if step < self.newest.get(prefix, step):
                for dated in _DATED:
                    told = self.tensors.get(f"{prefix}{dated}", [])
                    told[:] = [(earlier, batch) for earlier, batch in told if earlier < step]
            self.newest[prefix] = step
        self.tensors.setdefault(tag, []).append((step, array))


def _read_event_file(
    path: Path, stored: _Stored, notes: list[str], progress: Progress, skip: re.Pattern[bytes] | None
) -> None:
    def wanted(payload: bytes) -> bool:
        return skip is None or len(payload) > _SCALAR_SIZE or not skip.match(payload)

    damage = Damage()
    try:
        for payload in read_records(path, wanted, damage, progress):
            damage.records += not _take(payload, stored)
    except OSError as error:
        notes.append(f"{path} could not be read: {error.strerror or error}")
    if words := str(damage):
        notes.append(f"{path}: {words}")


def _take(payload: bytes, stored: _Stored) -> bool:
    """Take in a record and tell whether it could be read."""
    try:
        _take_event(Event.FromString(payload), stored)
    except Exception:  # whatever a record makes of a parser, the next one may be fine
        return False
    return True


def _take_event(event: Any, stored: _Stored) -> None:
    for value in event.summary.value:
        tag, kind = value.tag, value.WhichOneof("value")
        if kind == "simple_value":
            stored.scalars.setdefault(tag, []).append((event.step, value.simple_value))
        elif kind == "tensor":
            _take_tensor(tag, value, event.step, stored)


def _take_tensor(tag: str, value: Any, step: int, stored: _Stored) -> None:
    plugin = value.metadata.plugin_data.plugin_name or stored.plugins.get(tag, "")
    stored.plugins[tag] = plugin
    if plugin == "scalars":
        stored.scalars.setdefault(tag, []).append((step, float(make_ndarray(value.tensor))))
    elif plugin in (PLUGIN, "") and (match := _TENSOR.fullmatch(tag)):  # the event that told may be lost
        if match["name"] == RATIO and match["prefix"] not in stored.thresholds:
            stored.thresholds[match["prefix"]] = threshold_of(value.metadata.plugin_data.content)
        stored.add_tensor(tag, match["prefix"], step, make_ndarray(value.tensor))


def _read_csv(path: Path, notes: list[str]) -> _Stored:
    """Read the scalars of Lightning's CSVLogger: a column a tag, empty where a row has no value."""
    stored = _Stored()
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.DictReader(file, restval="")
            for row in rows:
                _take_row(row, stored)
    except (OSError, csv.Error) as error:
        notes.append(f"{path}: the rest could not be read: {error}")
    return stored


def _take_row(row: Mapping[str, str], stored: _Stored) -> None:
    step = _number(row.get("step"))
    if step is None or not math.isfinite(step):
        return
    for tag, text in row.items():
        if tag not in (None, "step", "epoch") and (value := _number(text)) is not None:
            stored.scalars.setdefault(tag, []).append((int(step), value))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None

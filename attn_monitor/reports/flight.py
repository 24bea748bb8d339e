"""What the flight recorder left, in words, and as a run that the page can draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attn_monitor.events import NONFINITE
from attn_monitor.flight_records import FLIGHT_FILE, FlightRecord, from_json
from attn_monitor.phrases import count
from attn_monitor.reports.summary import aligned, shown
from attn_monitor.reports.terminal import printable
from attn_monitor.scales import RATIO
from attn_monitor.views import RunData, Series, Table, run_name, series

_NONE = "-"
_BROKEN = "nan or inf"
_SHOWN = 8
_MOST_LINES = 12
_MOST_TOLD = 4
"""How many lines of the diagnosis: the file has all of it."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A file of the flight recorder.

    Attributes:
        run: The name of the run in whose folder it is, with the monitor if it is not the first.
        record: What it holds.
    """

    run: str
    record: FlightRecord

    @property
    def name(self) -> str:
        """How its heads are called among the runs of the page."""
        return f"{self.run} (flight record of step {self.record.step})"


def read_flights(run: str, paths: Sequence[Path], notes: list[str]) -> list[Flight]:
    """Return the flight records of a run, monitor by monitor and of each the oldest first.

    Args:
        run: The name of the run.
        paths: The files.
        notes: Takes, in words, what could not be read.
    """
    flights = []
    for path in paths:
        record, named = _read(path, notes), FLIGHT_FILE.fullmatch(path.name)
        if record is not None:
            flights.append(Flight(run_name(run, (named and named["prefix"]) or ""), record))
    return sorted(flights, key=lambda flight: (flight.run != run, flight.run, flight.record.step))


def _read(path: Path, notes: list[str]) -> FlightRecord | None:
    try:
        return from_json(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        notes.append(f"{path} could not be read: {error.strerror or error}")
    except ValueError as error:
        notes.append(f"{path} could not be read: {error}")
    return None


def newest_flights(flights: Sequence[Flight]) -> list[Flight]:
    """Return the last flight record of each run: the others hold less of the same."""
    return list({flight.run: flight for flight in flights}.values())


def summarize_flights(flights: Sequence[Flight], said: Iterable[str] = ()) -> list[str]:
    """Return the last flight record of each run in words, and of those before it when and why they were written.

    Args:
        flights: The records.
        said: The summaries that stand above them; a diagnosis that is all in them is not repeated.
    """
    newest, above = newest_flights(flights), "\n".join(said)
    return [summarize_flight(flight, brief=flight not in newest, said=above) for flight in flights]


def summarize_flight(flight: Flight, *, brief: bool = False, said: str = "") -> str:
    """Return when and why it was written, where nan or inf began, the diagnosis, and the last observations.

    Args:
        flight: The record.
        brief: Whether to leave the last two out, but for a line where there is nothing else to say.
        said: Text that stands above; a diagnosis that is all in it does not stand again.
    """
    record = flight.record
    written = f", written {record.written}" if record.written else ""
    lines = [f"{flight.run}: flight record of step {record.step}{written}: {', '.join(record.reasons)}"]
    if record.exception:
        lines += [f"  {line}" for line in record.exception.splitlines()[:_MOST_LINES]]
    if record.began is not None:
        lines.append(f"  {record.began.text}")
    if brief:
        nothing_else = len(lines) == 1
        return "\n".join(map(printable, [*lines, *(_last_of(record) if nothing_else else [])]))
    told = [line for text in record.diagnosis for line in text.splitlines()]
    if told and all(printable(line.strip()) in said for line in told):
        lines.append("  what was found stands above")
    elif told:  # from the worst head on, whatever of it stands above
        lines += [f"  {line}" for line in told[:_MOST_TOLD]]
        if len(told) > _MOST_TOLD:
            lines.append(f"  and {count(len(told) - _MOST_TOLD, 'line')} more in the file")
    return "\n".join(map(printable, [*lines, *(_last_observations(record) or _last_of(record))]))


def _last_of(record: FlightRecord) -> list[str]:
    """Return the last observation in a line, or the last losses where nothing was observed."""
    if record.observations:
        step, loss, *_, ratio, place = _rows(record)[-1]
        worst = f"largest ratio {ratio}, {place}" if ratio != _NONE else "no ratio was measured"
        worst = f"logits are {_BROKEN} in {place}" if ratio == _BROKEN else worst
        return [f"  {step}: loss {loss}, {worst}" if loss != _NONE else f"  {step}: {worst}"]
    losses = ", ".join(f"{loss:.3g} at step {step}" for step, loss in record.losses[-_MOST_TOLD:])
    return [f"  nothing was observed; the last losses are {losses}" if losses else "  nothing was observed"]


def _last_observations(record: FlightRecord) -> list[str]:
    """Return a table, without the columns that nothing is known of; nothing if that leaves the steps alone."""
    titles = ["last observations", "loss", "learning rate", "gradient norm", "largest ratio", "of"]
    rows = _rows(record)
    known = [index for index in range(len(titles)) if any(row[index] != _NONE for row in rows)]
    if len(known) < 2:
        return []
    return ["", *aligned([[printable(row[index]) for index in known] for row in [titles, *rows]])]


def _rows(record: FlightRecord) -> list[list[str]]:
    """Return step, loss, learning rates, gradient norm, largest ratio and its head of the last observations."""
    ratios = dict(zip((one.step for one in record.tabled), record.tables.get(RATIO, ()), strict=False))
    counts = dict(zip((one.step for one in record.tabled), record.tables.get(NONFINITE, ()), strict=False))
    losses = _losses(record)
    rows = []
    for one in record.observations[-_SHOWN:]:
        rates = [shown(rate) for rates in one.learning_rates for rate in rates]
        rows.append(
            [
                f"step {one.step}",
                losses[one.step],
                " ".join(dict.fromkeys(rates)) or _NONE,
                _number(one.grad_norm),
                *_largest(record, ratios.get(one.step), counts.get(one.step)),
            ]
        )
    return rows


def _losses(record: FlightRecord) -> dict[int, str]:
    """Return the loss of each observation; what a loop logs later is of the only observation that it can be of."""
    steps = [one.step for one in record.observations]
    found = {}
    for one, end in zip(record.observations, [*steps, math.inf][1:], strict=True):
        later = [(step, loss) for step, loss in record.losses if one.step <= step < end]
        if one.loss is not None or not later:
            found[one.step] = _number(one.loss)
        elif later[0][0] == one.step:
            found[one.step] = _number(later[0][1])
        else:
            found[one.step] = f"{_number(later[0][1])} (step {later[0][0]})" if len(later) == 1 else _NONE
    return found


def _number(value: float | None) -> str:
    """Return a number, where nan is one; a dash is what was not measured."""
    return _NONE if value is None else f"{value:.3g}"


def _largest(
    record: FlightRecord, ratios: NDArray[np.float32] | None, counts: NDArray[np.float32] | None
) -> tuple[str, str]:
    """Return the largest ratio of an observation, which may be inf, and whose it is; nan logits are worse than any."""
    if counts is not None and (counts > 0).any():
        broken = np.flatnonzero(counts > 0)
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return _BROKEN, f"{_place(record, int(broken[0]))}{more}"
    if ratios is None or np.isnan(ratios).all():
        return _NONE, _NONE
    column = int(np.nanargmax(ratios))
    return shown(float(ratios[column])), _place(record, column)


def _place(record: FlightRecord, column: int) -> str:
    for layer, heads in record.heads.items():
        if column < heads:
            return f"head {column} of {layer}"
        column -= heads
    return _NONE


def as_run(flight: Flight) -> RunData:
    """Return what it holds as a run: every head, and the curves of losses, learning rates and gradient norms."""
    record = flight.record
    layers, widest = list(record.heads), max(record.heads.values(), default=0)
    steps = np.array([one.step for one in record.tabled], np.int64)
    tables = {}
    for name, values in record.tables.items():
        table = np.full((len(steps), len(layers), widest), np.nan, np.float32)
        start = 0
        for row, heads in enumerate(record.heads.values()):
            table[:, row, :heads] = values[:, start : start + heads]
            start += heads
        tables[name] = Table(steps, table)
    dims = [record.head_dims.get(layer) for layer in layers]
    return RunData(flight.name, layers, dims, record.limit, tables, [], _curves(record))


def _curves(record: FlightRecord) -> dict[str, Series]:
    points: dict[str, list[tuple[int, float]]] = {"loss": list(record.losses)}
    for one in record.observations:
        found: dict[str, float | None] = {"grad_norm": one.grad_norm}
        several = sum(map(len, one.learning_rates)) > 1
        for optimizer, rates in enumerate(one.learning_rates):
            for group, rate in enumerate(rates):
                found[f"learning_rate/optimizer {optimizer} group {group}" if several else "learning_rate"] = rate
        found |= {f"grad_norm/{layer}": norm for layer, norm in one.layer_grad_norms.items()}
        for name, value in found.items():
            if value is not None:
                points.setdefault(name, []).append((one.step, value))
    return {name: series(values) for name, values in points.items() if values}

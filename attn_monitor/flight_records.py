"""The file of the flight recorder: strict JSON for people and for the report. Needs neither torch nor Lightning."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_monitor.phrases import error_line

FLIGHT_FILE = re.compile(r"(?P<prefix>monitor\d+_)?attn_monitor_flight_(\d+)\.json")
_FORMAT, _VERSION = "attn_monitor flight record", 1
_ABOUT = (
    "Oldest observation first. null was not measured, in `tables` it may also be a head without a row to measure; "
    "nan, inf and -inf are strings. learning_rates: a list per optimizer, a number per parameter group. grad_norm: of "
    "all parameters that the optimizers stepped, before clipping; under the Trainer of transformers after it. tables: "
    "a statistic, a layer, a row per observation (the latest ones), a number per head."
)
MOST_NUMBERS = 1_000_000
"""How many numbers of heads a file holds at most, about 8 MB; of larger models it has fewer observations."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was known of one observed step beside its heads; `None` is not measured.

    Attributes:
        step: The x value.
        loss: The training loss, over accumulated batches their mean.
        learning_rates: Of every parameter group of every optimizer, as that step used them.
        grad_norm: Of all parameters that the optimizers stepped, before clipping; under the Trainer of transformers
            after it, so that it is at most `max_grad_norm` there.
        layer_grad_norms: The same of the parameters of each layer's attention.
    """

    step: int
    loss: float | None = None
    learning_rates: Sequence[Sequence[float]] = ()
    grad_norm: float | None = None
    layer_grad_norms: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where numbers that are not finite began, as far as it can be told.

    Attributes:
        step: The step of the first loss that is not finite; of the first such logits, if the loss is not known.
        loss: That loss as text, empty if it is not known.
        seen_at: The observed step whose record was looked at, `None` if there was none afterwards.
        basis: What layer and head are named by: `"logits"`, they are the first in the order of the forward pass whose
            logits are nan or inf; `"largest"`, they had the largest logit in the last finite record, a guess; `"none"`.
        layer: The layer.
        head: The head.
        text: All of it in words.
    """

    step: int
    loss: str = ""
    seen_at: int | None = None
    basis: str = "none"
    layer: str | None = None
    head: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlightRecord:
    """What is written when a training goes wrong.

    Attributes:
        step: The step at which it was written.
        reasons: Why.
        written: When, as ISO 8601 text.
        diagnosis: What was found, in words.
        began: Where numbers that are not finite began.
        exception: The exception that ended the run, empty if there was none.
        limit: The limit of the saturation ratio.
        heads: The number of heads of every layer.
        head_dims: D of query and key by layer, `None` if unknown.
        observations: The last ones, oldest first.
        losses: Steps and losses of the last steps, observed or not.
        tables: By statistic, [observations, heads of all layers side by side], of the latest observations; nan where
            there is no number.
    """

    step: int
    reasons: Sequence[str]
    written: str = ""
    diagnosis: Sequence[str] = ()
    began: Beginning | None = None
    exception: str = ""
    limit: float | None = None
    heads: Mapping[str, int] = field(default_factory=dict)
    head_dims: Mapping[str, int | None] = field(default_factory=dict)
    observations: Sequence[Observation] = ()
    losses: Sequence[tuple[int, float]] = ()
    tables: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def tabled(self) -> Sequence[Observation]:
        """The observations that the rows of the tables are of."""
        rows = max((len(values) for values in self.tables.values()), default=0)
        return self.observations[len(self.observations) - rows :]


def flight_name(step: int, prefix: str = "") -> str:
    """Return the name of the file of a step; the prefix tells several monitors of one training apart."""
    return f"{prefix}attn_monitor_flight_{step}.json"


def write_flight(folder: Path, text: str, name: str) -> Path:
    """Write a record as a whole or not at all, and return its path.

    Args:
        folder: Where to, made if it is not there.
        text: The record.
        name: See `flight_name`.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    write_whole(path, text)
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole or not at all; what was there stays until then.

    Raises:
        OSError: If it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# -- to text -----------------------------------------------------------------------------------------------------------


def to_json(record: FlightRecord) -> str:
    """Return a record as the text of its file: an object whose long parts have a line for each entry."""
    kept = max(MOST_NUMBERS // max(sum(record.heads.values()) * len(record.tables), 1), 1)
    losses = {"steps": [step for step, _ in record.losses], "values": [loss for _, loss in record.losses]}
    parts: dict[str, str] = {
        "format": json.dumps(_FORMAT),
        "version": json.dumps(_VERSION),
        "about": json.dumps(_ABOUT),
        "step": json.dumps(record.step),
        "reasons": json.dumps(list(record.reasons)),
        "written": json.dumps(record.written),
        "diagnosis": _lines("[]", map(json.dumps, record.diagnosis)),
        "began": json.dumps(None if record.began is None else asdict(record.began)),
        "exception": json.dumps(record.exception),
        "limit": _strict(record.limit),
        "heads": json.dumps(dict(record.heads)),
        "head_dims": json.dumps(dict(record.head_dims)),
        "observations": _lines("[]", (_strict(asdict(one)) for one in record.observations)),
        "losses": _strict(losses),
        "tables": _lines(
            "{}", (f"{json.dumps(name)}: {_table(record, name, kept)}" for name in record.tables), indent="  "
        ),
    }
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def _lines(brackets: str, entries: Iterable[str], indent: str = " ") -> str:
    inside = ",\n".join(f"{indent}{entry}" for entry in entries)
    return f"{brackets[0]}\n{inside}\n{brackets[1]}" if inside else brackets


def _table(record: FlightRecord, name: str, kept: int) -> str:
    rows = record.tables[name][-kept:].tolist()
    start, entries = 0, []
    for layer, heads in record.heads.items():
        numbers = [f"[{', '.join(map(_short, row[start : start + heads]))}]" for row in rows]
        entries.append(f"{json.dumps(layer)}: [{', '.join(numbers)}]")
        start += heads
    return _lines("{}", entries, indent="    ")


def _short(value: float) -> str:
    if math.isnan(value):
        return "null"
    return f"{value:.6g}" if math.isfinite(value) else f'"{value}"'


def _strict(value: object) -> str:
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> object:
    """Return a value in which numbers that are not finite are texts."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# -- from text ---------------------------------------------------------------------------------------------------------


def from_json(text: str) -> FlightRecord:
    """Return the record that a text holds.

    Raises:
        ValueError: If it holds none.
    """
    try:
        stored = json.loads(text)
        if stored["format"] != _FORMAT:
            raise ValueError(f"it is no flight record but {stored['format']!r}")
        if stored["version"] != _VERSION:
            raise ValueError(f"its version is {stored['version']!r}, this attn_monitor reads {_VERSION}")
        return _record(stored)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is damaged ({error_line(error)})") from error


def _record(stored: Mapping[str, Any]) -> FlightRecord:
    heads = {str(layer): _whole(count) for layer, count in stored["heads"].items()}
    return FlightRecord(
        step=_whole(stored["step"]),
        reasons=[str(reason) for reason in stored["reasons"]],
        written=str(stored["written"]),
        diagnosis=[str(line) for line in stored["diagnosis"]],
        began=None if stored["began"] is None else _beginning(stored["began"]),
        exception=str(stored["exception"]),
        limit=_number(stored["limit"]),
        heads=heads,
        head_dims={str(layer): None if dim is None else _whole(dim) for layer, dim in stored["head_dims"].items()},
        observations=[_observation(one) for one in stored["observations"]],
        losses=[
            (_whole(step), math.nan if (loss := _number(value)) is None else loss)
            for step, value in zip(stored["losses"]["steps"], stored["losses"]["values"], strict=True)
        ],
        tables={
            str(name): _array(layers, heads, len(stored["observations"])) for name, layers in stored["tables"].items()
        },
    )


def _observation(one: Mapping[str, Any]) -> Observation:
    return Observation(
        step=_whole(one["step"]),
        loss=_number(one["loss"]),
        learning_rates=[
            [rate for value in rates if (rate := _number(value)) is not None] for rates in one["learning_rates"]
        ],
        grad_norm=_number(one["grad_norm"]),
        layer_grad_norms={str(layer): _number(norm) for layer, norm in one["layer_grad_norms"].items()},
    )


def _beginning(began: Mapping[str, Any]) -> Beginning:
    return Beginning(
        step=_whole(began["step"]),
        loss=str(began["loss"]),
        seen_at=None if began["seen_at"] is None else _whole(began["seen_at"]),
        basis=str(began["basis"]),
        layer=None if began["layer"] is None else str(began["layer"]),
        head=None if began["head"] is None else _whole(began["head"]),
        text=str(began["text"]),
    )


def _array(layers: Mapping[str, Any], heads: Mapping[str, int], most: int) -> NDArray[np.float32]:
    columns = [
        np.array([[math.nan if (x := _number(value)) is None else x for value in row] for row in layers[layer]])
        for layer in heads
    ]
    for (layer, count), values in zip(heads.items(), columns, strict=True):
        if values.ndim != 2 or values.shape != (len(columns[0]), count) or len(values) > most:
            raise TypeError(f"the numbers of {layer!r} have the shape {values.shape}")
    return np.concatenate(columns, axis=1).astype(np.float32) if columns else np.zeros((0, 0), np.float32)


def _number(value: object) -> float | None:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise TypeError(f"expected a number, got {value!r}")


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value

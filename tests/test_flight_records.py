"""The file of the flight recorder: what was given is read back, and what is damaged is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_array_equal

from attn_monitor import flight_records as records_module
from attn_monitor.flight_records import (
    flight_name,
    from_json,
    to_json,
    write_flight,
)
from attn_monitor.reports.flight import Flight, as_run
from tests.stored_flights import make_flight, read, store


def test_a_file_holds_what_was_given_and_is_strict_json(tmp_path: Path) -> None:
    record = make_flight()
    path = store(tmp_path / "new" / "folder", record)
    assert [entry.name for entry in path.parent.iterdir()] == ["attn_monitor_flight_40.json"]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    plain = json.loads(path.read_text(), parse_constant=refuse)
    assert plain["observations"][2]["loss"] == "nan"
    assert plain["observations"][2]["grad_norm"] == "inf"
    assert plain["observations"][1]["grad_norm"] is None
    assert plain["tables"]["saturation_ratio"]["b.attn"] == [[0.3, 0.4, None], [0.4, 0.5, 0.6], [7.5, 0.6, 0.7]]

    found = from_json(path.read_text())
    assert found.began == record.began
    assert (found.step, found.reasons, found.written, found.diagnosis) == (
        record.step,
        record.reasons,
        record.written,
        record.diagnosis,
    )
    assert (found.heads, found.head_dims, found.limit) == (record.heads, record.head_dims, record.limit)
    assert [repr(one) for one in found.observations] == [repr(one) for one in record.observations]
    assert repr(found.losses) == repr(record.losses)
    for name, values in record.tables.items():
        assert_array_equal(found.tables[name], values)


def test_a_large_model_has_fewer_observations_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MOST_NUMBERS", 2 * 5 * 2)
    found = from_json(to_json(make_flight()))
    assert len(found.observations) == 3
    assert [one.step for one in found.tabled] == [30, 40]
    assert found.tables["logit_max"].shape == (2, 5)
    assert as_run(Flight("run", found)).tables["logit_max"].steps.tolist() == [30, 40]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, make_flight())
    before = path.read_text()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_flight(tmp_path, "new", flight_name(40))
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"format": "other"}, "it is no flight record but 'other'"),
        ({"version": 2}, "its version is 2, this attn_monitor reads 1"),
        ({"step": "4"}, "it is damaged (TypeError: expected a whole number, got '4')"),
        ({"step": True}, "expected a whole number, got True"),
        ({"heads": {"a.attn": 2, "b.attn": 4}}, "the numbers of 'b.attn' have the shape (3, 3)"),
        ({"heads": {"a.attn": 2, "c": 3}}, "it is damaged (KeyError: 'c')"),
        ({"observations": [{}]}, "it is damaged (KeyError: 'step')"),
        ({"observations": []}, "the numbers of 'a.attn' have the shape (3, 2)"),
        ({"losses": {"steps": [1], "values": []}}, "zip()"),
        ({"limit": 10**400}, "it is damaged (OverflowError"),
        ({"limit": "much"}, "expected a number, got 'much'"),
        ({"tables": 3}, "it is damaged (AttributeError"),
        ({"began": 3}, "it is damaged (TypeError"),
        ({"reasons": None}, "it is damaged (TypeError"),
    ],
)
def test_a_damaged_file_is_said_and_hides_no_other(damage: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = store(tmp_path, make_flight(40))
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    store(tmp_path, make_flight(50))
    findings = read(tmp_path)
    assert [flight.record.step for flight in findings.flights] == [50]
    [note] = findings.notes
    assert note.startswith(f"{path} could not be read: ")
    assert words in note


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "3", "null", "{}", "[1]", '"x"'])
def test_a_file_of_something_else_is_said(text: str, tmp_path: Path) -> None:
    store(tmp_path, make_flight(40)).write_text(text)
    findings = read(tmp_path)
    assert (findings.flights, len(findings.notes)) == ([], 1)

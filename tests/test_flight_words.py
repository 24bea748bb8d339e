"""What the report says of a flight record."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attn_monitor.flight_records import (
    Beginning,
    FlightRecord,
    Observation,
    from_json,
    to_json,
)
from attn_monitor.reports.flight import Flight, as_run, summarize_flight
from tests.stored_flights import make_flight

NAN, INF = math.nan, math.inf


def test_the_summary_says_when_why_where_and_what_led_to_it() -> None:
    text = summarize_flight(Flight("version_3", make_flight(exception="ValueError: bad\nsecond line")))
    assert text.splitlines() == [
        "version_3: flight record of step 40, written 2031-02-03T04:05:06+00:00: critical event, loss not finite",
        "  ValueError: bad",
        "  second line",
        "  it began there",
        "  step 40: head 0 of b.attn is saturated",
        "    likely cause: this and that",
        "",
        "  last observations  loss  learning rate  gradient norm  largest ratio  of",
        "  step 20            2.5   0.01 0.02      1.5            0.4            head 1 of b.attn",
        "  step 30            1.25  0.01 0.02      -              0.6            head 2 of b.attn",
        "  step 40            nan   0.01 0.02      inf            7.5            head 0 of b.attn",
    ]


def test_a_record_without_observations_is_told_of_all_the_same() -> None:
    bare = FlightRecord(step=7, reasons=["exception"], exception="KeyError: 'x'", losses=[(6, 1.5)])
    assert summarize_flight(Flight("run", from_json(to_json(bare)))).splitlines() == [
        "run: flight record of step 7: exception",
        "  KeyError: 'x'",
        "  nothing was observed; the last losses are 1.5 at step 6",
    ]
    run = as_run(Flight("run", from_json(to_json(bare))))
    assert (run.layers, run.tables, list(run.scalars)) == ([], {}, ["loss"])


def one_head(*ratios: float, **more: Any) -> FlightRecord:
    """Return a record of one head without a diagnosis, observed at steps 10, 20 and so on."""
    observations = [Observation(step=10 * (index + 1)) for index in range(len(ratios))]
    tables = {"saturation_ratio": np.array(ratios, np.float32)[:, None]} if ratios else {}
    options: dict[str, Any] = {"reasons": ["critical event"], "heads": {"a": 1}, "head_dims": {"a": 8}, **more}
    return from_json(
        to_json(FlightRecord(step=10 * len(ratios), observations=observations, tables=tables, limit=0.5, **options))
    )


@pytest.mark.parametrize(
    ("record", "brief", "full"),
    [
        (
            one_head(0.7),
            ["  step 10: largest ratio 0.7, head 0 of a"],
            ["", "  last observations  largest ratio  of", "  step 10            0.7            head 0 of a"],
        ),
        (
            one_head(0.7, INF, losses=[(10, 2.0), (20, NAN)]),
            ["  step 20: loss nan, largest ratio inf, head 0 of a"],
            [
                "",
                "  last observations  loss  largest ratio  of",
                "  step 10            2     0.7            head 0 of a",
                "  step 20            nan   inf            head 0 of a",
            ],
        ),
        (one_head(NAN), ["  step 10: no ratio was measured"], ["  step 10: no ratio was measured"]),
        (
            one_head(losses=[(8, 2.0), (9, NAN)]),
            ["  nothing was observed; the last losses are 2 at step 8, nan at step 9"],
            ["  nothing was observed; the last losses are 2 at step 8, nan at step 9"],
        ),
        (one_head(), ["  nothing was observed"], ["  nothing was observed"]),
    ],
    ids=["one observation", "inf", "not measured", "losses only", "nothing"],
)
def test_no_section_is_a_heading_alone(record: FlightRecord, brief: list[str], full: list[str]) -> None:
    heading = f"run: flight record of step {record.step}: critical event"
    assert summarize_flight(Flight("run", record), brief=True).splitlines() == [heading, *brief]
    assert summarize_flight(Flight("run", record)).splitlines() == [heading, *full]


def test_a_loss_that_was_logged_later_stands_beside_the_only_observation_that_it_can_be_of() -> None:
    logged = [(5, 4.0), (10, 3.5), (23, 3.0), (31, 2.5), (37, 2.25), (41, NAN)]
    text = summarize_flight(Flight("run", one_head(0.1, 0.2, 0.3, 0.4, losses=logged)))
    rows = [" ".join(line.split()) for line in text.splitlines()[-4:]]
    assert rows == [
        "step 10 3.5 0.1 head 0 of a",
        "step 20 3 (step 23) 0.2 head 0 of a",
        "step 30 - 0.3 head 0 of a",  # of two steps later: which of them is not known
        "step 40 nan (step 41) 0.4 head 0 of a",
    ]


def test_the_file_says_where_its_gradient_norms_are_those_after_clipping() -> None:
    about = json.loads(to_json(one_head(0.7)))["about"]
    assert "before clipping; under the Trainer of transformers after it" in about


def test_a_brief_section_names_the_head_of_nan_logits_beside_the_loss() -> None:
    counts = np.zeros((3, 5), np.float32)
    counts[2, 3] = 7
    record = make_flight(began=None)
    text = summarize_flight(Flight("run", replace(record, tables={**record.tables, "nonfinite": counts})), brief=True)
    assert text.splitlines()[1:] == ["  step 40: loss nan, logits are nan or inf in head 1 of b.attn"]


def test_an_inf_ratio_is_the_worst_of_an_observation() -> None:
    ratio = np.array([[0.3, INF, NAN, 7.5, 0.7]] * 3, np.float32)
    text = summarize_flight(Flight("run", make_flight(tables={"saturation_ratio": ratio})))
    assert [line.split()[-5:] for line in text.splitlines()[-3:]] == [["inf", "head", "1", "of", "a.attn"]] * 3


def test_no_line_can_steer_a_terminal() -> None:
    evil = "\x1b[31mred\x07"
    record = make_flight(layers=(evil, "b"), exception=evil, diagnosis=[evil], written=evil, reasons=[evil])
    began = Beginning(step=1, text=f"{evil}\nx")
    text = summarize_flight(Flight(evil, replace(record, began=began)))
    assert all(char.isprintable() for line in text.split("\n") for char in line)
    assert "\\x1b[31mred\\x07\\nx" in text


def test_observations_with_nan_logits_do_not_read_as_not_measured() -> None:
    counts = np.zeros((3, 5), np.float32)
    counts[2, [2, 4]] = 9
    record = make_flight()
    tables = {**record.tables, "nonfinite": counts}
    tables["saturation_ratio"] = np.where(counts > 0, NAN, record.tables["saturation_ratio"])
    text = summarize_flight(Flight("run", replace(record, tables=tables)))
    rows = [line.split() for line in text.splitlines()[-3:]]
    assert rows[2][-10:] == ["nan", "or", "inf", "head", "0", "of", "b.attn", "and", "1", "more"]
    assert "nan" not in rows[1][-6:]

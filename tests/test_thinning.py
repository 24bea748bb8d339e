"""Runs that are too large for a page: what stays, and that it is said what does not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from attn_monitor.reports.thinning import thin
from attn_monitor.views import RunData, Series, Table
from tests.event_data import make_event

LAYERS, HEADS = 3, 5
STEP = 2 * LAYERS * HEADS * 4 * 4 / 3
"""Bytes of a step of both tables in base64."""


def make_run(steps: int, name: str = "run", **more: Any) -> RunData:
    numbers = np.arange(steps, dtype=np.int64) * 10
    values = np.arange(steps * LAYERS * HEADS, dtype=np.float32).reshape(steps, LAYERS, HEADS)
    options: dict[str, Any] = {
        "tables": {"saturation_ratio": Table(numbers, values), "entropy": Table(numbers, -values)},
        "events": [],
        "scalars": {},
        **more,
    }
    return RunData(name, [f"layer {row}" for row in range(LAYERS)], [None] * LAYERS, None, **options)


def test_what_fits_stays_as_it_is() -> None:
    run = make_run(
        101, scalars={"loss": Series(np.arange(500), np.arange(500.0))}, events=[make_event(0, "layer 0", 1)]
    )
    [thinned] = thin([run], 1e6)
    assert thinned.notes == []
    assert thinned.run.tables is run.tables
    assert (thinned.run.events, thinned.run.scalars) == (run.events, run.scalars)


def test_first_last_and_event_steps_stay_and_the_rest_is_even() -> None:
    events = [make_event(step, "layer 1", 2) for step in (130, 170, 500)]
    run = make_run(101, events=events)
    used = sum(len(json.dumps(event)) for event in events)
    [thinned] = thin([run], 4 * used)
    kept = thinned.run.steps.tolist()
    number = int(3 * used / STEP)
    assert len(kept) == number < 50
    assert {0, 130, 170, 500, 1000} <= set(kept)
    gaps = np.diff([step for step in kept if step not in (130, 170, 500)])
    assert gaps.max() <= 2 * gaps.min()
    assert thinned.notes == [
        f"run: {101 - number} of 101 observed steps are left out of the page to bound its size: the first, the last "
        "and, while they fit, those of events stay, and others at even distances"
    ]
    for name, table in thinned.run.tables.items():
        assert_array_equal(table.values, run.tables[name].values[table.steps // 10])
        assert_array_equal(table.steps, kept)


def test_too_many_events_keep_the_first() -> None:
    events = [make_event(10 * index, "layer 1", 2) for index in range(100)]
    [thinned] = thin([make_run(101, events=events)], 20_000)
    number = len(thinned.run.events)
    assert 0 < number < 100
    assert list(thinned.run.events) == events[:number]
    assert thinned.notes[1] == f"run: the last {100 - number} of 100 event records are left out of the page"
    assert {0, 1000, *(10 * index for index in range(number))} <= set(thinned.run.steps.tolist())


def test_steps_of_many_events_leave_room_for_others() -> None:
    events = [{"step": 10 * index} for index in range(500)]
    [thinned] = thin([make_run(1009, events=events)], 4e4)
    kept = thinned.run.steps.tolist()
    early = [step for step in kept if step < 5000]
    assert 0.7 < len(early) / len(kept) < 0.9
    assert np.diff([step for step in kept if step >= 5000]).max() < 200


def test_a_long_scalar_keeps_its_ends_and_spikes() -> None:
    values = np.ones(100_003)
    values[77_777], values[55_555] = 9.0, -9.0
    run = make_run(2, scalars={"loss": Series(np.arange(100_003), values)})
    [thinned] = thin([run], 1e6)
    loss = thinned.run.scalars["loss"]
    assert len(loss.steps) <= 2000
    assert {0, 55_555, 77_777, 100_002} <= set(loss.steps.tolist())
    assert_array_equal(loss.values, values[loss.steps])


@pytest.mark.parametrize("size", [1.0, 1e4, 1e5, 1e6])
def test_the_size_is_kept_to(size: float) -> None:
    runs = [make_run(997, f"run {index}") for index in range(3)]
    left = sum(table.values.nbytes * 4 / 3 for one in thin(runs, size) for table in one.run.tables.values())
    assert left <= max(size, 3 * 2 * STEP)
    assert left > 0.9 * min(size, 3 * 997 * STEP)


def test_large_runs_use_what_small_ones_leave() -> None:
    large, small = thin([make_run(1009, "large"), make_run(11, "small")], 211 * STEP)
    assert (small.notes, len(small.run.steps)) == ([], 11)
    assert 199 <= len(large.run.steps) <= 200


def test_tables_that_begin_later_keep_their_own_steps() -> None:
    run = make_run(101)
    whole = run.tables["entropy"]
    late = make_run(101, tables={**run.tables, "late": Table(whole.steps[50:], whole.values[50:])})
    [thinned] = thin([late], 20 * STEP)
    steps = thinned.run.tables["late"].steps
    assert set(steps.tolist()) == {step for step in thinned.run.steps.tolist() if step >= 500}
    assert_array_equal(thinned.run.tables["late"].values, whole.values[steps // 10])

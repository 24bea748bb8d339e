"""What the benchmark reports follows from what it measured. Nothing here is timed."""

from __future__ import annotations

import pytest

from tests.benchmarks import step_ratio as bench


def test_every_way_gets_one_step_of_each_round_in_a_rotating_order() -> None:
    turns = bench.TakingTurns(dict.fromkeys("abc"))
    rounds = ["".join(turns.turn(step) for step in range(first, first + 3)) for first in (0, 3, 6, 9)]
    assert rounds == ["abc", "bca", "cab", "abc"]


def test_each_step_is_divided_by_the_unwatched_step_of_its_round() -> None:
    seconds = {name: [1.0, 10.0, 2.0] for name in bench.ways()}
    seconds[bench.OBSERVED] = [1.5, 15.0, 3.0]
    lines = {line.split("|")[1].strip(): line for line in bench.report(seconds).splitlines() if line.startswith("|")}
    assert lines[bench.OBSERVED] == f"| {bench.OBSERVED} | 1.500 | 1.500 to 1.500 | 3000 |"
    [amortised] = [line for name, line in lines.items() if "computed" in name]
    assert float(amortised.split("|")[2]) == pytest.approx(1 + 0.5 / bench.CADENCE)

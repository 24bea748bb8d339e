"""What the benchmark reports follows from what it measured, and all of it runs. No time is asserted anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_monitor import AttentionMonitor, unseen
from attn_monitor.workspace import Workspaces
from tests.benchmarks import __main__ as command
from tests.benchmarks import first, growth, looks, memory, page, profile, steps, turns, writing
from tests.benchmarks.exact import exact_statistics
from tests.benchmarks.model import GPT, GPT2, Decoder
from tests.benchmarks.sizes import FULL, QUICK, ModelSize
from tests.benchmarks.training import train
from tests.benchmarks.watchers import NaiveHook, OutputAttentions
from tests.models import LIGHTNING_ADVICE
from tests.reference import attention_reference, gradient_reference

pytestmark = LIGHTNING_ADVICE
Table = dict[str, list[str]]
HEAD_WATCHERS = (NaiveHook, OutputAttentions)


def tables(text: str) -> list[Table]:
    """Return the rows of each table of a page by their first cell."""
    found: list[Table] = []
    for block in text.split("\n\n"):
        lines = [line.strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
        if lines:
            found.append({cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[2:]})
    return found


def measured_quickly(section: str, capsys: pytest.CaptureFixture[str]) -> Table:
    """Run one section at tiny sizes and return its table."""
    before = page.PAGE.read_bytes()
    command.main(["--quick", "--only", section])
    assert page.PAGE.read_bytes() == before
    [table] = tables(capsys.readouterr().out)
    return table


def is_ratio(cell: str) -> bool:
    """Tell whether a cell starts with a finite number, not negative: a stalled base of a tiny size rounds it to 0."""
    number = float(cell.split()[0])
    return math.isfinite(number) and number >= 0


def is_memory(cell: str) -> bool:
    """Tell whether a cell says how much memory, or that it was not measured."""
    return math.isfinite(float(cell)) if memory.measurable() else cell == page.NOT_MEASURED


# -- all of it, at tiny sizes ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_have_a_row_for_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured_quickly("steps", capsys)
    ways = [name for ways in steps.trainings(QUICK).values() for name in ways]
    assert sorted(rows) == sorted([*ways, steps.COMPUTED])
    assert all(is_ratio(cells[0]) for cells in rows.values())
    compared = rows.keys() - {steps.BASE, steps.GPT2_BASE, steps.COMPUTED}
    assert all(is_memory(rows[name][3]) for name in compared)


@pytest.mark.slow
def test_statistics_alone_have_a_row_for_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured_quickly("alone", capsys)
    assert len(rows) == len(looks.cases(QUICK)) == 2 * (1 + len(QUICK.lengths))
    for shape, cells in rows.items():
        long = f" {QUICK.lengths[-1]}" in shape
        assert cells[3] == page.NONE if long else is_ratio(cells[3])
        assert all(is_ratio(cell) for cell in (*cells[:3], *cells[4:6]))
        assert all(is_memory(cell) for cell in cells[6:8])
        assert float(cells[8]) < 1e-5


def test_the_floor_is_the_work_that_every_look_shares() -> None:
    case = looks.Case(1, 2, 24, 8, causal=True)
    operations: list[str] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func.name())
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patched, Recorded():  # type: ignore[no-untyped-call] # torch has no hints for it
        patched.setattr(unseen, "without_dispatch_modes", nullcontext)
        looks.ways(case, 5)[looks.FLOOR]()
    assert [name for name in operations if "bmm" in name or "softmax" in name] == [
        "aten::bmm.out",
        "aten::_softmax.out",
    ]


def test_the_floor_of_both_passes_has_one_product_more() -> None:
    [(call, grad_output), *_] = profile._calls(QUICK.model)
    operations: list[str] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func.name())
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patched, Recorded():  # type: ignore[no-untyped-call] # torch has no hints for it
        patched.setattr(unseen, "without_dispatch_modes", nullcontext)
        looks.floor(call, Workspaces(), grad_output)
    assert [name for name in operations if "bmm" in name] == ["aten::bmm.out", "aten::bmm.out"]


@pytest.mark.slow
def test_the_profile_has_a_row_for_every_part_and_they_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured_quickly("profile", capsys)
    assert tuple(rows) == profile.ROWS
    for column in (0, 2):
        cells = {name: float(row[column]) for name, row in rows.items()}
        assert cells[profile.STEP] > 0
        assert cells[profile.STATISTICS] > 0
        assert cells[profile.RECORD] > 0
        assert cells[profile.TOTAL] == pytest.approx(sum(cells[part] for part in profile.PARTS), abs=0.5)
        assert rows[profile.TOTAL][column + 1] == "100 %"


def test_each_part_of_the_profile_is_timed_where_it_happens() -> None:
    looking, recording = profile.Stopwatch(), profile.Stopwatch()
    timed: dict[str, tuple[bool, bool]] = {}
    for name, way in profile._ways(QUICK.model, looking, recording).items():
        looking.start()
        recording.start()
        way()
        timed[name] = looking.stop() > 0, recording.stop() > 0
    assert timed == {
        profile.PLAIN: (False, False),
        profile.SEEN: (False, True),
        profile.FORWARD: (True, True),
        profile.WATCHED: (True, True),
        profile.FLOOR: (False, False),
        profile.BOTH_FLOOR: (False, False),
    }


def test_a_stopwatch_leaves_out_what_is_timed_inside() -> None:
    watch = profile.Stopwatch()
    watch.start()
    watch.timed(watch.timed(lambda: time.sleep(0.05), -1))()
    assert 0 <= watch.stop() < 0.02


def test_the_first_step_has_a_row_for_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured_quickly("first", capsys)
    assert len(rows) == len(first.KERNELS) * len(QUICK.first_steps)
    for cells in rows.values():
        assert int(cells[0]) > 10 * QUICK.deep_model.layers
        assert all(is_ratio(cell) for cell in cells[1:])


def test_growth_has_a_row_for_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured_quickly("growth", capsys)
    sizes = {"heads": QUICK.growing_heads, "length": QUICK.growing_lengths, "layers": QUICK.growing_layers}
    assert list(rows) == [f"{what} {size}" for what, values in sizes.items() for size in values]
    assert all(is_ratio(cell) for cells in rows.values() for cell in cells)


def test_writing_has_a_row_for_every_model_with_and_without_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured_quickly("writing", capsys)
    assert len(rows) == 2 * len(writing.QUICK_MODELS)
    assert all(is_ratio(cells[0]) and is_ratio(cells[2]) for cells in rows.values())


@pytest.mark.parametrize("kind", [GPT, GPT2])
def test_every_way_sees_every_layer_and_leaves_nothing_behind(kind: type[Decoder]) -> None:
    models: list[Decoder] = []

    def build(size: ModelSize) -> Decoder:
        models.append(kind(size))
        return models[-1]

    ways = steps.trainings(QUICK)[kind]
    train(build, QUICK.model, ways, 1, turns.Clock())
    seen = {name: _layers(way) for name, way in ways.items() if isinstance(way, (AttentionMonitor, *HEAD_WATCHERS))}
    assert seen == dict.fromkeys(seen, QUICK.model.layers)
    hooks = [
        hook for module in models[0].modules() for hook in (module._forward_hooks | module._forward_pre_hooks).values()
    ]
    if kind is GPT2:  # the library's own, which it needs for `output_attentions` and keeps
        hooks = [hook for hook in hooks if hook.__module__ != "transformers.utils.output_capturing"]
    assert not hooks


def _layers(way: AttentionMonitor | NaiveHook | OutputAttentions) -> int:
    if isinstance(way, AttentionMonitor):
        return len(way.history[-1][1])
    return len([tag for tag in way.measured if tag.startswith("entropy/")])


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "written"),
    [([], True), (["--rounds", "3"], True), (["--quick"], False), (["--only", "alone"], False)],
)
def test_only_the_whole_page_is_written(
    arguments: list[str], written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(command, "SECTIONS", {name: _stub(name) for name in command.SECTIONS})
    command.main(arguments)
    assert (tmp_path / "page.md").exists() is written
    if written:
        text = (tmp_path / "page.md").read_text(encoding="utf-8")
        assert all(f"section {name}" in text for name in command.SECTIONS)


def _stub(name: str) -> Callable[..., str]:
    return lambda sizes, rounds, quick: f"section {name}, {rounds} rounds"


def test_the_page_says_what_it_was_measured_with() -> None:
    text = page.environment()
    for word in (torch.__version__, f"{torch.get_num_threads()} threads", "seed 0", page.processor()):
        assert word in text.replace("\n", " ")


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rounds", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err


# -- what is made of the measurements ----------------------------------------------------------------------------------


def rounds_of(names: str) -> list[str]:
    """Return as many rounds as there are names, each as the names in their order."""
    order = "".join(turns.whose(step, names) for step in range(len(names) ** 2))
    return [order[first : first + len(names)] for first in range(0, len(order), len(names))]


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_every_way_has_every_place_once(count: int) -> None:
    names = "abcdefghij"[:count]
    rounds = rounds_of(names)
    assert all(sorted(order) == list(names) for order in rounds)
    assert all(sorted(place) == list(names) for place in zip(*rounds, strict=True))


@pytest.mark.parametrize("count", [2, 4, 10])
def test_every_way_follows_every_other_one_once(count: int) -> None:
    names = "abcdefghij"[:count]
    rounds = rounds_of(names)
    followed = [pair for order in rounds for pair in pairwise(order)]
    assert sorted(followed) == sorted(permutations(names, 2))


def test_warmup_is_not_counted() -> None:
    class Count:
        """Counts its stops."""

        stops = 0.0

        def start(self) -> None:
            pass

        def stop(self) -> float:
            self.stops += 1
            return self.stops

    measured = turns.interleaved({"a": int, "b": int}, 2, warmup=1, meters=[Count(), Count()])
    assert measured == [{"a": [4.0, 5.0], "b": [3.0, 6.0]}] * 2


def test_values_are_compared_with_those_of_their_round() -> None:
    measured = {"base": [1.0, 10.0, 2.0], "way": [1.5, 15.0, 5.0]}
    assert turns.ratios(measured, "base")["way"] == turns.Spread(1.5, 1.5, 2.0)
    assert turns.excess(measured, "base") == {"base": 0.0, "way": 3.0}


def test_the_quartiles_of_one_value_are_that_value() -> None:
    assert turns.Spread.of([3.0]) == turns.Spread(3.0, 3.0, 3.0)


def test_the_computed_row_lies_a_fiftieth_of_the_way_from_idle_to_observed() -> None:
    seconds = {name: [2.0, 2.0] for name in (steps.BASE, steps.IDLE, steps.OBSERVED)}
    seconds[steps.IDLE], seconds[steps.OBSERVED] = [2.02, 2.02], [3.02, 3.02]
    rows = {cells[0]: cells[1:] for cells in steps.rows(steps.lines([seconds], None))}
    assert float(rows[steps.COMPUTED][0]) == pytest.approx(1.01 + 0.5 / steps.CADENCE)
    assert rows[steps.OBSERVED] == ("1.510", "1.510 to 1.510", "3020", page.NOT_MEASURED)


def test_growth_is_told_from_first_to_last() -> None:
    ratio = turns.Spread(1.0, 1.0, 1.0)
    lines = [growth.Line(size, plain=1.0, cost=float(cost), ratio=ratio) for size, cost in ((2, 3), (4, 9), (8, 15))]
    assert growth.growth("heads", lines, lambda line: line.cost) == "4 times the heads cost 5.0 times as much"


def test_long_cases_are_measured_at_least_twice_and_short_ones_more_often() -> None:
    rounds = [case.rounds(FULL.rounds) for case in looks.cases(FULL) if case.batch == 1 and case.causal]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] == 2


# -- what it is compared with ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [7, 2**20])
def test_the_tiled_reference_agrees_with_the_dense_one(
    causal: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.benchmarks.exact.TILE", tile)
    query, key, value, grad_output = torch.randn(4, 2, 3, 5, 7).unbind()
    found = exact_statistics(query, key, value, grad_output, causal=causal)
    wanted = attention_reference(query, key, is_causal=causal)
    wanted |= gradient_reference(query, key, value, grad_output, is_causal=causal)
    assert found.keys() == looks.FULL_SET
    for name, values in found.items():
        torch.testing.assert_close(values, wanted[name], rtol=1e-12, atol=0, msg=name)


@pytest.mark.skipif(not memory.measurable(), reason="this system does not tell the peak of a process")
def test_a_peak_is_seen_after_it_is_gone() -> None:
    peak = memory.Peak(above=True)
    peak.start()
    torch.ones(16 * 2**20)  # 64 MiB
    assert 63 < peak.stop() < 80


def test_a_system_that_keeps_no_peak_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "RESET", tmp_path / "no" / "clear_refs")
    assert memory.in_fresh_process("steps", 2, quick=True) is None
    assert page.mebibytes(None) == page.NOT_MEASURED

"""What the terminal says of a run: the first event, the worst heads, what grew, and the loss beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attn_monitor.reports.growth import growth_in_words
from attn_monitor.reports.runs import ScalarRun
from attn_monitor.reports.scalar_summary import summarize_scalars
from attn_monitor.reports.summary import summarize
from attn_monitor.views import RunData, Series, Table, run_name
from tests.event_data import make_event

LAYERS, HEADS, STEPS = ("encoder.0", "decoder.0"), 3, (0, 10, 20, 30)
SICK = (1, 2)


def make_series(*values: float, steps: Sequence[int] = STEPS) -> Series:
    return Series(np.array(steps, np.int64), np.array(values, np.float64))


def make_table(healthy: float, sick: Sequence[float]) -> Table:
    """Return a table that is the same for all heads but one."""
    values = np.full((len(STEPS), len(LAYERS), HEADS), healthy, np.float32)
    values[:, SICK[0], SICK[1]] = sick
    return Table(np.array(STEPS, np.int64), values)


def collapsing() -> RunData:
    """Head 2 of decoder.0: its queries double three times, its alignment at the end; flagged at 20, critical at 30."""
    opened = make_event(20, "decoder.0", 2, message="step 20: head 2 of decoder.0 is saturated, for a reason")
    return RunData(
        name="version_0",
        layers=LAYERS,
        head_dims=[64, 64],
        threshold=0.5,
        tables={
            "saturation_ratio": make_table(0.125, [0.15, 0.3, 0.6, 2.4]),
            "logit_row_std": make_table(1.0, [1.2, 2.4, 4.8, 19.2]),
            "entropy_normalized": make_table(0.9, [0.9, 0.8, 0.4, 0.05]),
            "grad_logits_norm": make_table(0.0, [3.0, 2.0, 1.0, 0.5]),
            "scale_ratio": make_table(1.0, [1.0] * 4),
            "q_rms": make_table(1.0, [1.0, 2.0, 4.0, 8.0]),
            "k_rms": make_table(1.0, [1.0] * 4),
            "alignment": make_table(1.0, [1.2, 1.2, 1.2, 2.4]),
            "qk_std": make_table(1.0, [1.2, 2.4, 4.8, 19.2]),
        },
        events=[opened, {**opened, "step": 30, "severity": "critical", "state": "critical"}],
        scalars={
            "train_loss": make_series(4.0, 3.0, 2.5, 3.5),
            "val_loss": make_series(4.5, 3.75, steps=(9, 25)),
            "grad_2.0_norm_total": make_series(7.0, 6.0, 50.0, 0.25),
            "glossary": make_series(1.0, 1.0, 1.0, 1.0),
        },
    )


def test_a_collapse_is_told() -> None:
    assert summarize(collapsing()).splitlines() == [
        "version_0: 2 layers of 3 heads, 4 observations, steps 0 to 30",
        "  first event: step 20: head 2 of decoder.0 is saturated, for a reason",
        "  1 head flagged, 1 of them critical, 1 still open at the end",
        "",
        "  worst heads          largest ratio  at step  flagged at  entropy_normalized at end  grad_logits_norm at end",
        "  head 2 of decoder.0  2.4            30       20          0.05                       0.5",
        "",
        "  what grew, from the first observation to the largest ratio:",
        "    head 2 of decoder.0: logit_row_std 1.2 to 19.2, 16x = q_rms 8x (75 %) * alignment 2x (25 %)",
        "      likely cause: q_rms grew 8x since step 0",
        "",
        "  beside it                    step 0  step 20 (first event)  step 30",
        "  train_loss                   4       2.5                    3.5",
        "  val_loss                     -       4.5                    3.75",
        "  grad_2.0_norm_total          7       50                     0.25",
        "  grad_logits_norm, all heads  3       1                      0.5",
    ]


def test_a_healthy_run_shows_its_worst_heads_anyway() -> None:
    run = collapsing()
    tables = {"saturation_ratio": make_table(0.125, [0.15, 0.2, 0.3, 0.25])}
    lines = summarize(replace(run, tables=tables, events=[], scalars={})).splitlines()
    assert lines[1] == (
        "  no event: no head was flagged, the largest saturation_ratio is 0.3, head 2 of decoder.0 at step 20 "
        "(limit 0.5)"
    )
    assert [line.split() for line in lines[4:9]] == [
        ["head", "2", "of", "decoder.0", "0.3", "20", "-"],
        *(["head", str(head), "of", "encoder.0", "0.125", "0", "-"] for head in range(3)),
        ["head", "0", "of", "decoder.0", "0.125", "0", "-"],
    ]
    assert lines[-1] == "  no loss was logged: no scalar of this run has `loss` in its name"


def test_growth_of_a_healthy_head_has_no_cause() -> None:
    text = summarize(replace(collapsing(), threshold=3.0, events=[]))
    assert "head 2 of decoder.0: logit_row_std 1.2 to 19.2, 16x = q_rms 8x (75 %) * alignment 2x (25 %)\n" in text
    assert "likely cause" not in text


def test_a_run_without_a_limit_does_not_claim_that_nothing_happened() -> None:
    lines = summarize(replace(collapsing(), threshold=None, events=[])).splitlines()
    assert lines[1] == ("  no events are stored; the largest saturation_ratio is 2.4, head 2 of decoder.0 at step 30")
    assert "likely cause: q_rms grew 8x since step 0" in "\n".join(lines)


def test_events_end_and_open_again() -> None:
    states = [(10, 0, "opened"), (15, 1, "opened"), (20, 0, "ended"), (25, 1, "ended"), (30, 1, "opened")]
    events = [make_event(step, "encoder.0", head, state=state) for step, head, state in states]
    lines = summarize(replace(collapsing(), events=events)).splitlines()
    assert lines[2] == "  2 heads flagged, 0 of them critical, 1 still open at the end"
    assert [line.split()[1:4] for line in lines[5:8]] == [
        ["2", "of", "decoder.0"],  # above the limit, whatever the events say
        ["0", "of", "encoder.0"],
        ["1", "of", "encoder.0"],
    ]
    assert lines[8] == ""


def test_the_first_event_is_the_worst_head_of_its_step() -> None:
    events = [make_event(20, LAYERS[0], head, ratio=ratio) for head, ratio in enumerate([0.51, 0.74, 0.62])]
    lines = summarize(replace(collapsing(), events=[*events, make_event(30, LAYERS[1], 2, ratio=2.4)])).splitlines()
    assert lines[1] == "  first event: step 20: head 1 of encoder.0 is saturated"
    broken = make_event(20, LAYERS[1], 0, statistic="nonfinite", ratio=None, severity="critical")
    lines = summarize(replace(collapsing(), events=[*events, broken])).splitlines()
    assert lines[1] == "  first event, critical: step 20: head 0 of decoder.0 is saturated"


def test_an_evaluation_says_that_it_opens_no_events_and_what_is_above_the_limit() -> None:
    lines = summarize(replace(collapsing(), name=run_name("version_0", "val_"), events=[])).splitlines()
    assert lines[1:3] == [
        "  no events, as only training opens them, the largest saturation_ratio is 2.4, head 2 of decoder.0 at step 30 "
        "(limit 0.5)",
        "  1 of 6 heads above the limit at some observation, 1 at the last",
    ]
    healthy = replace(collapsing(), name=run_name("version_0", "val_"), events=[], threshold=3.0)
    assert "above the limit" not in summarize(healthy)


def test_a_training_without_events_does_not_hide_heads_above_the_limit() -> None:
    run = replace(collapsing(), events=[])
    values = run.tables["saturation_ratio"].values.copy()
    values[1, 0, 0], values[:, 0, 1] = 0.75, np.nan
    run = replace(run, tables={"saturation_ratio": Table(run.steps, values)})
    assert summarize(run).splitlines()[2] == "  2 of 5 heads above the limit at some observation, 1 at the last"


def test_a_value_beside_it_is_never_of_a_later_step() -> None:
    scalars = {"train_loss": make_series(2.5, 1.5, steps=(9, 19)), "val_loss": make_series(3.5, steps=(31,))}
    lines = summarize(replace(collapsing(), scalars=scalars)).splitlines()
    assert [line.split() for line in lines[-3:-1]] == [["train_loss", "-", "1.5", "1.5"], ["val_loss", "-", "-", "-"]]


def test_heads_with_nan_come_first() -> None:
    broken = make_event(30, "encoder.0", 1, statistic="nonfinite", severity="critical", ratio=None, value=7)
    run = collapsing()
    values = run.tables["saturation_ratio"].values.copy()
    values[:, 0, 1] = np.nan
    tables = {**run.tables, "saturation_ratio": Table(run.steps, values)}
    lines = summarize(replace(run, tables=tables, events=[*run.events, broken])).splitlines()
    assert lines[5].split()[:7] == ["head", "1", "of", "encoder.0", "-", "-", "30"]
    assert lines[6].startswith("  head 2 of decoder.0  2.4")


def turned_nan() -> RunData:
    """Return the collapsing run whose sick head has nan logits from step 20 on; one table ends with its numbers."""
    run, tables = collapsing(), {}
    for name, table in run.tables.items():
        values = table.values.copy()
        values[2:, SICK[0], SICK[1]] = np.nan
        tables[name] = Table(table.steps, values)
    tables["entropy_normalized"] = Table(run.steps[:2], tables["entropy_normalized"].values[:2])
    tables["nonfinite"] = make_table(0.0, [0, 0, 9, 9])
    scalars = {"train_loss": make_series(4.0, 3.0, np.nan, np.nan)}
    return replace(run, tables=tables, scalars=scalars)


def test_a_head_that_ends_with_nan_logits_says_so_and_since_when() -> None:
    assert summarize(turned_nan()).splitlines() == [
        "version_0: 2 layers of 3 heads, 4 observations, steps 0 to 30",
        "  first event: step 20: head 2 of decoder.0 is saturated, for a reason",
        "  1 head flagged, 1 of them critical, 1 still open at the end",
        "  1 of 6 heads has nan or inf logits at the end, since step 20: head 2 of decoder.0",
        "",
        "  worst heads          largest ratio  at step  flagged at  entropy_normalized at end  grad_logits_norm at end",
        "  head 2 of decoder.0  0.3            10       20          nan since 20               nan since 20",
        "",
        "  what grew, from the first observation to the largest ratio:",
        "    head 2 of decoder.0: logit_row_std 1.2 to 2.4, 2x = q_rms 2x (100 %)",
        "      likely cause: q_rms grew 2x since step 0",
        "",
        "  beside it                    step 0  step 20 (first event)  step 30",
        "  train_loss                   4       nan                    nan",
        "  grad_logits_norm, all heads  3       0                      0",
    ]


def test_gradients_that_are_nan_everywhere_do_not_read_as_the_last_ones_that_were_not() -> None:
    run = turned_nan()
    values = run.tables["grad_logits_norm"].values.copy()
    values[2:] = np.nan
    run = replace(run, tables={**run.tables, "grad_logits_norm": Table(run.steps, values)})
    assert summarize(run).splitlines()[-1].split() == ["grad_logits_norm,", "all", "heads", "3", "nan", "nan"]


def test_logits_that_recovered_are_not_broken_at_the_end_and_a_layer_that_did_not_run_stays_as_it_was() -> None:
    run = turned_nan()
    recovered = replace(run, tables={**run.tables, "nonfinite": make_table(0.0, [0, 9, 9, 0])})
    assert "at the end" not in summarize(recovered).splitlines()[3]
    dropped = replace(run, tables={**run.tables, "nonfinite": make_table(0.0, [0, 9, np.nan, 9])})
    assert "1 of 6 heads has nan or inf logits at the end, since step 10" in summarize(dropped)
    several = make_table(3.0, [0, 0, 9, np.nan])
    text = summarize(replace(run, tables={**run.tables, "nonfinite": several}))
    assert "  6 of 6 heads have nan or inf logits at the end, the first since step 0: head 0 of encoder.0\n" in text


def test_a_validation_that_ends_with_nan_says_so_without_events() -> None:
    run = replace(turned_nan(), name=run_name("version_0", "monitor2_val_"), events=[])
    lines = summarize(run).splitlines()
    assert lines[0].startswith("version_0 (monitor 2, validation): 2 layers")
    assert lines[1].startswith("  no events, as only training opens them")
    assert "  1 of 6 heads has nan or inf logits at the end, since step 20: head 2 of decoder.0" in lines


def with_tables(**tables: Sequence[float]) -> RunData:
    """Return the collapsing run with other values of its sick head."""
    run = collapsing()
    changed = {name: make_table(1.0, values) for name, values in tables.items()}
    return replace(run, tables={**run.tables, **changed})


def growth_of(run: RunData) -> list[str]:
    """Return the lines on the sick head."""
    lines = summarize(run).splitlines()
    start = lines.index("  what grew, from the first observation to the largest ratio:") + 1
    return [line.strip() for line in lines[start : lines.index("", start)]]


def test_a_missing_scale_is_named_as_the_cause_beside_what_grew() -> None:
    assert growth_of(with_tables(scale_ratio=[8.0] * 4)) == [
        "head 2 of decoder.0: logit_row_std 1.2 to 19.2, 16x = q_rms 8x (75 %) * alignment 2x (25 %)",
        "scale_ratio 8 (usual: 1), from the start; likely cause: the scale 1/sqrt(d_k) is missing, and q_rms grew 8x "
        "since step 0",
    ]


def test_a_missing_scale_is_the_cause_where_nothing_grew() -> None:
    still: dict[str, Sequence[float]] = {name: [1.0] * 4 for name in ("q_rms", "k_rms", "alignment")}
    run = with_tables(**still, scale_ratio=[8.0] * 4, qk_std=[8.0] * 4, logit_row_std=[8.0, 8.0, 8.0, 8.8])
    assert growth_of(run) == [
        "head 2 of decoder.0: logit_row_std 8 to 8.8, 1.1x",
        "scale_ratio 8 (usual: 1), from the start; likely cause: the scale 1/sqrt(d_k) is missing",
    ]


def test_a_scale_that_grew_is_a_factor_like_any_other() -> None:
    run = with_tables(scale_ratio=[1.0, 1.0, 1.0, 2.0], alignment=[1.2] * 4)
    assert growth_of(run)[0].endswith("16x = q_rms 8x (75 %) * scale_ratio 2x (25 %)")
    assert "from the start" not in summarize(run)


def test_what_shrank_and_what_is_added_to_the_logits_are_factors() -> None:
    """From 1.2 to 19.2: queries 8x, keys 0.5x, the products 4x, and what a bias does to them 4x."""
    run = with_tables(k_rms=[1.0, 1.0, 1.0, 0.5], alignment=[1.2] * 4, qk_std=[1.2, 2.4, 4.8, 4.8])
    assert growth_of(run)[0].endswith(
        "16x = q_rms 8x (75 %) * bias, softcap and row offsets 4x (50 %) * k_rms 0.5x (-25 %, shrank)"
    )


def test_small_factors_are_one_so_that_the_product_is_the_growth() -> None:
    values = {"q_rms": 1.09, "k_rms": 1.08, "alignment": 1.6}
    factors: dict[str, Sequence[float]] = {name: [1.0, 1.0, 1.0, value] for name, value in values.items()}
    end = 1.09 * 1.08 * 1.6
    run = with_tables(**factors, qk_std=[1.0, 1.0, 1.0, end], logit_row_std=[1.0, 1.0, 1.0, end])
    assert growth_of(run)[0].endswith("1 to 1.88, 1.88x = alignment 1.6x (74 %) * other 1.18x (26 %)")


@pytest.mark.parametrize("seed", range(7))
def test_the_factors_multiply_to_the_growth_and_the_shares_add_up(seed: int) -> None:
    random = np.random.default_rng(seed)
    first = dict(zip(("scale_ratio", "q_rms", "k_rms", "alignment"), random.uniform(0.5, 2, 4), strict=True))
    later = {name: value * random.uniform(0.8, 3) for name, value in first.items()}
    for factors in (first, later):
        factors["qk_std"] = float(np.prod(list(factors.values())))
    first["logit_row_std"], later["logit_row_std"] = first["qk_std"], later["qk_std"] * random.uniform(0.6, 1.4)
    [line, *_] = growth_in_words(first, later, sick=False)
    growth, _, equation = line.partition(" = ")
    parts = [re.fullmatch(r".* ([\d.]+)x \((-?\d+) %(?:, shrank)?\)", part) for part in equation.split(" * ")]
    ratios = [float(part[1]) for part in parts if part]
    assert len(ratios) == len(parts) >= 3
    assert np.prod(ratios) == pytest.approx(later["logit_row_std"] / first["logit_row_std"], rel=0.03)
    assert growth.endswith(f"{later['logit_row_std'] / first['logit_row_std']:.3g}x")
    assert sum(int(part[2]) for part in parts if part) == 100


@pytest.mark.parametrize("tables", [{}, {"entropy": make_table(1.0, [np.nan] * 4)}])
def test_a_run_that_measured_little_has_a_summary(tables: Mapping[str, Table]) -> None:
    run = replace(collapsing(), tables=tables, events=[])
    assert summarize(run).splitlines()[1] == "  no event: no head was flagged"


def test_empty_tables_have_a_summary() -> None:
    nothing = Table(np.zeros(0, np.int64), np.zeros((0, 0, 0), np.float32))
    run = RunData("run", [], [], 0.5, {"saturation_ratio": nothing}, [], {})
    assert summarize(run).startswith("run: 0 layers of 0 heads, 0 observations\n")


def test_names_cannot_steer_the_terminal() -> None:
    name = "layer\x1b[2J\n\u202e\x07注意"
    text = summarize(replace(collapsing(), layers=(LAYERS[0], name), events=[]))
    assert "\x1b" not in text
    assert "layer\\x1b[2J\\n\\u202e\\x07注意" in text


def scalar_run(**scalars: Any) -> ScalarRun:
    tags = {
        "attn_monitor/saturated_heads": make_series(0, 1, 3, 2),
        "attn_monitor/saturation_ratio_max": make_series(0.1, 0.6, 1.25, 0.7),
        "attn_entropy_normalized_min/a.0": make_series(0.9, 0.8, 0.7, 0.8),
        "attn_entropy_normalized_min/a.1": make_series(0.9, 0.3, 0.5, 0.6),
        "attn_entropy_normalized/a.1": make_series(0.9, 0.9, 0.9, 0.9),
    }
    return ScalarRun("version_3", "metrics.csv", {**tags, **scalars}, {"train_loss": make_series(4, 3, 2, 1)})


def test_a_run_with_only_scalars_has_its_layers_and_says_what_is_missing() -> None:
    assert summarize_scalars(scalar_run()).splitlines() == [
        "version_3: 2 layers, 4 observations, steps 0 to 30",
        "  metrics.csv with means and worst heads of layers only: which head it is, only per-head tensors can say, and "
        "those need a TensorBoardLogger",
        "  saturated heads: first at step 10, most 3, 2 at the end",
        "  largest saturation_ratio: 1.25 at step 20, 0.7 at the end",
        "",
        "  worst layers  entropy_normalized of the worst head  at step  first  last",
        "  a.1           0.3                                   10       0.9    0.6",
        "  a.0           0.7                                   20       0.9    0.8",
        "",
        "  beside it   first  last",
        "  train_loss  4      1",
    ]


def test_a_run_with_only_scalars_has_its_events() -> None:
    cause = "likely cause: q_rms grew 3x since step 0"
    events = [
        make_event(10, "a.0", 1, ratio=0.51),
        make_event(10, "a.1", 2, ratio=0.75, cause=cause),
        make_event(20, "a.1", 2, ratio=1.25, severity="critical", state="critical"),
        make_event(20, "a.0", 1, ratio=0.4, state="ended"),
        *(make_event(30, "a.2", head, ratio=0.6 - head / 100) for head in range(5)),
    ]
    lines = summarize_scalars(replace(scalar_run(), events=events)).splitlines()
    assert lines[1:4] == [
        "  metrics.csv with means and worst heads of layers only: which heads were flagged is from "
        "attn_monitor_events.jsonl, all other numbers of heads need a TensorBoardLogger",
        "  first event: step 10: head 2 of a.1 is saturated",
        "  7 heads flagged, 1 of them critical, 6 still open at the end",
    ]
    assert lines[7:14] == [
        "  flagged heads  flagged at  ratio then  at the end   likely cause then",
        "  head 2 of a.1  10          0.75        critical     q_rms grew 3x since step 0",
        "  head 1 of a.0  10          0.51        ended at 20  -",
        "  head 0 of a.2  30          0.6         warning      -",
        "  head 1 of a.2  30          0.59        warning      -",
        "  head 2 of a.2  30          0.58        warning      -",
        "  and 2 more, all in attn_monitor_events.jsonl",
    ]


def test_scalars_prefer_what_the_rule_judges_by() -> None:
    run = scalar_run(**{"attn_logit_row_std_max/a.0": make_series(1, np.nan, 5, 2)})
    assert summarize_scalars(run).splitlines()[6].split() == ["a.0", "5", "20", "1", "2"]


def test_a_layer_that_ends_with_nan_is_the_worst_and_its_last_number_is_not_taken_for_the_end() -> None:
    nan, never = make_series(0.9, 0.8, np.nan, np.nan), make_series(np.nan, np.nan, np.nan, np.nan)
    more = {"attn_entropy_normalized_min/b": nan, "attn_entropy_normalized_min/c": never}
    run = scalar_run(**more, **{"attn_monitor/saturation_ratio_max": make_series(0.1, 0.6, np.nan, np.nan)})
    event = make_event(20, "b", 1, kind="nonfinite", ratio=None, severity="critical")
    run = replace(run, events=[event], others={"train_loss": make_series(4, 3, np.nan, np.nan)})
    lines = summarize_scalars(run).splitlines()
    assert "  largest saturation_ratio: 0.6 at step 10, nan since 20 at the end" in lines
    assert "  head 1 of b    20          nan or inf  critical    -" in lines
    assert [line.split() for line in lines[-7:-3]] == [
        ["b", "0.8", "10", "0.9", "nan", "since", "20"],
        ["c", "-", "-", "nan", "nan", "since", "0"],
        ["a.1", "0.3", "10", "0.9", "0.6"],
        ["a.0", "0.7", "20", "0.9", "0.8"],
    ]
    assert lines[-1].split() == ["train_loss", "4", "nan", "since", "20"]


def test_a_healthy_run_with_only_scalars() -> None:
    run = scalar_run(**{"attn_monitor/saturated_heads": make_series(0, 0, 0, 0)})
    assert "  saturated heads: none at any step" in summarize_scalars(run).splitlines()

"""What the terminal says of a run: the first event, the worst heads, and the loss beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from attn_monitor.reports.summary import summarize
from attn_monitor.views import RunData, Table, run_name
from tests.event_data import make_event
from tests.summarized import LAYERS, SICK, collapsing, make_series, make_table


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
        "  val_loss                     -       4.5 (step 9)           3.75 (step 25)",
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


def test_a_ratio_that_is_inf_is_the_largest() -> None:
    run = collapsing()
    values = run.tables["saturation_ratio"].values.copy()
    values[:, 1, 0] = [0.1, 0.2, np.inf, 0.3]
    tables = {**run.tables, "saturation_ratio": Table(run.tables["saturation_ratio"].steps, values)}
    lines = summarize(replace(run, tables=tables)).splitlines()
    [table] = [index for index, line in enumerate(lines) if line.startswith("  worst heads")]
    assert [line.split()[:6] for line in lines[table + 1 : table + 3]] == [
        ["head", "0", "of", "decoder.0", "inf", "20"],
        ["head", "2", "of", "decoder.0", "2.4", "30"],
    ]
    bare = {"saturation_ratio": Table(run.tables["saturation_ratio"].steps, np.full_like(values, np.inf))}
    assert "the largest saturation_ratio is inf, head 0 of encoder.0 at step 0" in summarize(
        replace(run, tables=bare, events=[])
    )


def test_a_run_whose_heads_were_flagged_before_it_says_that_none_was_newly_flagged() -> None:
    lines = summarize(replace(collapsing(), events=[])).splitlines()  # the head's event is in the run before
    assert lines[1:3] == [
        "  no event in this run: no head was newly flagged, the largest saturation_ratio is 2.4, head 2 of decoder.0 "
        "at step 30 (limit 0.5)",
        "  1 of 6 heads above the limit at some observation, 1 at the last",
    ]


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
    assert [" ".join(line.split()) for line in lines[-3:-1]] == [
        "train_loss - 1.5 (step 19) 1.5 (step 19)",
        "val_loss - - -",
    ]


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
        "    head 2 of decoder.0: until nan or inf at step 20: logit_row_std 1.2 to 2.4, 2x = q_rms 2x (100 %)",
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

"""What the terminal says of a run of which only scalars are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attn_monitor.reports.runs import ScalarRun
from attn_monitor.reports.scalar_summary import summarize_scalars
from tests.event_data import make_event
from tests.summarized import make_series


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

"""The pages of text: events, summary, legend."""

from __future__ import annotations

import json
import math

import pytest

from attn_monitor.dashboards.first_factors import FirstFactors
from attn_monitor.dashboards.tables import Rows, event_records, overview
from attn_monitor.dashboards.texts import escape, event_page, legend_page, summary_page
from attn_monitor.events import SaturationEvent
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.scales import RATIO
from attn_monitor.tags import definition, describe_picture, describe_scalar, direction
from attn_monitor.tracking import Changes, SaturationTracker
from tests.models import make_record

RULE = SaturationRule()
SPREAD = 8.0  # sqrt(d_k) of `make_record`


def events_of(*ratios: list[float], layer: str = "net.attn") -> list[tuple[int, Changes]]:
    """Return what a tracker makes of records with the given ratios of every head."""
    tracker = SaturationTracker(RULE)
    return [
        (
            step,
            tracker.update(step, {layer: _record(heads)}),
        )
        for step, heads in enumerate(ratios)
    ]


def _record(ratios: list[float]) -> AttentionStatistics:
    """Heads that pass no gradient where one of them is at 1.5."""
    traces = [0.1 if max(ratios) >= 1.5 else 0.9] * len(ratios)
    return make_record(len(ratios), logit_row_std=[ratio * SPREAD for ratio in ratios], jacobian_trace=traces)


def test_a_page_tells_every_change_of_a_step() -> None:
    (_, first), (_, second), (_, third) = events_of([0.6, 0.1, 0.7], [1.5, 0.8, 0.1], [0.1, 0.1, 0.1])
    page = event_page(0, first)
    assert page.startswith(
        "#### step 0: 2 heads are newly saturated\n\n**warning**: step 0: head 2 of net.attn is saturated"
    )
    assert str(first.opened[0]) in page
    assert "| net.attn | 2 | 0.7 | 0.5 |" in page
    page = event_page(1, second)
    assert "#### step 1: 2 heads are critical\n" in page  # one of them new
    assert "newly saturated" not in page
    assert "step 1: 1 head recovered\n\n- head 2 of net.attn" in page
    assert "**critical**: step 1: head 0 of net.attn is saturated" in page
    assert "2 heads recovered" in event_page(2, third)
    assert event_page(3, Changes()) == ""


def test_heads_with_nan_logits_are_called_critical_and_not_saturated() -> None:
    changes = SaturationTracker(RULE).update(
        3, {"a": make_record(3, logit_row_std=[math.nan, 1.0, math.nan], nonfinite=[9, 0, 4])}
    )
    page = event_page(3, changes)
    assert page.startswith(
        "#### step 3: 2 heads are critical, their logits are nan or inf\n\n**critical**: step 3: head 0"
    )
    assert "saturated" not in page.split("|")[0]


def test_a_page_lists_the_worst_and_counts_the_rest() -> None:
    ((_, changes),) = events_of([0.6 + head / 1000 for head in range(47)])
    page = event_page(0, changes)
    assert page.count("**warning**") == 20
    assert "head 46 of" in page
    assert "head 5 of" not in page
    assert "and 27 more" in page


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a|b", "`x`", "*bold*", "[a](b)", "_x_", "a\nb", "ä.ö", "\\"]
)
def test_names_are_shown_as_they_are(name: str) -> None:
    markdown = pytest.importorskip("markdown")
    ((_, changes),) = events_of([0.9], layer=name)
    page = event_page(0, changes)
    html = markdown.markdown(page, extensions=["tables"])
    assert "<script" not in html
    assert html.count("<td>") == 4
    shown = html.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert f"<td>{' '.join(name.split())}</td>" in shown
    assert f"head 0 of {' '.join(name.split())} is saturated" in shown


def test_escaping_leaves_usual_names_alone() -> None:
    assert escape("model.layers.11.self_attn#1") == "model.layers.11.self_attn#1"
    assert escape("__init__") == "\\_\\_init\\_\\_"


def test_records_have_every_state() -> None:
    observed = events_of([0.6, 0.1], [1.5, 0.1], [0.1, 0.1])
    records = [json.loads(text) for step, changes in observed for text in event_records(step, changes)]
    assert [(record["step"], record["state"], record["severity"]) for record in records] == [
        (0, "opened", "warning"),
        (1, "critical", "critical"),
        (2, "ended", "critical"),
    ]
    assert [record["ratio"] for record in records] == [pytest.approx(value, rel=1e-6) for value in (0.6, 1.5, 0.1)]
    assert {record["since"] for record in records} == {0}
    assert records[2]["message"] == (
        "step 2: head 0 of net.attn has recovered, ratio 0.1 (limit 0.5), saturated since step 0"
    )
    assert records[0]["message"].startswith("step 0: head 0 of net.attn is saturated")
    assert records[0].keys() >= {
        "step", "layer", "head", "statistic", "value", "head_dim", "ratio", "threshold", "severity", "state", "message"
    }  # fmt: skip


def test_records_have_null_for_what_is_not_finite() -> None:
    tracker = SaturationTracker(RULE)
    changes = tracker.update(3, {"a": make_record(2, logit_row_std=[math.nan, 1.0], nonfinite=[25, 0])})
    (record,) = [json.loads(text) for text in event_records(3, changes)]
    assert (record["statistic"], record["value"], record["ratio"], record["state"]) == ("nonfinite", 25, None, "opened")


def test_the_summary_of_the_first_record_says_of_nothing_that_it_grew() -> None:
    rows, growth = Rows(), FirstFactors()
    first = {"b": make_record(2, logit_row_std=[0.8, 6.0], q_rms=[1.0, 3.0])}
    shot = rows.take(10, first, RULE)
    growth.take(shot)
    assert summary_page(shot, growth, 1).splitlines() == [
        "**step 10: 1 of 2 heads saturated**, in 1 layer. The worst heads:",
        "",
        "| layer | head | limit | saturation_ratio | q_rms |",
        "| --- | --- | --- | --- | --- |",
        "| b | 1 | 0.5 | 0.75 | 3 |",
        "| b | 0 | 0.5 | 0.1 | 1 |",
    ]
    broken = rows.take(10, {"b": make_record(2, logit_row_std=[0.8, 6.0], nonfinite=[3, 0])}, RULE)
    assert summary_page(broken, growth, 1).splitlines()[2:] == [
        "| layer | head | limit | saturation_ratio | q_rms | what |",
        "| --- | --- | --- | --- | --- | --- |",
        "| b | 0 | 0.5 | 0.1 | - | nan or inf logits |",
        "| b | 1 | 0.5 | 0.75 | - |  |",
    ]


def test_a_factor_that_changed_its_sign_did_not_grow() -> None:
    rows, growth = Rows(), FirstFactors()
    growth.take(rows.take(10, {"b": make_record(2, logit_row_std=[6.0, 6.0], scale_ratio=[-1.0, -1.0])}, RULE))
    shot = rows.take(20, {"b": make_record(2, logit_row_std=[6.0, 6.0], scale_ratio=[3.0, -2.0])}, RULE)
    assert [growth.of(shot, 0, head) for head in (0, 1)] == [{}, {"scale_ratio": 2.0}]


def test_the_summary_names_the_worst_heads_and_what_grew() -> None:
    rows, growth = Rows(), FirstFactors()
    first = {
        "b": make_record(2, logit_row_std=[0.8, 0.8], q_rms=[1.0, 1.0], k_rms=[2.0, 2.0]),
        "a": make_record(1, logit_row_std=[0.8], q_rms=[1.0], k_rms=[2.0]),
    }
    growth.take(rows.take(10, first, RULE))
    later = {
        "b": make_record(2, logit_row_std=[0.8, 6.0], q_rms=[1.0, 3.0], k_rms=[2.0, 5.0]),
        "a": make_record(1, logit_row_std=[2.0], q_rms=[1.1], k_rms=[2.0]),
    }
    shot = rows.take(20, later, RULE)
    growth.take(shot)
    page = summary_page(shot, growth, 1)
    lines = page.splitlines()
    assert lines[0].startswith("**step 20: 1 of 3 heads saturated**, in 2 layers.")
    assert "since step 10" in lines[0]
    assert lines[2] == f"| layer | head | limit | {RATIO} | q_rms | k_rms | grew most |"
    assert lines[4] == "| b | 1 | 0.5 | 0.75 | 3 (x3) | 5 (x2.5) | q_rms, 3x |"
    assert lines[5] == "| a | 0 | 0.5 | 0.25 | 1.1 (x1.1) | 2 (x1) | nothing |"
    assert len(lines) == 7


def test_the_summary_has_ten_heads_at_most_and_stands_a_record_without_numbers() -> None:
    rows, growth = Rows(), FirstFactors()
    many = rows.take(0, {"a": make_record(31, logit_row_std=[float(head) for head in range(31)])}, RULE)
    growth.take(many)
    page = summary_page(many, growth, 26)
    assert page.count("\n| a |") == 10
    assert "| a | 30 |" in page
    empty = rows.take(1, {}, RULE)
    growth.take(empty)
    assert "no saturation ratio was measured" in summary_page(empty, growth, 0)
    unknown = rows.take(2, {"a": make_record(31, logit_row_std=[math.nan] * 30 + [math.inf])}, RULE)
    growth.take(unknown)
    assert "no saturation ratio" in summary_page(unknown, growth, 0)
    record = make_record(3, logit_row_std=[9.0, 1.0, math.nan], nonfinite=[0, 0, 25])
    broken = rows.take(3, {"a": record}, RULE)
    growth.take(broken)
    lines = summary_page(broken, growth, 2).splitlines()
    assert lines[0].startswith("**step 3: 2 of 31 heads with an event, 1 of them with nan or inf logits**, in 1 layer.")
    assert lines[4] == "| a | 2 | 0.5 | - | nan or inf logits |"  # the worst of all
    assert lines[5].startswith("| a | 0 | 0.5 | 1.12 |")


def test_growth_counts_from_the_first_record_of_each_head() -> None:
    rows, growth = Rows(), FirstFactors()
    growth.take(rows.take(3, {"a": make_record(1, q_rms=[2.0])}, RULE))
    shot = rows.take(5, {"b": make_record(2, q_rms=[4.0, math.nan]), "a": make_record(1, q_rms=[3.0])}, RULE)
    growth.take(shot)
    assert [growth.of(shot, *place) for place in ((0, 0), (1, 0), (1, 1))] == [{"q_rms": 1.5}, {"q_rms": 1.0}, {}]
    shot = rows.take(7, {"b": make_record(2, q_rms=[8.0, 7.0])}, RULE)
    growth.take(shot)
    assert [growth.of(shot, *place) for place in ((0, 0), (1, 0), (1, 1))] == [{}, {"q_rms": 2.0}, {"q_rms": 1.0}]
    assert growth.since == 3


def test_the_legend_says_what_colours_and_rows_mean() -> None:
    shot = Rows().take(0, {"x.<b>": make_record(3), "y": make_record(2)}, RULE)
    page = legend_page(shot, ["entropy", RATIO], 27)
    assert (
        "| `entropy` | mean over rows of the entropy -sum p ln p; in nats | smaller is worse | 0 to 10, linear |"
        in page
    )
    assert f"| `{RATIO}` |" in page
    assert "27 curves are logged for 2 layers" in page
    assert "| 0 | x.&lt;b&gt; | 3 |\n| 1 | y | 2 |" in page
    many = Rows().take(0, {f"layer.{index}": make_record(1) for index in range(403)}, RULE)
    assert "and 3 more layers" in legend_page(many, [], 0)


@pytest.mark.parametrize(
    ("tag", "start", "unit"),
    [
        ("attn_entropy/net.a", "entropy, mean over the heads of net.a: mean over rows", "in nats; smaller is worse."),
        ("attn_entropy_min/net.a", "entropy, smallest head of net.a:", "in nats; smaller is worse."),
        ("attn_logit_max/net.a", "logit_max, mean over the heads of net.a: largest logit", "larger is worse."),
        ("attn_logit_max_max/net.a", "logit_max, largest head of net.a: largest logit", "larger is worse."),
        ("attn/logit_max_max", "logit_max, largest head of the whole model: largest logit", "larger is worse."),
        ("attn_monitor/saturated_heads", "number of heads with an open event", "heads."),
        ("attn/saturation_ratio_max", "largest saturation_ratio of any head", "a pure number."),
    ],
)
def test_descriptions_of_scalars_have_definition_and_unit(tag: str, start: str, unit: str) -> None:
    text = describe_scalar(tag)
    assert text.startswith(start)
    assert text.endswith(unit)


def test_descriptions_of_pictures_hold_the_legend() -> None:
    text = describe_picture(RATIO, 0.4)
    assert "0.01 to 10, logarithmic" in text
    assert "Blue below the limit of 0.4, orange above" in text
    assert "Blue" not in describe_picture("entropy", 0.4)
    assert "in nats" in describe_picture("entropy", 0.4)
    assert definition("entropy_standard_error").startswith("standard error of the mean over rows")
    assert (direction("sink_mass"), direction(RATIO)) == ("neither direction is worse", "larger is worse")


def test_the_overview_has_the_worst_head_of_the_model() -> None:
    record = {
        "a": make_record(2, logit_row_std=[1.0, 6.0], entropy_normalized=[0.5, 0.2], sink_mass=[0.9, 0.9]),
        "b": make_record(1, logit_row_std=[2.0], entropy_normalized=[math.nan]),
    }
    shot = Rows().take(0, record, RULE)
    assert overview(shot, {"logit_row_std", "entropy_normalized", "sink_mass", "logit_max"}, 3) == {
        "saturated_heads": 3.0,
        "saturation_ratio_max": 0.75,
        "entropy_normalized_min": pytest.approx(0.2),
        "logit_row_std_max": 6.0,
    }
    assert overview(Rows().take(0, {}, RULE), {"logit_max"}, 0) == {"saturated_heads": 0.0}


def test_an_event_that_ended_keeps_its_onset() -> None:
    (_, _), (_, changes) = events_of([0.6], [0.2])
    (ended,) = changes.ended
    assert isinstance(ended, SaturationEvent)
    assert ended.step == 0
    assert [ended.value, ended.ratio] == pytest.approx([1.6, 0.2])
    assert changes.closed == [("net.attn", 0)]

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import Changes, SaturationTracker
from tests.models import make_record


def layer(ratios: list[float], traces: list[float], **more: Any) -> AttentionStatistics:
    """Heads of D = 64 with these saturation ratios and traces."""
    return make_record(len(ratios), logit_row_std=[8 * ratio for ratio in ratios], jacobian_trace=traces, **more)


def severities(changes: Changes) -> dict[str, list[tuple[str, int, str]]]:
    lists = {"opened": changes.opened, "escalated": changes.escalated}
    return {
        name: [(event.layer, event.head, event.severity) for event in found] for name, found in lists.items() if found
    }


def test_one_dead_head_among_healthy_ones_is_a_warning_however_far_it_is_above() -> None:
    tracker = SaturationTracker(SaturationRule())
    changes = tracker.update(0, {"a": layer([9.0, 0.1, 0.2], [0.0, 0.9, 0.8])})
    assert severities(changes) == {"opened": [("a", 0, "warning")]}


def test_events_become_critical_when_the_model_as_a_whole_passes_no_gradient() -> None:
    tracker = SaturationTracker(SaturationRule())
    healthy = {"a": layer([0.6, 0.6, 0.1], [0.6, 0.5, 0.9]), "b": layer([0.1] * 5, [0.9] * 5)}
    assert severities(tracker.update(3, healthy)) == {"opened": [("a", 0, "warning"), ("a", 1, "warning")]}
    worse = {"a": layer([0.9, 0.45, 0.1], [0.1, 0.3, 0.4]), "b": layer([0.7, 0.1, 0.1, 0.1, 0.1], [0.5] * 5)}
    changes = tracker.update(7, worse)  # mean of a 0.267, of the model 0.4125
    assert severities(changes) == {
        "opened": [("b", 0, "warning")],
        "escalated": [("a", 0, "critical"), ("a", 1, "critical")],
    }
    first = tracker.events[0]
    assert (first.step, first.critical_step, first.latest) == (3, 7, 7)
    assert first.ratio == pytest.approx(0.9)
    assert str(first).startswith(
        "step 7: head 0 of a is saturated, logit_row_std 7.2 is 0.9 x sqrt(d_k=64) (limit 0.5), since step 3; "
        "critical: only 41% of the gradient of uniform attention gets through, on average over the model's 8 heads "
        "(mean jacobian_trace, limit 45%); no harm if the loss still falls"
    )


def test_the_limit_is_the_mean_over_all_heads() -> None:
    for mean, critical in ((0.46, False), (0.44, True)):
        tracker = SaturationTracker(SaturationRule())
        record = {"a": layer([0.6, 0.6], [mean - 0.3] * 2), "b": layer([0.1, 0.1], [mean + 0.3] * 2)}
        tracker.update(0, record)
        assert [event.severity for event in tracker.events] == ["critical" if critical else "warning"] * 2


def test_a_number_that_is_critical_is_never_shown_as_its_limit() -> None:
    tracker = SaturationTracker(SaturationRule())
    (event,) = tracker.update(0, {"a": layer([0.6], [0.4499])}).opened
    assert event.critical_reason == (
        "only 44% of the gradient of uniform attention gets through the model's only head (mean jacobian_trace, "
        "limit 45%); no harm if the loss still falls"
    )


def test_a_collapse_without_a_head_above_its_limit_has_an_event_too() -> None:
    tracker = SaturationTracker(SaturationRule())
    (event,) = tracker.update(5, {"a": layer([0.4, 0.3, 0.4], [0.3, 0.2, 0.4], q_rms=[1.0, 4.0, 1.0])}).opened
    assert (event.head, event.statistic, event.severity) == (1, "jacobian_trace", "critical")
    assert event.value == pytest.approx(0.2)
    assert str(event) == (
        "step 5: head 1 of a passes 20.0% of the gradient of uniform attention (jacobian_trace); critical: "
        "only 30% of the gradient of uniform attention gets through, on average over the model's 3 heads (mean "
        "jacobian_trace, limit 45%); no harm if the loss still falls\n"
        "  likely cause: q_rms is 4 at the first observation already (usual: about 1); what helps: check the "
        "initialisation, or the checkpoint that was loaded"
    )
    assert tracker.update(6, {"a": layer([0.1] * 3, [0.4] * 3)}).closed == []  # it lasts as long as the collapse
    assert tracker.update(7, {"a": layer([0.1] * 3, [0.5] * 3)}).closed == [("a", 1)]


def test_heads_that_rest_on_a_sink_do_not_count() -> None:
    tracker = SaturationTracker(SaturationRule())
    sinks = layer([0.6, 0.2, 0.1], [0.01, 0.02, 0.9], sink_mass=[0.97, 0.95, 0.1])
    (event,) = tracker.update(0, {"a": sinks}).opened
    assert event.severity == "warning"
    assert event.cause == "likely cause: the head rests on a sink, the first key has 97% of its probability"
    assert severities(tracker.update(1, {"a": layer([0.6, 0.2, 0.1], [0.01, 0.02, 0.9])})) == {
        "escalated": [("a", 0, "critical")]
    }


def test_a_saturated_softcap_is_a_collapse_that_the_softmax_does_not_show() -> None:
    tracker = SaturationTracker(SaturationRule())
    capped = {"qk_std": [300.0, 250.0, 180.0], "logit_std": [19.0, 19.0, 19.0]}
    (event,) = tracker.update(0, {"a": layer([0.4, 0.4, 0.4], [0.9, 0.8, 0.7], **capped)}).opened
    assert (event.head, event.severity) == (2, "critical")
    assert event.critical_reason == (
        "the softcap is saturated, scale * q.k spreads 13.2 times as far as the logits after it (median qk_std / "
        "logit_std, limit 10); no harm if the loss still falls"
    )
    used = {"qk_std": [60.0, 250.0, 60.0], "logit_std": [19.0, 19.0, 19.0]}
    assert SaturationTracker(SaturationRule()).update(0, {"a": layer([0.4] * 3, [0.9] * 3, **used)}).opened == []


def test_patience_counts_observations_of_the_collapse_and_survives_a_resume() -> None:
    record = {"a": layer([0.6], [0.2])}
    tracker = SaturationTracker(SaturationRule(patience=3))
    for step in range(2):
        tracker.update(step, record)
    tracker.update(2, {"a": make_record(1)})  # not measured is no observation
    resumed = SaturationTracker(SaturationRule(patience=3))
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    changes = resumed.update(3, record)
    assert [(event.step, event.severity) for event in changes.opened] == [(3, "critical")]


@pytest.mark.parametrize("trace", [math.nan, None])
def test_a_trace_that_was_not_measured_is_no_collapse(trace: float | None) -> None:
    tracker = SaturationTracker(SaturationRule())
    values: dict[str, Any] = {} if trace is None else {"jacobian_trace": [trace]}
    tracker.update(0, {"a": make_record(1, logit_row_std=[4.8], **values)})
    assert [event.severity for event in tracker.events] == ["warning"]


def test_events_are_replaced_in_place_after_a_resume_too() -> None:
    first, second = SaturationTracker(SaturationRule()), SaturationTracker(SaturationRule())
    first.update(0, {"a": layer([0.6, 0.7], [0.9, 0.9])})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    changes = second.update(1, {"a": layer([0.9, 0.9], [0.1, 0.1])})
    assert second.events == changes.escalated
    assert [(event.head, event.step, event.critical_step) for event in second.events] == [(0, 0, 1), (1, 0, 1)]


def test_a_head_on_a_sink_stays_a_warning_where_its_layer_collapses() -> None:
    tracker = SaturationTracker(SaturationRule())
    record = layer([0.9, 0.9, 0.9], [0.01, 0.2, 0.3], sink_mass=[0.99, 0.1, 0.2], q_rms=[3.0] * 3)
    tracker.update(0, {"a": record})
    assert [(event.head, event.severity) for event in tracker.events] == [
        (0, "warning"),
        (1, "critical"),
        (2, "critical"),
    ]
    assert tracker.events[0].remedy == "nothing while the loss is fine, heads that rest on a sink are normal"


def test_where_only_a_sink_is_flagged_the_collapse_is_that_of_another_head() -> None:
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": layer([0.9, 0.4, 0.4], [0.01, 0.3, 0.2], sink_mass=[0.99, 0.1, 0.2])})
    assert [(event.head, event.severity, event.statistic) for event in tracker.events] == [
        (0, "warning", "logit_row_std"),
        (2, "critical", "jacobian_trace"),
    ]

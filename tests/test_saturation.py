from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from attn_monitor.events import AttentionSaturationError, SaturationEvent
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import SaturationTracker
from tests.models import make_record


def events_of(tracker: SaturationTracker, ratios: list[float]) -> list[str]:
    """Feed one head of D = 64 with ratios and return what happened at each step."""
    story = []
    for step, ratio in enumerate(ratios):
        changes = tracker.update(step, {"a": make_record(1, logit_row_std=[ratio * 8])})
        kinds = {"opened": changes.opened, "escalated": changes.escalated, "closed": changes.closed}
        story.append(next((kind for kind, found in kinds.items() if found), "-"))
    return story


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": 0.0}, ValueError, r"`threshold` expects a positive finite number or None, got 0.0"),
        ({"threshold": -1}, ValueError, r"got -1"),
        ({"threshold": math.nan}, ValueError, r"got nan"),
        ({"threshold": math.inf}, ValueError, r"got inf"),
        ({"threshold": "0.5"}, TypeError, r"`threshold` expects .* got '0.5'"),
        ({"threshold": True}, TypeError, r"got True"),
        ({"statistic": "entropy"}, ValueError, r"`statistic` expects one of \['logit_row_std', 'logit_std'\]"),
        ({"relative_to": "dk"}, ValueError, r"`relative_to` expects one of \['sqrt_dk', 'critical'\], got 'dk'"),
        ({"patience": 0}, ValueError, r"`patience` expects at least 1 observation, got 0"),
        ({"patience": 1.5}, TypeError, r"`patience` expects a whole number of observations, got 1.5"),
        ({"patience": True}, TypeError, r"got True"),
        ({"release": 0}, ValueError, r"`release` expects a fraction of the threshold in \(0, 1\], got 0"),
        ({"release": 1.1}, ValueError, r"got 1.1"),
        ({"release": math.nan}, ValueError, r"got nan"),
        ({"statistic": 3}, TypeError, r"`statistic` expects one of .* got 3 of type int"),
        ({"relative_to": None}, TypeError, r"`relative_to` expects one of .* got None of type NoneType"),
        ({"overrides": {3: 0.5}}, TypeError, r"`overrides` expects names or globs of layers as keys, got 3"),
        ({"overrides": {"": 0.5}}, ValueError, r"`overrides` expects names or globs of layers as keys, got an empty"),
        ({"overrides": ["a"]}, TypeError, r"`overrides` expects a mapping \{pattern: threshold\}, got \['a'\]"),
    ],
)
def test_bad_settings_say_what_was_expected(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SaturationRule(**arguments)


def test_overrides_are_shown_and_tell_rules_apart() -> None:
    shown = repr(SaturationRule(overrides={"decoder.*": 0.8}))
    assert shown == (
        "SaturationRule(threshold=None, statistic='logit_row_std', relative_to='sqrt_dk', patience=1, release=0.8, "
        "overrides={'decoder.*': 0.8})"
    )
    assert eval(shown) == SaturationRule(overrides={"decoder.*": 0.8}) != SaturationRule()
    assert "overrides" not in repr(SaturationRule())


def test_ratio_is_the_spread_over_the_root_of_the_head_dimension() -> None:
    stats = make_record(logit_row_std=[4.0, 8.0], logit_std=[8.0, 16.0], critical_ratio=[0.3, 0.6])
    assert SaturationRule().ratio(stats).tolist() == [0.5, 1.0]
    assert SaturationRule(statistic="logit_std").ratio(stats).tolist() == [1.0, 2.0]
    critical = SaturationRule(relative_to="critical")
    assert critical.ratio(stats).tolist() == pytest.approx([0.3, 0.6])
    assert (SaturationRule().limit(stats), critical.limit(stats)) == (0.5, 1.0)
    assert (SaturationRule(threshold=0.3).limit(stats), SaturationRule().measure(stats)) == (0.3, "logit_row_std")


def test_unknown_head_dimension_falls_back_to_the_critical_ratio_with_its_own_limit() -> None:
    stats = make_record(head_dim=None, logit_row_std=[4.0, 8.0], critical_ratio=[0.9, 1.1])
    rule = SaturationRule(threshold=0.2)
    assert rule.ratio(stats).tolist() == pytest.approx([0.9, 1.1])
    assert (rule.limit(stats), rule.measure(stats)) == (1.0, "critical_ratio")
    assert SaturationRule(relative_to="critical", threshold=0.2).limit(stats) == 0.2


def test_what_was_not_measured_is_nan_and_never_saturated() -> None:
    nothing = make_record()
    assert SaturationRule().ratio(nothing).isnan().all()
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": nothing, "b": make_record(logit_row_std=[math.nan, 1.0])})
    assert (tracker.events, tracker.open_heads) == ([], 0)


def test_requires_names_what_the_rule_needs() -> None:
    assert SaturationRule().requires == {"logit_row_std", "critical_ratio"}
    assert SaturationRule(statistic="logit_std").requires == {"logit_std", "critical_ratio"}
    assert SaturationRule(relative_to="critical").requires == {"critical_ratio"}


def test_an_event_opens_above_the_limit_and_closes_below_the_release() -> None:
    tracker = SaturationTracker(SaturationRule())
    story = events_of(tracker, [0.5, 0.51, 0.9, 0.45, 0.51, 0.39, 0.45, 0.6])
    assert story == ["-", "opened", "-", "-", "-", "closed", "-", "opened"]
    assert [event.step for event in tracker.events] == [1, 7]
    assert [event.ratio for event in tracker.events] == pytest.approx([0.51, 0.6])
    assert tracker.open_heads == 1


def test_patience_counts_consecutive_observations() -> None:
    tracker = SaturationTracker(SaturationRule(patience=3))
    assert events_of(tracker, [0.6, 0.6, 0.4, 0.6, 0.6, 0.6]) == ["-"] * 5 + ["opened"]


def test_an_observation_without_a_value_neither_counts_nor_interrupts() -> None:
    tracker = SaturationTracker(SaturationRule(patience=2))
    assert events_of(tracker, [0.6, math.nan, 0.6, math.nan, 0.1]) == ["-", "-", "opened", "-", "closed"]
    tracker.update(9, {})
    assert tracker.open_heads == 0


def test_each_head_has_its_own_episode() -> None:
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": make_record(3, logit_row_std=[8.0, 1.0, 6.0]), "b": make_record(1, logit_row_std=[5.0])})
    assert [(event.layer, event.head) for event in tracker.events] == [("a", 0), ("a", 2), ("b", 0)]
    changes = tracker.update(1, {"a": make_record(3, logit_row_std=[1.0, 6.0, 6.0])})
    assert (changes.closed, [event.head for event in changes.opened], tracker.open_heads) == ([("a", 0)], [1], 3)


def test_nonfinite_logits_are_a_critical_event_at_once_and_only_once() -> None:
    tracker = SaturationTracker(SaturationRule(patience=5))
    broken = make_record(logit_row_std=[1.0, 1.0], nonfinite=[0, 3])
    (event,) = tracker.update(7, {"a": broken}).opened
    assert (event.statistic, event.value, event.severity, event.ratio) == ("nonfinite", 3.0, "critical", math.inf)
    assert str(event) == (
        "step 7: head 1 of a has 3 unmasked logits that are nan or inf\n"
        "  what helps: look at the inputs and the step before; in float16 or bfloat16 keep the logits and the softmax "
        "in float32"
    )
    assert tracker.update(8, {"a": broken}).opened == []
    changes = tracker.update(9, {"a": make_record(logit_row_std=[1.0, 1.0])})
    assert (changes.closed, changes.ended[0].value, changes.ended[0].ratio) == ([("a", 1)], 0, 0.125)


def test_a_saturated_head_that_breaks_has_an_event_of_each_kind() -> None:
    tracker = SaturationTracker(SaturationRule())
    story = []
    for step, (row_std, nonfinite) in enumerate([(6.0, 0), (6.0, 2), (6.0, 0), (1.0, 2), (1.0, 0)]):
        changes = tracker.update(step, {"a": make_record(1, logit_row_std=[row_std], nonfinite=[nonfinite])})
        story.append(([event.kind for event in changes.opened], [event.kind for event in changes.ended]))
        assert tracker.open_heads == (step < 4)
    assert story == [
        (["saturated"], []),
        (["nonfinite"], []),
        ([], ["nonfinite"]),
        (["nonfinite"], ["saturated"]),
        ([], ["nonfinite"]),
    ]


def test_logits_near_the_end_of_float16_are_told_before_they_overflow() -> None:
    tracker = SaturationTracker(SaturationRule(patience=9))
    story = []
    for step, (highest, lowest) in enumerate([(32_000.0, -1.0), (32_752.0, -1.0), (1.0, -40_000.0), (1.0, -9_000.0)]):
        changes = tracker.update(step, {"a": make_record(1, logit_max=[highest], logit_min=[lowest])})
        story.append((len(changes.opened), len(changes.ended)))
    assert story == [(0, 0), (1, 0), (0, 0), (0, 1)]
    (event,) = tracker.events
    assert (event.statistic, event.value, event.ratio, event.severity) == ("float16_overflow", 32_752.0, 0.5, "warning")
    assert str(event) == (
        "step 1: head 0 of a has a logit of 3.28e+04, 50% of the largest float16 number, 65504\n"
        "  what helps: QK-norm or a logit softcap; until then keep the logits and the softmax in float32"
    )


@pytest.mark.parametrize(
    ("first", "now", "cause"),
    [
        ({"q_rms": 1.0}, {"q_rms": 4.1, "k_rms": 9.0}, "likely cause: q_rms grew 4.1x since step 0"),
        ({"q_rms": 1.0, "k_rms": 1.0}, {"q_rms": 2.0, "k_rms": 3.0}, "likely cause: k_rms grew 3x since step 0"),
        ({}, {"scale_ratio": 8.0}, "likely cause: the scale 1/sqrt(d_k) is missing"),
        ({}, {"scale_ratio": 64.0}, "likely cause: sqrt(d_k) stands in place of 1/sqrt(d_k)"),
        ({}, {"scale_ratio": 3.0}, "likely cause: the scale is 3x 1/sqrt(d_k)"),
        ({"scale_ratio": 1.0}, {"scale_ratio": 3.0}, "likely cause: the scale grew 3x since step 0"),
        (
            {"scale_ratio": 8.0, "alignment": 1.0},
            {"scale_ratio": 8.0, "alignment": 2.0},
            "likely cause: the scale 1/sqrt(d_k) is missing, and the alignment of q and k grew 2x since step 0",
        ),
        (
            {},
            {"scale_ratio": 1.0, "q_rms": 2.0, "k_rms": 5.0},
            "likely cause: k_rms is 5 at the first observation already (usual: about 1)",
        ),
        (
            {"qk_std": 1.0},
            {"qk_std": 1.0},
            r"likely cause: the rest (bias, softcap, row offsets) grew 60x since step 0",
        ),
        ({"scale_ratio": 1.1, "q_rms": 1.0}, {"scale_ratio": 1.1, "q_rms": 1.2}, ""),
        ({}, {}, ""),
    ],
)
def test_the_cause_is_the_factor_that_grew(first: dict[str, float], now: dict[str, float], cause: str) -> None:
    def one_head(row_std: float, factors: dict[str, float]) -> AttentionStatistics:
        values: dict[str, Any] = {name: [value] for name, value in {**factors, "logit_row_std": row_std}.items()}
        return make_record(1, **values)

    tracker = SaturationTracker(SaturationRule())
    if first:
        tracker.update(0, {"a": one_head(0.1, first)})
    (event,) = tracker.update(5, {"a": one_head(6.0, now)}).opened
    assert event.cause == cause


def test_the_message_names_step_layer_head_number_limit_and_cause() -> None:
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"net.attn": make_record(logit_row_std=[1.0, 1.0], q_rms=[1.0, 1.0], logit_max=[3.0, 3.0])})
    values: dict[str, Any] = {"logit_row_std": [1.0, 12.0], "q_rms": [1.0, 4.1], "logit_max": [3.0, 99.0]}
    (event,) = tracker.update(120, {"net.attn": make_record(**values)}).opened
    assert str(event) == (
        "step 120: head 1 of net.attn is saturated, logit_row_std 12 is 1.5 x sqrt(d_k=64) (limit 0.5)\n"
        "  likely cause: q_rms grew 4.1x since step 0; what helps: lower the learning rate or warm up longer; QK-norm, "
        "QK-clip, or weight decay on W_q and W_k"
    )
    assert event.q_rms == pytest.approx(4.1)
    assert (event.k_rms, event.logit_max) == (None, 99.0)
    unknown = SaturationTracker(SaturationRule())
    (event,) = unknown.update(3, {"x": make_record(1, head_dim=None, critical_ratio=[1.25])}).opened
    assert str(event) == "step 3: head 0 of x is saturated, critical_ratio 1.25 (limit 1)"


def test_the_memory_survives_a_round_trip_through_plain_values() -> None:
    def advance(tracker: SaturationTracker, steps: range) -> list[str]:
        told = []
        for step in steps:
            row = [[0.1, 6.0], [6.0, 6.0], [0.2, 0.3]][step % 3]
            stats = make_record(logit_row_std=row, q_rms=[1.0 + step, 1.0], nonfinite=[0, step == 4])
            told += [str(event) for event in tracker.update(step, {"a": stats}).opened]
        return told

    rule = SaturationRule(patience=2)
    straight, before, after = (SaturationTracker(rule) for _ in range(3))
    told = advance(straight, range(12))
    first = advance(before, range(5))
    state = before.state_dict()
    after.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert first + advance(after, range(5, 12)) == told
    assert after.events == straight.events
    assert only_plain(state)


def only_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and only_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(only_plain(item) for item in value)
    return value is None or type(value) in (int, float, str, bool)


def test_a_state_of_another_version_is_refused_and_changes_nothing() -> None:
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": make_record(1, logit_row_std=[9.0])})
    with pytest.raises(ValueError, match=r"version 2, got 99"):
        tracker.load_state_dict({"version": 99})
    assert tracker.open_heads == 1


def test_forgetting_a_layer_closes_its_episodes_but_keeps_the_events() -> None:
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": make_record(1, logit_row_std=[9.0]), "b": make_record(1, logit_row_std=[9.0])})
    tracker.forget(["a", "unknown"])
    assert tracker.layers == {"b"}
    assert (tracker.open_heads, len(tracker.events)) == (1, 2)
    tracker.update(1, {"b": make_record(3, logit_row_std=[1.0, 1.0, 1.0])})  # another head count, another model
    assert tracker.open_heads == 0


def test_the_users_cleared_list_stays_cleared() -> None:
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": make_record(1, logit_row_std=[5.0])})
    tracker.events.clear()
    assert len(tracker.update(1, {"a": make_record(1, logit_row_std=[9.0], jacobian_trace=[0.1])}).escalated) == 1
    assert tracker.events == []


def test_the_error_carries_its_events_also_through_pickle() -> None:
    event = SaturationEvent(
        step=3,
        layer="a",
        head=0,
        statistic="logit_std",
        value=9.0,
        head_dim=4,
        ratio=4.5,
        threshold=0.5,
        severity="critical",
    )
    error = pickle.loads(pickle.dumps(AttentionSaturationError([event])))
    assert (error.events, str(event) in str(error)) == ([event], True)
    assert torch.tensor(event.ratio) == 4.5

"""The words of events and forecasts: what helps follows from the diagnosis, shares add up, one text stays short."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_monitor.diagnosis import (
    INITIAL,
    LEARNED_SCALE,
    NORMS,
    SCALE,
    SLOWER,
    diagnose,
)
from attn_monitor.events import SaturationEvent
from attn_monitor.forecast import Forecast
from attn_monitor.judge import Judge
from attn_monitor.notices import Notices
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import SaturationTracker
from tests.models import make_record

FIRST = {"scale_ratio": 1.0, "q_rms": 1.0, "k_rms": 1.0, "alignment": 1.0, "qk_std": 1.0, "logit_row_std": 1.0}


def said_of(notices: Notices) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notices.say(aloud=True)
    return [str(warning.message) for warning in caught]


def foretold(**paths: Sequence[float]) -> list[Forecast]:
    """Return what a judge foretells of one head of D = 64 whose numbers go along paths of 40 observations."""
    judge, found = Judge(SaturationRule()), []
    for index in range(40):
        values: dict[str, Any] = {name: [path[index]] for name, path in paths.items()}
        found += judge.take(10 * index, {"a": make_record(1, **values)}).forecasts
    return found


RISING = [0.8 + 0.08 * index for index in range(40)]
FLAT = [1.0] * 40


@pytest.mark.parametrize(
    ("paths", "remedy"),
    [
        ({"scale_ratio": [8.0] * 40, "scale": FLAT, "q_rms": RISING, "k_rms": FLAT}, SCALE),
        ({"scale_ratio": FLAT, "q_rms": RISING, "k_rms": FLAT}, NORMS),
        ({"scale_ratio": RISING, "q_rms": FLAT, "k_rms": FLAT}, LEARNED_SCALE),
        # Cosine attention: its scale is meant, whatever its number is, and what grew is told.
        ({"scale_ratio": [80.0] * 40, "q_rms": [0.125] * 40, "k_rms": [0.125] * 40, "alignment": RISING}, "softcap"),
        ({}, "bound the temperature"),
        ({"q_rms": FLAT, "k_rms": FLAT}, SLOWER),
    ],
    ids=["scale first", "norms", "a learned scale", "a scale that is meant", "without query and key", "nothing known"],
)
def test_what_helps_before_a_forecast_follows_the_diagnosis(paths: Mapping[str, Sequence[float]], remedy: str) -> None:
    (found,) = foretold(logit_row_std=RISING, **paths)
    assert remedy in found.remedy
    assert (SCALE in found.remedy) == (remedy == SCALE)
    assert str(found).splitlines()[1:] == [f"  what helps before that: {found.remedy}"]


def a_forecast(head: int, remedy: str, expected: int = 90) -> Forecast:
    return Forecast(
        step=70,
        layer="a",
        head=head,
        ratio=0.4,
        threshold=0.5,
        expected=expected,
        earliest=80,
        latest=120,
        remedy=remedy,
    )


def test_advice_that_forecasts_share_is_said_once() -> None:
    notices = Notices()
    notices.add_forecasts([a_forecast(head, SCALE, 90 + head) for head in range(5)])
    (text,) = said_of(notices)
    assert text.count(SCALE) == 1
    lines = text.splitlines()
    assert [f"head {head} of a" in line for head, line in enumerate(lines[:3])] == [True] * 3
    assert lines[3:] == [f"  what helps before that: {SCALE}", "  and 2 more heads are on the way to the limit"]
    notices.add_forecasts([a_forecast(head, SCALE if head < 9 else NORMS) for head in range(5, 10)])
    assert said_of(notices)[0].count("what helps") == 0  # the soonest has advice that was told


def test_another_advice_is_said_with_the_heads_that_it_is_for() -> None:
    notices = Notices()
    notices.add_forecasts([a_forecast(0, SCALE), a_forecast(1, NORMS), a_forecast(2, SCALE)])
    (text,) = said_of(notices)
    shape = [re.sub(r"step.*(head \d).*", r"\1", line).strip() for line in text.splitlines()]
    helps = "what helps before that: "
    assert shape == ["head 0", "head 2", helps + SCALE, "head 1", helps + NORMS]


def test_what_is_large_at_the_first_observation_is_no_matter_of_the_learning_rate() -> None:
    tracker = SaturationTracker(SaturationRule())
    values: dict[str, Any] = {name: [value] for name, value in {**FIRST, "k_rms": 7.0, "logit_row_std": 7.0}.items()}
    (event,) = tracker.update(0, {"a": make_record(1, **values)}).opened
    assert event.explanation == (
        "likely cause: k_rms is 7 at the first observation already (usual: about 1); what helps: check the "
        "initialisation, or the checkpoint that was loaded"
    )
    grown = diagnose({**FIRST, "k_rms": 7.0}, FIRST, since=0, head_dim=64)
    assert (grown.remedy, INITIAL in grown.remedy) == (NORMS, False)


def test_shown_logits_that_are_wide_from_the_start_are_no_matter_of_the_learning_rate() -> None:
    values: dict[str, Any] = {"critical_ratio": [1.4], "logit_row_std": [4.2], "logit_max": [31.0]}
    (event,) = SaturationTracker(SaturationRule()).update(7, {"a": make_record(1, head_dim=None, **values)}).opened
    assert event.remedy == "check the temperature or scale, or the checkpoint that was loaded"


def test_shares_that_are_told_include_what_shrank() -> None:
    grown = {"q_rms": 1.4, "k_rms": 1.3, "alignment": 2.6}
    spread = 1.4 * 1.3 * 2.6
    now = {**FIRST, **grown, "qk_std": spread, "logit_row_std": spread * 0.94}
    assert diagnose(now, FIRST, since=0, head_dim=64).cause == (
        "likely cause: the alignment of q and k grew 2.6x since step 0 (alignment 64%, q_rms 22%, k_rms 18%, rest -4% "
        "of the growth)"
    )


@given(by=st.lists(st.floats(0.5, 8), min_size=5, max_size=5))
def test_shares_that_are_told_add_up_to_100(by: list[float]) -> None:
    scale_ratio, q_rms, k_rms, alignment, rest = by
    spread = scale_ratio * q_rms * k_rms * alignment
    now = {"scale_ratio": scale_ratio, "q_rms": q_rms, "k_rms": k_rms, "alignment": alignment}
    cause = diagnose({**now, "qk_std": spread, "logit_row_std": spread * rest}, FIRST, since=0, head_dim=64).cause
    told = [int(share) for share in re.findall(r"(-?\d+)%", cause)]
    assert not told or sum(told) == 100
    assert 0 not in told


def test_what_helps_against_an_overflow_is_what_helps_against_its_cause() -> None:
    tracker = SaturationTracker(SaturationRule(threshold=1e9))
    values: dict[str, Any] = {name: [value] for name, value in FIRST.items()}
    tracker.update(0, {"a": make_record(1, **values)})
    grown = {**values, "q_rms": [5e4], "logit_max": [4e4], "sink_mass": [0.9]}
    (event,) = tracker.update(1, {"a": make_record(1, **grown)}).opened
    assert event.explanation == (
        f"likely cause: q_rms grew 5e+04x since step 0; what helps: {NORMS}; until then keep the logits and the "
        "softmax in float32"
    )


@pytest.mark.parametrize(
    ("value", "share"), [(32_752.0, "50% of"), (65_000.0, "99% of"), (65_504.0, "100% of"), (130_400.0, "1.99 times")]
)
def test_an_overflow_is_told_as_a_share_of_float16_or_as_a_multiple_of_it(value: float, share: str) -> None:
    for sign in (1, -1):
        extremes: dict[str, Any] = {"logit_max": [value], "logit_min": [-1.0]}
        if sign < 0:
            extremes = {"logit_max": [1.0], "logit_min": [-value]}
        (event,) = SaturationTracker(SaturationRule()).update(4, {"a": make_record(1, **extremes)}).opened
        assert str(event).splitlines()[0] == (
            f"step 4: head 0 of a has a logit of {value:.3g}, {share} the largest float16 number, 65504"
        )


def test_no_harm_is_promised_only_where_all_logits_and_their_spreads_are_finite() -> None:
    def reasons(**more: Any) -> list[str]:
        values: dict[str, Any] = {"jacobian_trace": [0.1, 0.2], "logit_row_std": [80.0, 80.0], **more}
        changes = SaturationTracker(SaturationRule()).update(3, {"a": make_record(**values)})
        return [event.critical_reason for event in changes.opened if event.kind == "saturated"]

    told = "only 15% of the gradient of uniform attention gets through, on average over the model's 2 heads (mean "
    told += "jacobian_trace, limit 45%)"
    assert reasons() == [f"{told}; no harm if the loss still falls"] * 2
    assert reasons(nonfinite=[0, 3]) == reasons(logit_row_std=[math.inf, 80.0]) == [told] * 2
    assert reasons(logit_row_std=[80.0, math.nan]) == [told]
    capped: dict[str, Any] = {"jacobian_trace": [0.9, 0.9], "qk_std": [40.0, 40.0], "logit_std": [1.0, 1.0]}
    assert [reason.endswith("no harm if the loss still falls") for reason in reasons(**capped)] == [True] * 2
    assert not any("no harm" in reason for reason in reasons(**capped, nonfinite=[1, 0]))


def an_event(head: int, **more: Any) -> SaturationEvent:
    settings: dict[str, Any] = {"statistic": "logit_row_std", "value": 9.0, "severity": "critical", "head_dim": 64}
    settings |= {"ratio": 9.0 - head / 10, "threshold": 0.5, "critical_reason": "only 31% gets through", **more}
    return SaturationEvent(step=3, layer="a", head=head, **settings)


def test_a_head_that_was_flagged_before_is_counted_once_and_told_as_again() -> None:
    notices = Notices()
    waves = [([0], 1), ([1], 2), ([0, 2], 3), ([0, 1, 3, 1], 2), ([0, 1, 2, 3, 0, 1, 2, 3], 4)]
    for heads, open_now in waves:
        events = [an_event(head, severity="warning", critical_reason="") for head in heads]
        notices.add_events(events, open_now=open_now)
    assert [text.split(":")[0] for text in said_of(notices)] == [
        "1 head is newly saturated",
        "1 more head is newly saturated (2 events so far), at step 3",
        "1 more head is newly saturated, 1 again (4 events so far), the worst at step 3",
        "1 more head is newly saturated, 2 again (8 events so far, 2 heads flagged now), the worst at step 3",
        "4 heads are saturated again (16 events so far), the worst at step 3",
    ]


def test_the_number_of_heads_that_are_flagged_now_is_known_where_one_opens() -> None:
    tracker = SaturationTracker(SaturationRule())
    found = [
        tracker.update(step, {"a": make_record(logit_row_std=list(values))}).open_heads
        for step, values in enumerate([(6.0, 1.0), (1.0, 6.0), (6.0, 6.0), (6.0, 6.0)])
    ]
    assert found == [1, 1, 2, None]


def test_a_warning_lists_three_heads_and_says_why_it_is_critical_once() -> None:
    notices = Notices()
    notices.add_events(
        [an_event(head, cause="likely cause: it grew", remedy=("norm", "scale")[head % 2]) for head in range(8)]
    )
    (text,) = said_of(notices)
    lines = text.splitlines()
    assert lines[0] == "8 heads are critical:"
    assert [line.split(" is ")[0] for line in lines if line.startswith("  step")] == [
        f"  step 3: head {head} of a" for head in (0, 2, 1)
    ]
    assert lines.count("    critical: only 31% gets through") == 1
    assert lines[-1] == "  and 5 more, all in `monitor.events`"


def test_layers_with_the_same_reason_are_told_together() -> None:
    notices = Notices()
    reason = "its queries are normalised, so that rescaling the weights would change nothing"
    notices.add_layers("QK-Clip leaves alone", {f"layers.{index}.attn": reason for index in range(48)})
    names = ", ".join(f"layers.{index}.attn" for index in range(5))
    assert said_of(notices) == [f"QK-Clip leaves alone: {names} and 43 more ({reason})"]


def test_layers_with_several_reasons_are_told_by_reason() -> None:
    notices = Notices()
    notices.add_layers("not measured", {"a": "x", "b": "y", "c": "x"})
    assert said_of(notices) == ["not measured: a, c (x); b (y)"]
    notices.add_layers("not measured", {f"l{index}": f"reason {index}" for index in range(11)})
    (text,) = said_of(notices)
    assert text == (
        "not measured: l0 (reason 0); l1 (reason 1); l2 (reason 2); l3 (reason 3); l4 (reason 4); and 6 more layers "
        "for other reasons"
    )


def test_a_layer_is_told_of_though_its_text_differs_in_a_number_only() -> None:
    notices = Notices()
    for layer in ("layers.0.attn", "layers.7.attn", "layers.7.attn"):
        notices.add_layers("seen, but not measured", {layer: "reading it failed: ValueError: of 3 heads"})
    assert said_of(notices) == [
        f"seen, but not measured: {layer} (reading it failed: ValueError: of 3 heads)"
        for layer in ("layers.0.attn", "layers.7.attn")
    ]

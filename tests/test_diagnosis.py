"""What an event says about why: shares of the growth, the cause in words, and messages of at most two lines."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_monitor.catalog import FACTORS
from attn_monitor.dashboards.tables import event_records
from attn_monitor.diagnosis import diagnose
from attn_monitor.events import SaturationEvent
from attn_monitor.functional import attention_statistics
from attn_monitor.growth import growth
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import Changes, SaturationTracker
from tests.models import make_record

sizes = st.floats(min_value=0.01, max_value=1e3)


@given(before=st.lists(sizes, min_size=5, max_size=5), by=st.lists(st.floats(0.5, 8), min_size=5, max_size=5))
def test_shares_are_the_parts_of_the_logarithm_and_add_up_to_one(before: list[float], by: list[float]) -> None:
    def factors(values: list[float]) -> dict[str, float]:
        scale_ratio, q_rms, k_rms, alignment, rest = values
        spread = scale_ratio * q_rms * k_rms * alignment
        named = {"scale_ratio": scale_ratio, "q_rms": q_rms, "k_rms": k_rms, "alignment": alignment}
        return {**named, "qk_std": spread, "logit_row_std": spread * rest}

    found = growth(factors([x * y for x, y in zip(before, by, strict=True)]), factors(before))
    assert found is not None
    total = math.prod(by)
    assert found.total == pytest.approx(total)
    if total < 1.25:
        assert found.shares == {}
        return
    assert sum(found.shares.values()) == pytest.approx(1)
    expected = [math.log(ratio) / math.log(total) for ratio in by]
    assert list(found.shares.values()) == pytest.approx(expected, abs=1e-9)


def test_shares_of_a_real_head_come_from_its_tensors() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 3, 1, 11, 13, generator=generator, dtype=torch.float64)
    tracker = SaturationTracker(SaturationRule())
    tracker.update(0, {"a": attention_statistics(query, key)})
    (event,) = tracker.update(9, {"a": attention_statistics(3 * query, 2 * key)}).opened
    assert event.baseline_step == 0
    assert event.shares["q_rms"] == pytest.approx(math.log(3) / math.log(6), abs=1e-4)
    assert event.shares["k_rms"] == pytest.approx(math.log(2) / math.log(6), abs=1e-4)
    assert [event.shares[name] for name in ("scale_ratio", "alignment", "rest")] == pytest.approx([0, 0, 0], abs=1e-4)
    assert event.cause == "likely cause: q_rms grew 3x since step 0 (q_rms 61%, k_rms 39% of the growth)"


def test_shares_are_not_said_where_factors_are_missing() -> None:
    before = {"logit_row_std": 1.0, "qk_std": 1.0, "q_rms": 1.0}
    now = {"logit_row_std": 9.0, "qk_std": 9.0, "q_rms": 3.0}
    found = diagnose(now, before, since=4, head_dim=64)
    assert found.cause == "likely cause: q_rms grew 3x since step 4"
    assert found.shares == pytest.approx({"q_rms": 0.5, "rest": 0.0})


def test_logits_without_query_and_key_are_told_by_what_is_known_of_them() -> None:
    tracker = SaturationTracker(SaturationRule())

    def shown(spread: float, largest: float) -> Any:
        more: dict[str, Any] = {"critical_ratio": [spread / 3], "logit_row_std": [spread], "logit_max": [largest]}
        return {"contrastive": make_record(1, head_dim=None, **more)}

    tracker.update(0, shown(1.0, 5.0))
    (event,) = tracker.update(40, shown(4.2, 31.0)).opened
    assert str(event) == (
        "step 40: head 0 of contrastive is saturated, critical_ratio 1.4 (limit 1)\n"
        "  likely cause: a temperature, scale or vectors that grew, since the logits spread 4.2x as far as at step 0, "
        "the largest is 31 now (without query and key no more is known); what helps: bound the temperature or scale, "
        "or lower its learning rate; normalise the vectors that it multiplies"
    )
    (event,) = SaturationTracker(SaturationRule()).update(7, shown(4.2, 31.0)).opened
    assert event.cause == "likely cause: logits that are wide from their first observation on, the largest is 31 now"


def _messages() -> list[SaturationEvent]:
    """Return an event of every kind, with causes of every kind, as long as they get."""
    healthy: dict[str, Any] = {name: [1.0, 1.0] for name in (*FACTORS, "logit_row_std")}
    sick: list[dict[str, Any]] = [
        {**healthy, "logit_row_std": [80.0, 80.0], "qk_std": [80.0, 80.0], "q_rms": [9.0, 9.0], "k_rms": [8.0, 8.0]},
        {**healthy, "logit_row_std": [80.0, 80.0], "scale_ratio": [8.0, 8.0], "alignment": [5.0, 5.0]},
        {**healthy, "logit_row_std": [80.0, 80.0], "jacobian_trace": [0.1, 0.2], "sink_mass": [0.1, 0.2]},
        {**healthy, "jacobian_trace": [0.1, 0.2], "logit_std": [1.0, 1.0]},
        {**healthy, "jacobian_trace": [0.9, 0.9], "logit_std": [1.0, 1.0], "qk_std": [40.0, 40.0]},
        {**healthy, "logit_row_std": [80.0, 80.0], "jacobian_trace": [0.1, 0.9], "sink_mass": [0.9, 0.1]},
        {**healthy, "logit_max": [5e4, 6e5]},
        {**healthy, "nonfinite": [3, 1]},
        {"logit_row_std": [80.0, 80.0], "logit_max": [200.0, 300.0], "logit_std": [80.0, 80.0]},
    ]
    found = []
    for values in sick:
        for rule in (SaturationRule(), SaturationRule(relative_to="critical"), SaturationRule(statistic="logit_std")):
            tracker = SaturationTracker(rule)
            more = {"critical_ratio": values["logit_row_std"], "logit_std": values["logit_row_std"]}
            tracker.update(100_000, {"model.decoder.layers.11.self_attn": make_record(**healthy)})
            found += tracker.update(
                123_456, {"model.decoder.layers.11.self_attn": make_record(**{**more, **values})}
            ).opened
    return found


def test_every_message_has_at_most_two_lines_and_says_what_and_why() -> None:
    events = _messages()
    assert {event.kind for event in events} == {"saturated", "nonfinite", "overflow"}
    for event in events:
        first, *more = str(event).splitlines()
        assert len(more) <= 1
        assert first.startswith("step 123456: head ")
        assert "of model.decoder.layers.11.self_attn" in first
        assert max(map(len, (first, *more))) < 300
        assert "\n" not in event.line
        if event.cause:
            assert more[0].strip().startswith("likely cause: ")
            assert event.remedy
            assert f"what helps: {event.remedy}" in more[0]
        assert not any(word in str(event) for word in ("None", "nan,", "{", "inf "))


def test_what_is_stored_of_an_event_says_all_of_it() -> None:
    event = _messages()[0]
    (text,) = event_records(123_456, Changes(opened=[event]))
    stored = json.loads(text)
    assert (stored["kind"], stored["baseline"], stored["remedy"]) == ("saturated", 100_000, event.remedy)
    assert stored["message"] == event.line
    assert stored["shares"] == pytest.approx(dict(event.shares), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nonfinite": [0, 0]}, "step 9: head 1 of a has no more logits that are nan or inf, as it had since step 3"),
        (
            {"logit_max": [1.0, 2.0]},
            "step 9: head 1 of a has logits of 2 at most, near the end of float16 since step 3",
        ),
    ],
)
def test_what_ended_is_told_in_its_own_words(values: dict[str, Any], told: str) -> None:
    tracker = SaturationTracker(SaturationRule())
    started: dict[str, Any] = {"nonfinite": [0, 4]} if "nonfinite" in values else {"logit_max": [1.0, 5e4]}
    tracker.update(3, {"a": make_record(**started)})
    (text,) = event_records(9, tracker.update(9, {"a": make_record(**values)}))
    assert json.loads(text)["message"] == told

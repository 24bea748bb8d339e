from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch

from attn_monitor.forecast import Forecast, Forecaster
from attn_monitor.saturation import SaturationRule
from tests.models import make_record


def forecasts(
    path: Callable[[int], float], steps: range, heads: int = 1, rule: SaturationRule | None = None
) -> list[Forecast]:
    """Follow heads whose ratio is `path(step)`, the later heads at a tenth of it."""
    forecaster, found = Forecaster(rule or SaturationRule()), []
    for step in steps:
        row = [8 * path(step) * (1.0 if head == 0 else 0.1) for head in range(heads)]
        found += forecaster.update(step, {"a": make_record(heads, logit_row_std=row)})
    return found


def test_a_straight_line_is_told_where_it_meets_the_limit() -> None:
    (found,) = forecasts(lambda step: 0.1 + step / 1000, range(0, 390, 10), heads=3)
    assert (found.layer, found.head, found.expected) == ("a", 0, 400)
    # The window reaches back 150 steps, and the forecast looks a quarter of that ahead.
    assert (found.step, found.earliest, found.latest) == (370, 394, 550)
    assert str(found) == (
        "step 370: at its present growth head 0 of a reaches the limit at about step 400 (394 to 550); its "
        "logit_row_std is 0.47 x sqrt(d_k=64) now, the limit is 0.5\n"
        "  what helps before that: lower the learning rate or warm up longer; QK-norm"
    )


def test_a_limit_on_the_critical_ratio_is_named_as_such() -> None:
    forecaster, found = Forecaster(SaturationRule(relative_to="critical")), []
    for step in range(0, 390, 10):
        found += forecaster.update(step, {"a": make_record(1, critical_ratio=[0.2 + step / 500])})
    assert "; its critical_ratio is 0.94 now, the limit is 1\n" in str(found[0])


def test_nothing_is_foretold_of_the_next_observation() -> None:
    # After ten observations the line is one step from the limit: the next observation tells as much.
    assert forecasts(lambda step: 0.05 * step, range(11)) == []
    (found,) = forecasts(lambda step: 0.046 * step, range(11))
    assert (found.step, found.expected) == (9, 11)


@pytest.mark.parametrize("seed", range(5))
def test_the_truth_lies_in_the_interval_with_noise_too(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(60, generator=generator).mul(0.004).tolist()
    found = forecasts(lambda step: 0.1 + step / 1000 + noise[step // 10], range(0, 400, 10))
    assert len(found) == 1
    assert found[0].earliest <= 400 <= found[0].latest


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (lambda step: 0.3, "flat"),
        (lambda step: 0.4 - step / 2000, "falling"),
        (lambda step: 0.3 + 0.05 * math.sin(step), "noise"),
        (lambda step: 0.35 * (1 - math.exp(-step / 60)), "levelling off below the limit"),
        (lambda step: 0.01 + step / 100_000, "far away"),
        (lambda step: 0.2 + step / 5000, "too far ahead"),
        (lambda step: 0.6 + step / 1000, "above the limit already"),
        (lambda step: math.nan, "not measured"),
    ],
)
def test_nothing_is_foretold_without_a_clear_trend(path: Callable[[int], float], why: str) -> None:
    assert forecasts(path, range(0, 300, 10)) == [], why


def test_a_head_is_told_of_once_and_its_limit_is_that_of_its_layer() -> None:
    rule = SaturationRule(overrides={"a": 1.0})
    (found,) = forecasts(lambda step: 0.1 + step / 500, range(0, 450, 10), rule=rule)
    assert (found.threshold, found.expected) == (1.0, 450)


def test_the_memory_survives_a_round_trip_through_plain_values() -> None:
    straight = forecasts(lambda step: 0.1 + step / 1000, range(0, 390, 10))
    first, second, found = Forecaster(SaturationRule()), Forecaster(SaturationRule()), []
    for step in range(0, 390, 10):
        if step == 300:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        record = {"a": make_record(1, logit_row_std=[8 * (0.1 + step / 1000)])}
        found += (first if step < 300 else second).update(step, record)
    assert found == straight != []


def test_a_run_that_starts_again_starts_a_new_trend() -> None:
    forecaster = Forecaster(SaturationRule())
    for step in [*range(0, 90, 10), *range(0, 90, 10)]:
        assert forecaster.update(step, {"a": make_record(1, logit_row_std=[8 * (0.1 + step / 500)])}) == []

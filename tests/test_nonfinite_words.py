"""The words of events of nan and inf logits: what was measured of them, and no more than that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from attn_monitor.diagnosis import BROKEN, PRECISION, SCALE_FIRST, SINGLE, UNKNOWN
from attn_monitor.events import SaturationEvent
from attn_monitor.functional import attention_statistics
from attn_monitor.saturation import SaturationRule
from attn_monitor.tracking import SaturationTracker
from tests.models import make_record

FIRST = {"scale_ratio": 1.0, "q_rms": 1.0, "k_rms": 1.0, "alignment": 1.0, "qk_std": 1.0, "logit_row_std": 1.0}


def nonfinite_events(query: Tensor, key: Tensor, **options: Any) -> list[SaturationEvent]:
    """Return the events of nan and inf logits after a healthy record of two heads."""
    generator = torch.Generator().manual_seed(1)
    tracker = SaturationTracker(SaturationRule())
    healthy = torch.randn(2, 2, 2, 11, 13, generator=generator)
    tracker.update(0, {"a": attention_statistics(*healthy)})
    changes = tracker.update(7, {"a": attention_statistics(query, key, **options)})
    return [event for event in changes.opened if event.kind == "nonfinite"]


@pytest.mark.parametrize(
    ("query", "key", "cause", "remedy"),
    [
        (math.nan, 1.0, "every query of the head is nan or inf", BROKEN),
        (1.0, math.inf, "every key of the head is nan or inf", BROKEN),
        (math.nan, math.nan, "every query and every key of the head is nan or inf", BROKEN),
        (1e20, 1e20, "an overflow, q_rms and k_rms are inf", PRECISION),
    ],
)
@pytest.mark.parametrize("scale", [None, 1.0])
def test_logits_that_are_nan_are_told_by_what_was_measured_of_them(
    query: float, key: float, cause: str, remedy: str, scale: float | None
) -> None:
    q, k = torch.randn(2, 2, 2, 11, 13, generator=torch.Generator().manual_seed(3))
    q[:, 1], k[:, 1] = query * q[:, 1], key * k[:, 1]
    (event,) = nonfinite_events(q, k, scale=scale)
    assert (event.head, event.cause, event.remedy) == (1, f"likely cause: {cause}", remedy)
    assert event.shares == {}


def test_nan_vectors_after_a_layer_with_nan_are_said_to_follow_from_it_perhaps() -> None:
    nan: dict[str, Any] = {"q_rms": [math.nan], "k_rms": [math.nan], "nonfinite": [5]}
    single = make_record(1, q_rms=[1.0], k_rms=[1.0], nonfinite=[5])
    record = {"a": make_record(1), "b": single, "c": make_record(1, **nan), "d": make_record(1, **nan)}
    causes = {event.layer: event.cause for event in SaturationTracker(SaturationRule()).update(3, record).opened}
    every = "likely cause: every query and every key of the head is nan or inf"
    assert "follow" not in causes.pop("b")
    assert causes == dict.fromkeys("cd", f"{every}, as may follow from b, which runs earlier and has nan or inf too")
    (alone,) = SaturationTracker(SaturationRule()).update(3, {"c": make_record(1, **nan)}).opened
    assert alone.cause == every


@pytest.mark.parametrize("where", ["token", "mask"])
def test_nan_in_a_token_or_the_mask_is_no_matter_of_the_scale(where: str) -> None:
    q, k = torch.randn(2, 2, 2, 11, 13, generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(11, 11)
    if where == "token":
        q[0, :, 5] = math.nan
    else:
        mask[3, 4] = math.nan
    events = nonfinite_events(q, 9 * k, attn_mask=mask, scale=1.0)  # the scale is missing, and k_rms has grown
    assert [event.explanation for event in events] == [
        "likely cause: single tokens, the mask or the bias, as other queries and keys of the head are finite; "
        f"what helps: {SINGLE}"
    ] * 2


def test_logits_beside_nan_that_are_near_the_end_of_float16_speak_of_an_overflow() -> None:
    tracker = SaturationTracker(SaturationRule())
    values: dict[str, Any] = {name: [value] for name, value in FIRST.items()}
    tracker.update(0, {"a": make_record(1, **values)})
    now = tracker.update(1, {"a": make_record(1, **{**values, "logit_max": [52000.0]}, nonfinite=[4])}).opened
    assert [event.kind for event in now] == ["nonfinite", "overflow"]
    assert now[0].explanation == (
        "likely cause: an overflow, the finite logits reach 79% of the largest float16 number; what helps: " + PRECISION
    )
    unknown = tracker.update(2, {"b": make_record(1, head_dim=None, nonfinite=[4])}).opened
    assert [event.explanation for event in unknown] == [f"what helps: {UNKNOWN}"]


def in_half(size: float) -> tuple[Tensor, Tensor]:
    """Return query and key in float16, of D = 64."""
    query, key = torch.randn(2, 1, 2, 97, 64, generator=torch.Generator().manual_seed(3)).half()
    return size * query, size * key


def test_a_product_that_overflows_before_it_is_scaled_is_not_told_as_single_tokens() -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return ((query @ key.transpose(-1, -2)) / 8).softmax(-1) @ key

    module = Attention()
    with AttentionProbe(module) as probe:
        module(*in_half(57.0))
    [(name, stats)] = probe.compute().items()
    assert stats.logit_max is not None
    assert not (stats.logit_max > 0.5 * 65504).any()  # of the scaled logits none is near the end of float16
    opened = SaturationTracker(SaturationRule()).update(3, {name: stats}).opened
    broken = [event for event in opened if event.kind == "nonfinite"]
    shares = [f"{value:.0%}" for value in (8 * stats.logit_max / 65504).tolist()]
    assert len(broken) == stats.heads
    assert [event.explanation for event in broken] == [
        f"likely cause: in float16 an overflow, q.k reaches {share} of its largest number before the scale; else "
        f"single tokens, the mask or the bias; what helps: {SCALE_FIRST}"
        for share in shares
    ]
    assert all(int(share[:-1]) > 90 for share in shares)


@pytest.mark.parametrize(("scale_ratio", "logit_max"), [(1.0, 4000.0), (8.0, 30000.0), (0.0, 30000.0)])
def test_a_product_far_from_the_end_of_float16_or_without_a_scale_is_no_overflow(
    scale_ratio: float, logit_max: float
) -> None:
    values: dict[str, Any] = {name: [value] for name, value in FIRST.items()}
    values |= {"scale_ratio": [scale_ratio], "logit_max": [logit_max]}
    (event, *_) = SaturationTracker(SaturationRule()).update(1, {"a": make_record(1, nonfinite=[4], **values)}).opened
    assert (event.kind, event.remedy) == ("nonfinite", SINGLE)

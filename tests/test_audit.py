from __future__ import annotations

import json

import pytest

from attn_monitor.audit import UniformWatch, scale_findings
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from tests.models import make_record


def layer(
    ratio: float, q_rms: float = 0.5, k_rms: float = 0.5, row_std: float = 1.0, heads: int = 5
) -> AttentionStatistics:
    """A layer of d_k 64."""
    return make_record(
        heads,
        scale_ratio=[ratio] * heads,
        q_rms=[q_rms] * heads,
        k_rms=[k_rms] * heads,
        logit_row_std=[row_std] * heads,
    )


def audit(**layers: AttentionStatistics) -> list[str]:
    return scale_findings(layers, SaturationRule())


@pytest.mark.parametrize(
    ("ratio", "meaning"),
    [
        (8.0, "the scale 1/sqrt(d_k) is missing"),
        (64.0, "sqrt(d_k) stands in place of 1/sqrt(d_k)"),
        (0.125, "1/d_k stands in place of 1/sqrt(d_k), or the scale is applied twice"),
        (5**-0.5, "1/sqrt(d_model) stands in place of 1/sqrt(d_k)"),
        (2.0, "the scale is doubled"),
        (-2.0, "the scale is doubled"),
        (1.5, "it is outside of 0.8 to 1.2, where it is known to be harmless"),
        (0.7, "it is outside of 0.8 to 1.2, where it is known to be harmless"),
    ],
)
def test_the_audit_says_what_a_scale_means(ratio: float, meaning: str) -> None:
    assert audit(a=layer(ratio)) == [f"scale audit: scale * sqrt(d_k=64) is {abs(ratio):.3g}, {meaning}, in a"]


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.2])
def test_harmless_scales_are_passed_over(ratio: float) -> None:
    assert audit(a=layer(ratio)) == []


def test_layers_of_one_scale_share_a_text() -> None:
    same = {f"layers.{index}": layer(8.0) for index in range(6)}
    assert audit(**same, other=layer(2.0)) == [
        "scale audit: scale * sqrt(d_k=64) is 8, the scale 1/sqrt(d_k) is missing, in layers.0, layers.1, layers.2, "
        "layers.3 and 2 more layers",
        "scale audit: scale * sqrt(d_k=64) is 2, the scale is doubled, in other",
    ]


@pytest.mark.parametrize(("q_rms", "k_rms"), [(0.125, 1.0), (0.125, 0.125), (1.0, 0.125)])
def test_a_design_without_scale_whose_vectors_have_unit_length_is_meant(q_rms: float, k_rms: float) -> None:
    assert audit(a=layer(8.0, q_rms, k_rms)) == []
    assert len(audit(a=layer(8.0, q_rms, k_rms, row_std=3.9))) == 1  # but its logits are not healthy


def test_what_is_not_known_is_not_judged() -> None:
    assert audit(a=make_record(2), b=make_record(2, head_dim=None, scale_ratio=[9.0, 9.0])) == []


def test_uniform_attention_is_told_once_after_a_long_time() -> None:
    watch, said = UniformWatch(), []
    for step in range(0, 1500, 25):
        if step == 700:
            state = json.loads(json.dumps(watch.state_dict()))
            watch = UniformWatch()
            watch.load_state_dict(state)
        record = make_record(3, entropy_normalized=[0.9991, 0.998, 1.0])
        said += [(step, text) for text in watch.update(step, {"a": record, "b": make_record(3)})]
    ((step, text),) = said
    assert step == 500
    assert text == (
        "step 500: attention is uniform, all 3 heads have attended to every key alike since step 0 (entropy_normalized "
        "0.9980 or more); what helps: a larger scale, larger initial W_q and W_k, or a higher learning rate"
    )


def test_one_head_that_attends_is_enough() -> None:
    watch = UniformWatch()
    for step in range(0, 3000, 25):
        record = make_record(3, entropy_normalized=[0.9991, 0.98, 1.0])
        assert watch.update(step, {"a": record}) == []
    assert watch.update(4000, {"a": make_record(3)}) == []

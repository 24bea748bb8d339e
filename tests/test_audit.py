from __future__ import annotations

import json

import pytest

from attn_monitor.audit import UniformWatch, scale_findings
from attn_monitor.judge import Judge
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationRule
from tests.models import make_record


def layer(
    ratio: float, q_rms: float = 0.5, k_rms: float = 0.5, row_std: float = 1.0, heads: int = 5
) -> AttentionStatistics:
    """A layer of d_k 64."""
    return make_record(
        heads,
        scale=[ratio / 8] * heads,
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
        (5**-0.5, "1/sqrt(d_model) stands in place of 1/sqrt(d_k) of 5 heads"),
        (0.5, "the scale is halved"),
        (2.0, "the scale is doubled"),
        (-2.0, "the scale is doubled"),
        (1.5, "outside of 0.8 to 1.2, where it is known to be harmless"),
        (0.7, "outside of 0.8 to 1.2, where it is known to be harmless"),
    ],
)
def test_the_audit_says_what_a_scale_means(ratio: float, meaning: str) -> None:
    assert audit(a=layer(ratio)) == [f"scale audit: scale * sqrt(d_k=64) is {abs(ratio):.3g}, {meaning}, in a"]


def test_a_scale_that_may_be_two_things_is_called_both() -> None:
    assert audit(a=layer(0.5, heads=4)) == [
        "scale audit: scale * sqrt(d_k=64) is 0.5, the scale is halved, or 1/sqrt(d_model) stands in place of "
        "1/sqrt(d_k) of 4 heads, in a"
    ]


def test_scales_that_differ_a_little_share_a_text() -> None:
    assert audit(**{f"layers.{index}": layer(1.3 + index / 100) for index in range(48)}) == [
        "scale audit: scale * sqrt(d_k=64) is 1.3 to 1.77, outside of 0.8 to 1.2, where it is known to be harmless, in "
        "layers.0, layers.1, layers.2, layers.3 and 44 more layers"
    ]


def test_an_override_that_fits_no_layer_is_told_with_the_names_there_are() -> None:
    rule = SaturationRule(overrides={"net.blocks.1": 0.7, "decoder.*": 0.8, "blocks": 0.9})
    judge = Judge(rule)
    assert judge.take(0, {}).findings == []  # nothing was seen yet
    first = judge.take(1, {"net.blocks.0": make_record(2), "net.blocks.1": make_record(2)})
    assert first.findings == [
        "saturation overrides without effect: 'decoder.*', 'blocks' fit no layer; the layers are net.blocks.0, "
        "net.blocks.1"
    ]
    resumed = Judge(rule)
    resumed.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    for later in (judge, resumed):
        assert later.take(2, {"net.blocks.0": make_record(2)}).findings == []
    many = {f"layers.{index}": make_record(1) for index in range(47)}
    (text,) = Judge(SaturationRule(overrides={"x": 1})).take(0, many).findings
    assert text.endswith("layers.18, layers.19 and 27 more")


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


@pytest.mark.parametrize(
    ("scale", "q_rms", "k_rms", "design"),
    [
        (10.0, 0.125, 0.125, "cosine attention with a temperature"),
        (1.0, 0.125, 0.9, "one of both normalised"),
        (1.0, 64**-0.25, 64**-0.25, "QK-norm with gains that share the scale"),
        (1.0, 0.12, 1.0, "T5 as it is initialised"),
        (1.0, 0.25, 0.5, "T5 later on"),
        (1.0, 0.21, 1.0, "T5 later on"),
    ],
)
def test_a_design_without_scale_is_passed_over_while_its_logits_are_healthy(
    scale: float, q_rms: float, k_rms: float, design: str
) -> None:
    assert audit(a=layer(8 * scale, q_rms, k_rms, row_std=3.9)) == [], design
    assert len(audit(a=layer(8 * scale, q_rms, k_rms, row_std=4.1))) == 1


@pytest.mark.parametrize(("q_rms", "k_rms"), [(0.226, 0.226), (0.577, 0.577), (0.2, 0.21), (1.0, 1.0), (3.0, 0.9)])
def test_a_scale_that_was_forgotten_is_told_however_small_the_logits_are(q_rms: float, k_rms: float) -> None:
    assert len(audit(a=layer(8.0, q_rms, k_rms, row_std=0.4))) == 1


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

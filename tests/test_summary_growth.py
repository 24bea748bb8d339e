"""What the terminal says of growth: its factors, their shares, and a missing scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from attn_monitor.reports.growth import growth_in_words
from attn_monitor.reports.summary import summarize
from attn_monitor.views import RunData
from tests.summarized import collapsing, make_table


def with_tables(**tables: Sequence[float]) -> RunData:
    """Return the collapsing run with other values of its sick head."""
    run = collapsing()
    changed = {name: make_table(1.0, values) for name, values in tables.items()}
    return replace(run, tables={**run.tables, **changed})


def growth_of(run: RunData) -> list[str]:
    """Return the lines on the sick head."""
    lines = summarize(run).splitlines()
    start = lines.index("  what grew, from the first observation to the largest ratio:") + 1
    return [line.strip() for line in lines[start : lines.index("", start)]]


def test_a_missing_scale_is_named_as_the_cause_beside_what_grew() -> None:
    assert growth_of(with_tables(scale_ratio=[8.0] * 4)) == [
        "head 2 of decoder.0: logit_row_std 1.2 to 19.2, 16x = q_rms 8x (75 %) * alignment 2x (25 %)",
        "scale_ratio 8 (usual: 1), from the start; likely cause: the scale 1/sqrt(d_k) is missing, and q_rms grew 8x "
        "since step 0",
    ]


def test_a_missing_scale_is_the_cause_where_nothing_grew() -> None:
    still: dict[str, Sequence[float]] = {name: [1.0] * 4 for name in ("q_rms", "k_rms", "alignment")}
    run = with_tables(**still, scale_ratio=[8.0] * 4, qk_std=[8.0] * 4, logit_row_std=[8.0, 8.0, 8.0, 8.8])
    assert growth_of(run) == [
        "head 2 of decoder.0: logit_row_std 8 to 8.8, 1.1x",
        "scale_ratio 8 (usual: 1), from the start; likely cause: the scale 1/sqrt(d_k) is missing",
    ]


def test_a_head_that_is_worst_at_its_first_observation_has_not_grown() -> None:
    falling: dict[str, Sequence[float]] = {"saturation_ratio": [2.4, 0.3, 0.3, 0.3], "logit_row_std": [19.2, 2, 2, 2]}
    text = summarize(with_tables(**falling, scale_ratio=[8.0] * 4, q_rms=[7.0] * 4))
    assert "what grew" not in text
    assert "1x" not in text.replace("1/sqrt", "")
    assert text.split("  why, at the largest ratio:\n    ")[1].split("\n\n")[0] == (
        "head 2 of decoder.0: scale_ratio 8 (usual: 1), from the start; likely cause: the scale 1/sqrt(d_k) is missing"
    )


def test_a_scale_that_grew_is_a_factor_like_any_other() -> None:
    run = with_tables(scale_ratio=[1.0, 1.0, 1.0, 2.0], alignment=[1.2] * 4)
    assert growth_of(run)[0].endswith("16x = q_rms 8x (75 %) * scale_ratio 2x (25 %)")
    assert "from the start" not in summarize(run)


def test_what_shrank_and_what_is_added_to_the_logits_are_factors() -> None:
    """From 1.2 to 19.2: queries 8x, keys 0.5x, the products 4x, and what a bias does to them 4x."""
    run = with_tables(k_rms=[1.0, 1.0, 1.0, 0.5], alignment=[1.2] * 4, qk_std=[1.2, 2.4, 4.8, 4.8])
    assert growth_of(run)[0].endswith("16x = q_rms 8x (75 %) * k_rms 0.5x (-25 %, shrank) * rest 4x (50 %)")


def test_small_factors_are_one_so_that_the_product_is_the_growth() -> None:
    values = {"q_rms": 1.09, "k_rms": 1.08, "alignment": 1.6}
    factors: dict[str, Sequence[float]] = {name: [1.0, 1.0, 1.0, value] for name, value in values.items()}
    end = 1.09 * 1.08 * 1.6
    run = with_tables(**factors, qk_std=[1.0, 1.0, 1.0, end], logit_row_std=[1.0, 1.0, 1.0, end])
    assert growth_of(run)[0].endswith("1 to 1.88, 1.88x = alignment 1.6x (74 %) * rest 1.18x (26 %)")


@pytest.mark.parametrize("seed", range(7))
def test_the_factors_multiply_to_the_growth_and_the_shares_add_up(seed: int) -> None:
    random = np.random.default_rng(seed)
    first = dict(zip(("scale_ratio", "q_rms", "k_rms", "alignment"), random.uniform(0.5, 2, 4), strict=True))
    later = {name: value * random.uniform(0.8, 3) for name, value in first.items()}
    for factors in (first, later):
        factors["qk_std"] = float(np.prod(list(factors.values())))
    first["logit_row_std"], later["logit_row_std"] = first["qk_std"], later["qk_std"] * random.uniform(0.6, 1.4)
    [line, *_] = growth_in_words(first, later, sick=False)
    growth, _, equation = line.partition(" = ")
    parts = [re.fullmatch(r".* ([\d.]+)x \((-?\d+) %(?:, shrank)?\)", part) for part in equation.split(" * ")]
    ratios = [float(part[1]) for part in parts if part]
    assert len(ratios) == len(parts) >= 3
    assert np.prod(ratios) == pytest.approx(later["logit_row_std"] / first["logit_row_std"], rel=0.03)
    assert growth.endswith(f"{later['logit_row_std'] / first['logit_row_std']:.3g}x")
    assert sum(int(part[2]) for part in parts if part) == 100

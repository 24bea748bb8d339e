"""Every attention of real architectures is found, with the numbers the models themselves report."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import pytest
import torch

from tests.zoo.compare import TOLERANCE, Findings
from tests.zoo.registry import ENTRIES, GROUPS, available, cases, findings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # x-transformers
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),  # WavLM
]
CASES = cases()
BOTH = [name for name, entry in ENTRIES.items() if len(entry.implementations) > 1]


def examined(name: str, implementation: str) -> Findings:
    if not available(ENTRIES[name]):
        pytest.skip(f"{ENTRIES[name].library} is not installed")
    return findings(name, implementation)


def base(record: str) -> str:
    return record.partition("@")[0].partition("#")[0]


def test_the_zoo_is_large() -> None:
    transformers = [entry for entry in ENTRIES.values() if entry.library == "transformers"]
    assert len(transformers) >= 100
    assert len(ENTRIES) == sum(map(len, GROUPS.values())), "two entries have one name"


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_the_attentions_found_are_those_the_model_reports(name: str, implementation: str) -> None:
    found, entry = examined(name, implementation), ENTRIES[name]
    assert found.pairs.extra == frozenset(), "found what is not there"
    unexplained = [r for r in found.pairs.further if not any(fnmatchcase(r, pattern) for pattern in entry.extra)]
    assert unexplained == [], "the model does not report these"
    assert len(found.pairs.missed) == len(entry.unseen)
    assert found.pairs.unclaimed == entry.pieces, "some softmax is in no record"
    assert found.pairs.difference <= TOLERANCE
    reasons = list(found.skipped.values())
    for words in filter(None, entry.unseen):
        assert any(words in reason for reason in reasons), f"skipped says {reasons}"
    assert bool(reasons) == (any(entry.unseen) or entry.told)


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_head_dimension_and_scale_are_those_of_the_config(name: str, implementation: str) -> None:
    found, entry = examined(name, implementation), ENTRIES[name]
    for record, stats in found.records.items():
        width, scale = entry.shape(base(record))
        assert stats.head_dim == width, record
        assert stats.scale is not None, record
        if not math.isnan(scale):
            torch.testing.assert_close(stats.scale, torch.full_like(stats.scale, scale), rtol=1e-5, atol=0)
        if not any(fnmatchcase(record, pattern) for pattern in entry.unfactored):
            assert stats.alignment is not None, f"{record}: query and key are unknown"


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_outputs_gradients_and_random_numbers_are_the_same_with_a_probe(name: str, implementation: str) -> None:
    found, entry = examined(name, implementation), ENTRIES[name]
    assert found.run.outputs, "there is nothing to compare"
    assert found.neutral or not entry.repeatable


@pytest.mark.parametrize("name", BOTH)
def test_both_implementations_give_the_same_numbers(name: str) -> None:
    eager, fused = (examined(name, implementation).records for implementation in ENTRIES[name].implementations)
    assert eager.keys() == fused.keys()
    for record, stats in eager.items():
        other = fused[record].measured()
        assert stats.measured().keys() == other.keys(), record
        for statistic, value in stats.measured().items():
            # Both are right to about 1e-7 of the largest number that went into them.
            floor = 1e-5 * (1 + float(value.nan_to_num().abs().max()))
            torch.testing.assert_close(
                other[statistic], value, rtol=2e-4, atol=floor, equal_nan=True, msg=f"{record}: {statistic}"
            )

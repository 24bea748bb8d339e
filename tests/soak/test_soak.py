"""Nothing grows with the number of observed steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models import LIGHTNING_ADVICE
from tests.soak.page import draw, section
from tests.soak.training import Soak, python_growth, soak

pytestmark = [
    *LIGHTNING_ADVICE,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::attn_monitor.events.AttentionWarning"),
    pytest.mark.filterwarnings("ignore:.*IterableDataset.*__len__"),
]


def test_five_hundred_steps_leave_nothing_more_than_the_history_holds(tmp_path: Path) -> None:
    found = soak(500, tmp_path, samples=10)
    filled = [sample for sample in found.samples if sample.step > 256]  # the history is full then
    first, last = filled[0], filled[-1]
    assert (last.hooks, last.history) == (0, 256)
    assert last.tags == first.tags
    assert last.files <= first.files
    assert last.threads <= first.threads
    assert last.tensors <= first.tensors + 8
    assert last.objects <= first.objects + 50  # over 200 steps: not one a step
    assert last.rss <= first.rss + 8
    assert last.events >= 1
    assert set(found.tags) >= {"scalars", "tensors", "images"}
    again = Soak.of_data(json.loads(json.dumps(found.as_data())))
    assert again == found
    assert "step 500" in section(again)
    draw(again, tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").stat().st_size > 1000


def test_no_file_of_python_keeps_more_memory_from_step_to_step(tmp_path: Path) -> None:
    grown = python_growth(200, tmp_path)
    ours = [(name, size) for name, size in grown if "attn_monitor" in name]
    assert all(size < 64 * 1024 for _, size in ours), grown

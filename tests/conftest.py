"""What every test starts from: one thread, one seed."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from attn_monitor import unseen

# The workers of pytest-xdist share the cores; more threads each would only make them wait for one another. That holds
# for programs that tests start, too.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def visible_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dispatch mode of the test see our own operations, which are hidden from those of users."""
    monkeypatch.setattr(unseen, "without_dispatch_modes", nullcontext)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state."""
    torch.manual_seed(0)

"""What every test starts from: one thread, one seed."""

from __future__ import annotations

import pytest
import torch

# The workers of pytest-xdist share the cores; more threads each would only make them wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state."""
    torch.manual_seed(0)

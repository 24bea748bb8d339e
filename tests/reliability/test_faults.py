"""Every fault is survived as the page says, and the page has every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import LIGHTNING_ADVICE
from tests.reliability.every import FAULTS
from tests.reliability.page import PAGE, named_faults
from tests.reliability.registry import Fault

IN_THREADS = [pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")]
"""A writer of TensorBoard that cannot write dies in a thread of its own."""
pytestmark = [*LIGHTNING_ADVICE, *IN_THREADS]


def parameter(fault: Fault) -> object:
    return pytest.param(fault, id=fault.name, marks=() if fault.quick else pytest.mark.slow)


@pytest.mark.parametrize("fault", [parameter(fault) for fault in FAULTS.values()])
def test_it_is_survived(fault: Fault, tmp_path: Path) -> None:
    verdict = fault.run(tmp_path)
    assert verdict.injected > 0


def test_the_page_has_every_fault() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(named_faults(text)) == sorted(FAULTS)
    for fault in FAULTS.values():
        assert f"| {fault.name} | {fault.sees} | {fault.lost} |" in text, (
            f"run `python -m tests.reliability`: {fault.name}"
        )
    assert f"{len(FAULTS)} kinds of faults" in text

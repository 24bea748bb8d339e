"""An error is told in one line, whatever it has to say besides."""

from __future__ import annotations

import pytest
import torch

from attn_monitor import AttentionMonitor
from attn_monitor.notices import surviving
from attn_monitor.phrases import error_line, some
from tests.models import LIGHTNING_ADVICE, Lit, fit

pytestmark = LIGHTNING_ADVICE

LONG = "out of memory\n  of 80 GiB 79 are taken\nsee the documentation"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(LONG), "RuntimeError: out of memory"),
        (RuntimeError(f"\n\n{LONG}"), "RuntimeError: out of memory"),
        (torch.cuda.OutOfMemoryError(LONG), "OutOfMemoryError: out of memory"),
        (KeyError("a\nb"), "KeyError: 'a\\nb'"),
        (ValueError(" \n"), "ValueError"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_an_error_has_one_line(error: Exception, line: str) -> None:
    assert error_line(error) == line
    told: list[str] = []
    with surviving(told.append, "drawing"):
        raise error
    assert told == [f"drawing failed: {line}"]


def test_a_warning_of_the_monitor_has_the_first_line_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(LONG)

    monkeypatch.setattr("attn_monitor.judge.Judge.take", fails)
    _, said = fit(Lit(), AttentionMonitor(), 2)
    assert "judging the record of step 0 failed: RuntimeError: out of memory" in said
    assert not any("80 GiB" in text for text in said)


@pytest.mark.parametrize(
    ("most", "noun", "text"),
    [(3, "", "a, b, c"), (5, "layer", "a, b, c"), (2, "layer", "a, b and 1 more layer"), (1, "", "a and 2 more")],
)
def test_of_many_names_some_are_listed(most: int, noun: str, text: str) -> None:
    assert some(["a", "b", "c"], most, noun) == text

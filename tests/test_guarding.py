"""What a loop calls: errors of ours are reported, those of the user's reach the user."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from attn_monitor import AttentionMonitor
from attn_monitor.notices import Notices
from tests.models import LIGHTNING_ADVICE, Lit, fit, loader, quiet

pytestmark = LIGHTNING_ADVICE


def test_a_function_of_the_users_that_chooses_modules_may_raise_what_it_likes() -> None:
    monitor = AttentionMonitor(modules=lambda name, module: module.num_headz > 1)
    with pytest.raises(AttributeError, match="num_headz"):
        quiet(callbacks=[monitor]).fit(Lit("hand"), loader(2))


def test_a_choice_that_matches_nothing_is_an_error_at_the_start_of_the_fit() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        quiet(callbacks=[AttentionMonitor(modules="nowhere")]).fit(Lit("hand"), loader(2))


@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError])
def test_an_error_of_ours_at_the_start_of_the_fit_ends_no_training(error: type[Exception]) -> None:
    def fails(*_: Any) -> None:
        raise error("ours")

    with patch("attn_monitor.cadence.Cadence.start", fails):
        trainer, said = fit(Lit("hand"), AttentionMonitor(), 3)
    assert trainer.global_step == 3
    assert any(f"on_fit_start failed: {error.__name__}: ours" in text for text in said)


def test_another_reason_of_a_layer_is_told_as_well(recwarn: pytest.WarningsRecorder) -> None:
    notices = Notices()
    reasons = ("head 0: ambiguous", "head 1: ambiguous", "QK-Clip failed and is off", "head 7: its weight is frozen")
    for reason in reasons:
        notices.add_layers("left alone", {"a": reason})
        notices.say(True)
    told = [str(warning.message) for warning in recwarn]
    assert told == [f"left alone: a ({reason})" for reason in (reasons[0], *reasons[2:])]

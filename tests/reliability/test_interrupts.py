"""Ctrl-C while hooks are put on the model or taken off it again: nothing is left."""

from __future__ import annotations

import pytest

from attn_monitor import AttentionProbe
from tests.models import LIGHTNING_ADVICE
from tests.reliability.expectations import subject
from tests.reliability.standing import left, standing
from tests.reliability.sweeps import Sweep

pytestmark = LIGHTNING_ADVICE
PLACES = ("attach", "detach", "end", "release_eager", "remove_relays", "unwatch", "remove")


def lines(name: str) -> int:
    """Return how many lines of a function run while a probe is attached and detached."""
    look = Sweep(only=name)
    with look, AttentionProbe(subject().net):
        pass
    return look.lines


@pytest.mark.parametrize("name", PLACES)
def test_a_second_detach_finishes_what_was_interrupted(name: str) -> None:
    count = lines(name)
    for at in range(1, count + 1):
        net = subject().net
        before = standing(net)
        probe = AttentionProbe(net)
        sweep = Sweep(KeyboardInterrupt, at=at, only=name)
        with pytest.raises(KeyboardInterrupt), sweep, probe:
            pass
        probe.detach()
        probe.detach()
        behind = left(before, standing(net))
        if behind:
            _clean_up(probe)
        assert behind == {}, f"line {at} of {count}: {sweep.raised}"


def _clean_up(probe: AttentionProbe) -> None:
    """Detach what an interrupted detach left, so that other tests start clean."""
    probe._attached = True
    probe.detach()

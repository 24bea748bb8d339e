from __future__ import annotations

import pytest

from attn_monitor.cadence import Cadence


def observed(cadence: Cadence, steps: range, every: int, near: range = range(0)) -> list[int]:
    """Return the steps that are observed if a head is near its limit in the observations of some steps."""
    found = []
    for step in steps:
        if cadence.due(step, every):
            found.append(step)
            if not (cadence.only_first and step):  # a resumed run does not judge it
                cadence.near = step in near
        assert cadence.due(step, every) == (step in found)  # the other batches of the step
    return found


def test_the_first_step_and_every_nth_are_observed() -> None:
    assert observed(Cadence(extra=32), range(35), 10) == [0, 9, 19, 29]
    assert observed(Cadence(extra=32), range(3, 35), 10) == [3, 9, 19, 29]
    assert observed(Cadence(extra=32), range(20), 0) == [0]


def test_every_step_is_observed_while_a_head_is_near_its_limit_and_as_before_afterwards() -> None:
    assert observed(Cadence(extra=32), range(40), 10, near=range(9, 14)) == [0, 9, 10, 11, 12, 13, 14, 19, 29, 39]


@pytest.mark.parametrize("extra", [0, 5])
def test_the_extra_steps_are_bounded(extra: int) -> None:
    steps = observed(Cadence(extra), range(10_000), 50, near=range(10_000))
    regular = [step for step in steps if step == 0 or (step + 1) % 50 == 0]
    assert len(steps) - len(regular) <= extra + 10_000 / 11
    if not extra:
        assert steps == regular
    else:
        assert steps[:7] == [0, 1, 2, 3, 4, 5, 16]  # each step without an extra one earns a tenth


def test_an_urgent_step_is_observed_at_once_and_only_once() -> None:
    cadence = Cadence(extra=0)
    assert observed(cadence, range(5), 10) == [0]
    cadence.urgent = True
    assert observed(cadence, range(5, 12), 10) == [5, 9]


def test_each_fit_begins_with_an_observed_step() -> None:
    cadence = Cadence(extra=0)
    assert observed(cadence, range(3), 10) == [0]
    cadence.start()
    assert observed(cadence, range(2, 5), 10) == [2]


def test_a_resumed_run_observes_what_an_unbroken_one_does_and_its_first_step() -> None:
    straight = observed(Cadence(extra=7), range(60), 20, near=range(5, 60))
    for cut in range(1, 40):
        first, second = Cadence(extra=7), Cadence(extra=7)
        before = observed(first, range(cut), 20, near=range(5, 60))
        second.load_state_dict(first.state_dict())
        second.due(cut, 20)
        more = [cut] if second.only_first else []
        after = observed(second, range(cut, 60), 20, near=range(5, 60))
        assert sorted([*before, *after]) == sorted([*straight, *more])


def test_a_smaller_allowance_holds_at_once() -> None:
    first, second = Cadence(extra=7), Cadence(extra=1)
    observed(first, range(5), 50, near=range(5))
    second.load_state_dict(first.state_dict())
    assert observed(second, range(5, 12), 50, near=range(20)) == [5]

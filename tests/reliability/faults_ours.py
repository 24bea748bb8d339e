"""Faults of the monitor itself: statistics, memory, any function of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attn_monitor.workspace import Workspace
from tests.reliability.expectations import FAULTY, alone, right, subject, survives, watching
from tests.reliability.registry import Verdict, fault
from tests.reliability.sweeps import Sweep
from tests.reliability.trials import attempt, in_steps, records, with_patches

SAMPLED = 40
"""How many functions of ours are made to raise, evenly over all that an observed step runs."""
_OF_MODE = ("__torch_function__", "_follow", "_softmax", "_guard", "_watched", "_opened", "<lambda>")
GUARDS = (
    "guarding.py:run",
    "callback.py:state_key",
    "taps.py:__call__",
    "capture/ownership.py:__call__",
    "capture/ownership.py:call_entry_point",
    *(f"capture/mode.py:{name}" for name in _OF_MODE),
)
"""What is not made to raise as it begins: the guards themselves, and what runs a function of the model's."""


def broken(*_: Any, **__: Any) -> Any:
    """Stand in for a function of ours."""
    raise ZeroDivisionError("broken on purpose")


@fault(
    "the statistics of a layer raise in the forward pass",
    whose="the monitor's",
    sees="one warning that names layers and error",
    lost="the layers in that record",
    quick=True,
)
def forward_statistics(folder: Path) -> Verdict:
    monitor = watching()
    breaking = with_patches(
        *(patch(f"attn_monitor.looks.{name}", broken) for name in ("attention_rows", "softmax_rows"))
    )
    trial = survives(breaking, monitor)
    (text,) = trial.said
    assert "net.blocks.0, net.blocks.1" in text
    assert "ZeroDivisionError: broken on purpose" in text
    assert records(monitor)[FAULTY] == {}
    right(monitor, but=[FAULTY])
    return Verdict()


@fault(
    "the statistics of gradients raise in the backward pass",
    whose="the monitor's",
    sees="one warning that names layers and error",
    lost="the layers in that record",
)
def backward_statistics(folder: Path) -> Verdict:
    monitor = watching()
    trial = survives(with_patches(patch("attn_monitor.looks.softmax_gradient_sums", broken)), monitor)
    (text,) = trial.said
    assert "net.blocks.0 (ZeroDivisionError: broken on purpose)" in text
    assert sorted(records(monitor)[FAULTY]) == ["net.blocks.1", "net.blocks.2"]
    right(monitor, but=[FAULTY])
    return Verdict()


@fault(
    "the sums cannot be turned into statistics",
    whose="the monitor's",
    sees="one warning with the error",
    lost="that record",
)
def computing(folder: Path) -> Verdict:
    monitor = watching()
    trial = survives(with_patches(patch("attn_monitor.metric.AttentionMetric.compute", broken)), monitor)
    (text,) = trial.said
    assert "this record is lost: ZeroDivisionError: broken on purpose" in text
    assert records(monitor).get(FAULTY, {}) == {}
    right(monitor, but=[FAULTY])
    return Verdict()


@fault(
    "judging a record raises", whose="the monitor's", sees="one warning with step and error", lost="events of that step"
)
def judging(folder: Path) -> Verdict:
    monitor = watching()
    trial = survives(with_patches(patch("attn_monitor.judge.Judge.take", broken)), monitor)
    (text,) = trial.said
    assert f"step {FAULTY}" in text
    assert "ZeroDivisionError: broken on purpose" in text
    right(monitor)
    return Verdict()


OUT_OF_MEMORY: tuple[Callable[[], Exception], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
    MemoryError,
)


@fault(
    "no memory for a tile, however small",
    whose="the monitor's",
    sees="one warning that names layers and error",
    lost="the layers in that record",
)
def out_of_memory(folder: Path) -> Verdict:
    for error in OUT_OF_MEMORY:

        def fails(*_: Any, error: Callable[[], Exception] = error) -> Any:
            raise error()

        monitor = watching()
        trial = survives(with_patches(patch.object(Workspace, "take", fails)), monitor)
        (text,) = trial.said
        assert type(error()).__name__ in text
        assert records(monitor)[FAULTY] == {}
        right(monitor, but=[FAULTY])
    return Verdict(len(OUT_OF_MEMORY), len(OUT_OF_MEMORY))


@fault("no memory for a tile of the usual size", whose="the monitor's", sees="nothing")
def little_memory(folder: Path) -> Verdict:
    tried: list[int] = []
    original = Workspace.take

    def scarce(self: Workspace, number: int, shape: Any) -> Any:
        tried.append(number)
        if len(tried) == 1:
            raise OUT_OF_MEMORY[0]()
        return original(self, number, shape)

    monitor = watching()
    trial = survives(with_patches(patch.object(Workspace, "take", scarce)), monitor)
    assert len(tried) > 1
    assert trial.said == []
    right(monitor, but=[FAULTY])
    (record,) = [record for step, record in monitor.history if step == FAULTY]
    assert sorted(record) == [f"net.blocks.{number}" for number in range(3)]
    return Verdict()


@fault(
    "any function of ours raises, but for the guards themselves",
    whose="the monitor's",
    sees="a warning or two with the error",
    lost="at most that record, or its pictures",
)
def any_function(folder: Path) -> Verdict:
    look = Sweep()
    attempt(subject(), in_steps(look, [FAULTY], watching()))
    inside = [code for code in look.functions if place(code) not in GUARDS]
    chosen = inside[:: max(len(inside) // SAMPLED, 1)]
    for code in chosen:
        sweep = Sweep(lambda: ValueError("on purpose"), function=code)
        monitor = watching()
        trial = survives(sweep, monitor)
        assert sweep.raised
        assert len(trial.said) <= 2, f"{place(code)}: {trial.said}"
        right(monitor, but=[FAULTY])
    assert alone().error == ""
    return Verdict(len(chosen), len(chosen))


def place(code: Any) -> str:
    """Return file and name of a function of ours."""
    return f"{code.co_filename.rpartition('attn_monitor/')[2]}:{code.co_name}"

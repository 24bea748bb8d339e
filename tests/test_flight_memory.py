"""What recording costs: nothing in the training, bounded memory, a part of the checkpoint."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from attn_monitor import AttentionMonitor
from attn_monitor import flight_memory as memory_module
from attn_monitor import flight_recorder as recorder_module
from attn_monitor.flight_memory import KEPT, FlightMemory
from attn_monitor.flight_records import Observation
from attn_monitor.gradient_norms import GradientNorms
from attn_monitor.saturation import SaturationRule
from tests.flights import Planted, Scheduled, written
from tests.models import LIGHTNING_ADVICE, Lit, fit, loader, make_record, quiet

pytestmark = LIGHTNING_ADVICE


# -- that it disturbs nothing ------------------------------------------------------------------------------------------


def test_training_is_the_same_to_the_bit() -> None:
    results: list[tuple[list[Tensor], list[Any], Tensor]] = []
    for size in (None, 0, 64):
        torch.manual_seed(3)
        model = Scheduled("hand", "sdpa", "mha", dropout=0.1)
        callbacks = [] if size is None else [AttentionMonitor(flight_recorder=size, every_n_steps=2)]
        quiet(callbacks=callbacks).fit(model, loader(5))
        results.append((model.losses, list(model.parameters()), torch.get_rng_state()))
    for other in results[1:]:
        for index in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(results[0][index], other[index], strict=True))
        assert torch.equal(results[0][2], other[2])


def test_a_part_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    for place, name in ((GradientNorms, "take"), (FlightMemory, "add"), (recorder_module, "_numbers")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            trainer, said = fit(Lit("hand"), AttentionMonitor(), 3)
            assert trainer.global_step == 3
            assert 1 <= sum("broken on purpose" in text for text in said) <= 2


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)])
def test_a_wrong_size_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`flight_recorder` expects a whole number"):
        AttentionMonitor(flight_recorder=value)


def test_none_keeps_and_writes_nothing(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(flight_recorder=0)
    fit(Planted(step=1), monitor, 4, logger=logger)
    assert written(logger.log_dir) == []
    assert (monitor.flight_recorder.memory.observations, list(monitor.flight_recorder.memory.losses)) == ([], [])
    assert monitor.state_dict()["flight"] == {}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FlightMemory(7)
    record = {"a": make_record(heads=5, logit_max=[1.0, 2.0, 3.0, 4.0, 5.0])}
    for step in range(2000):
        memory.add_loss(step, 0.5)
        memory.add(Observation(step=step), record, SaturationRule())
    assert [one.step for one in memory.observations] == list(range(1993, 2000))
    assert len(memory.losses) == 1024
    assert sum(table.numel() for table in memory.tables().values()) <= 7 * 5 * len(KEPT)
    monkeypatch.setattr(memory_module, "MOST_BYTES", 3 * 5 * len(KEPT) * 4)
    memory.add(Observation(step=2000), record, SaturationRule())
    assert [one.step for one in memory.observations] == [1998, 1999, 2000]


def test_the_largest_model_named_in_the_documentation_takes_what_it_says() -> None:
    size = 64 * 80 * 64 * len(KEPT) * 4
    assert len(KEPT) * 4 == 56
    assert 18e6 < size < 19e6 < memory_module.MOST_BYTES


def test_losses_that_wait_are_bounded_and_the_step_is_then_at_or_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 3)
    monitor = AttentionMonitor(every_n_steps=8, adaptive_steps=0)
    fit(Planted(step=2, value=math.nan), monitor, 8)
    began = monitor.flight_recorder.began
    assert began is not None
    assert began.text.startswith("the loss turned nan at step 5 or before; in the order of the forward pass")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_it_and_a_resumed_run_continues(tmp_path: Path) -> None:
    whole = AttentionMonitor(every_n_steps=2)
    torch.manual_seed(1)
    fit(Lit("hand", "sdpa"), whole, 4, max_epochs=2)
    torch.manual_seed(1)
    first, second = AttentionMonitor(every_n_steps=2), AttentionMonitor(every_n_steps=2)
    trainer, _ = fit(Lit("hand", "sdpa"), first, 4)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)["callbacks"]
    [state] = [value["flight"] for value in stored.values() if "flight" in value]
    assert state["heads"] == {"net.blocks.0": 2, "net.blocks.1": 2}
    assert all(table.shape == (3, 4) for table in state["tables"].values())

    model = Lit("hand", "sdpa")
    resumed = quiet(callbacks=[second], max_epochs=2)
    resumed.fit(model, loader(4), ckpt_path=path)
    memory = second.flight_recorder.memory
    assert [one.step for one in memory.observations] == [0, 1, 3, 4, 5, 7]  # a fit starts with an observation
    assert list(memory.losses) == list(whole.flight_recorder.memory.losses)
    kept = [0, 1, 2, 4, 5]
    for name, table in whole.flight_recorder.memory.tables().items():
        assert torch.equal(table.nan_to_num(-1.0), memory.tables()[name][kept].nan_to_num(-1.0))


def test_a_step_that_is_repeated_replaces_what_was_and_what_came_later() -> None:
    memory = FlightMemory(9)
    for step in (0, 3, 6, 3):
        memory.add_loss(step, float(len(memory.losses)))
        memory.add(Observation(step=step), {"a": make_record(logit_max=[float(step), 1.0])}, SaturationRule())
    assert [one.step for one in memory.observations] == [0, 3]
    assert list(memory.losses) == [(0, 0.0), (3, 3.0)]
    assert memory.tables()["logit_max"].tolist() == [[0.0, 1.0], [3.0, 1.0]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(version=99),
        lambda state: state.pop("heads"),
        lambda state: state["heads"].update(new=3),
        lambda state: state["tables"].update(logit_max=torch.zeros(2)),
        lambda state: state["observations"].append({"nonsense": 1}),
        lambda state: state.update(observations=3),
        lambda state: state.update(tables=None),
    ],
)
def test_a_damaged_state_is_ignored_with_a_warning(damage: Any) -> None:
    source = AttentionMonitor()
    fit(Lit("hand"), source, 2)
    state = copy.deepcopy(source.state_dict())
    damage(state["flight"])
    target = AttentionMonitor()
    target.load_state_dict(state)
    _, said = fit(Lit("hand"), target, 2)
    assert sum("the flight record in the checkpoint is ignored: " in text for text in said) == 1
    assert [one.step for one in target.flight_recorder.memory.observations] == [0, 1]


def test_a_checkpoint_without_it_loads() -> None:
    source, target = AttentionMonitor(), AttentionMonitor()
    fit(Lit("hand"), source, 2)
    state = source.state_dict()
    del state["flight"]
    target.load_state_dict(state)
    _, said = fit(Lit("hand"), target, 2)
    assert not any("flight" in text or "ignored" in text for text in said)


def test_another_model_starts_afresh() -> None:
    monitor = AttentionMonitor()
    fit(Lit("hand", "sdpa"), monitor, 3)
    fit(Lit("mha"), monitor, 2)
    memory = monitor.flight_recorder.memory
    assert memory.heads == {"net.blocks.0": 2}
    assert [one.step for one in memory.observations] == [0, 1]


def test_a_layer_that_joins_later_has_no_numbers_before() -> None:
    memory = FlightMemory(5)
    memory.add(Observation(step=0), {"a": make_record(heads=2, logit_max=[1.0, 2.0])}, SaturationRule())
    both = {name: make_record(heads=heads, logit_max=[float(heads)] * heads) for name, heads in (("b", 3), ("a", 2))}
    memory.add(Observation(step=1), both, SaturationRule())
    table = memory.tables()["logit_max"]
    assert memory.heads == {"a": 2, "b": 3}
    assert table[0, :2].tolist() == [1.0, 2.0]
    assert table[0, 2:].isnan().all()
    assert table[1].tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_copies_hold_what_is_kept_and_nothing_of_the_fit() -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            recorder = monitor.flight_recorder
            copies.extend([copy.deepcopy(recorder), pickle.loads(pickle.dumps(monitor)).flight_recorder])
            waiting.append(len(recorder._waiting))

    waiting: list[int] = []
    monitor = AttentionMonitor(every_n_steps=3)
    fit(Lit("hand"), monitor, 3, callbacks=[Copy()])
    assert waiting == [0, 0, 1]
    assert [len(copied.memory.observations) for copied in copies] == [0, 0, 1, 1, 1, 1]
    assert not any(copied._waiting or copied._norms._norms for copied in copies)
    assert [one.step for one in monitor.flight_recorder.memory.observations] == [0, 2]
    assert (len(monitor.flight_recorder._waiting), monitor.flight_recorder._norms._norms) == (0, [])

"""Lightning's strategies on real gloo processes: one record, one decision, and the numbers of a single process."""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor, AttentionProbe, QKClip
from tests.models import DIM, LIGHTNING_ADVICE, Lit, quiet
from tests.processes import run_ranks
from tests.strategies import BLOCKS, QUERIES, STEPS, WORLD, Uneven, data, loader_of, outcome, values_of

pytestmark = [pytest.mark.slow, *LIGHTNING_ADVICE]


def by_one_process(*, skipping: int | None = None, accumulated: int = 1) -> list[Any]:
    """Return the records of a loop whose loss is the mean of the ranks' losses, without Lightning or processes."""
    model = Uneven(skipping=skipping)
    optimizer: Any = model.configure_optimizers()
    probe = AttentionProbe(model, statistics=sorted(AttentionMonitor()._recorded))
    batches = [data(rank) for rank in range(WORLD)]
    found = []
    for step, start in enumerate(range(0, STEPS, accumulated)):
        numbers = range(start, min(start + accumulated, STEPS))
        with probe:
            for number in numbers:
                for rank in range(WORLD):
                    (model.on_rank(rank, batches[rank][number])).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= WORLD * accumulated
        optimizer.step()
        optimizer.zero_grad()
        found.append((step, probe.compute(losses=WORLD * len(numbers))))
        probe.reset()
    return values_of(found)


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (step, record), (_, wanted) in zip(found, expected, strict=True):
        assert list(record) == BLOCKS
        for layer, values in wanted.items():
            assert set(record[layer]) == set(values)
            for name, value in values.items():
                assert record[layer][name] == pytest.approx(value, rel=2e-6, abs=1e-9), (step, layer, name)


def ddp_fits(rank: int) -> dict[str, Any]:
    found = {}
    for name, options, skipping, settings in (
        ("plain", {}, None, {}),
        ("unused", {"find_unused_parameters": True}, 1, {}),
        ("static", {"static_graph": True}, None, {}),
        ("accumulated", {}, None, {"accumulate_grad_batches": STEPS}),
    ):
        model = Uneven(skipping=skipping)
        found[name] = outcome(rank, DDPStrategy(**options), model, AttentionMonitor(), **settings)  # type: ignore[arg-type] # a table of options
        plain = Uneven(skipping=skipping)
        without = outcome(rank, DDPStrategy(**options), plain, None, **settings)  # type: ignore[arg-type] # as above
        found[name]["neutral"] = all(found[name][key] == without[key] for key in ("losses", "weights"))
    return found


@pytest.fixture(scope="module")
def ddp() -> list[dict[str, Any]]:
    return run_ranks(ddp_fits, WORLD)


@pytest.mark.parametrize("kind", ["plain", "unused", "static", "accumulated"])
def test_ddp_gives_what_one_process_gives_and_changes_nothing(ddp: list[Any], kind: str) -> None:
    first, second = (rank[kind] for rank in ddp)
    accumulated = STEPS if kind == "accumulated" else 1
    assert first["neutral"]
    assert second["neutral"]
    assert first["history"] == second["history"]
    assert first["metrics"] == second["metrics"]
    assert_alike(first["history"], by_one_process(skipping=1 if kind == "unused" else None, accumulated=accumulated))
    assert first["said"] == second["said"] == []


def decisions(rank: int) -> dict[str, Any]:
    """Rank 1 alone has hot data."""
    found = {}
    for action in ("warn", "stop", "raise"):
        monitor = AttentionMonitor(every_n_steps=10, on_saturation=action)
        found[action] = outcome(rank, DDPStrategy(), Uneven(hot=1), monitor, steps=25)
        found[action]["observed"] = [step for step, _ in monitor.history]
    return found


@pytest.fixture(scope="module")
def decided() -> list[dict[str, Any]]:
    return run_ranks(decisions, WORLD)


def test_what_happens_on_one_rank_is_decided_alike_on_all(decided: list[Any]) -> None:
    first, second = (rank["warn"] for rank in decided)
    assert first["events"] == second["events"]
    assert any("is saturated" in event for event in first["events"])
    assert first["said"]
    assert second["said"] == []  # one of them speaks
    assert first["observed"] == second["observed"]
    assert first["observed"][:4] == [0, 1, 2, 3]  # closely, since a head is near its limit


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_ranks_stop_and_raise_at_the_same_step(decided: list[Any], action: str) -> None:
    first, second = (rank[action] for rank in decided)
    assert first["events"] == second["events"]
    assert any("critical" in event for event in first["events"])
    assert first["steps"] == second["steps"] < 25
    assert first["error"] == second["error"]
    assert bool(first["error"]) == (action == "raise")


def evaluation(rank: int) -> dict[str, Any]:
    """Rank 1 has nothing to validate on."""
    count = 2 if rank == 0 else 0
    monitor = AttentionMonitor(stages=("train", "validate"))
    return outcome(rank, DDPStrategy(), Uneven(), monitor, validation=Few(rank, count))


class Few:
    """Some validation batches, or none; Lightning takes any iterable."""

    def __init__(self, rank: int, count: int) -> None:
        self.batches = [[x] for x in data(rank, count)] if count else []

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.batches)


def test_a_rank_without_validation_batches_does_not_hold_up_the_others() -> None:
    first, second = run_ranks(evaluation, WORLD)
    assert first["evaluations"] == second["evaluations"]
    assert list(first["evaluations"]["validate"]) == BLOCKS


def clipping(rank: int) -> dict[str, Any]:
    """The logits run away on rank 1 alone, and the weights are everybody's."""
    monitor = AttentionMonitor(every_n_steps=1, mitigation=QKClip(tau=20.0))
    return outcome(rank, DDPStrategy(), Uneven(hot=1, lr=1e-5), monitor, steps=6)


def test_qk_clip_rescales_the_weights_of_all_ranks_alike() -> None:
    first, second = run_ranks(clipping, WORLD)
    assert first["weights"] == second["weights"]
    largest = [max(record[BLOCKS[0]]["logit_max"]) for _, record in first["history"]]
    assert largest[0] > 20.0
    assert min(largest) < largest[0] / 2
    assert any("QK-Clip: step" in text for text in first["said"])
    assert second["said"] == []


class Heated(Uneven):
    """Saturated on rank 1 alone, and trained slowly enough to stay finite.

    Its batch is that of the step: a loader begins anew in the middle of an epoch.
    """

    def __init__(self) -> None:
        super().__init__(hot=1, lr=1e-4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([data(self.global_rank, 12)[self.global_step]], batch_idx)


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """Train in one go, and in two with a checkpoint between."""
    whole = outcome(rank, DDPStrategy(), Heated(), AttentionMonitor(every_n_steps=2), steps=12)
    path = f"{folder}/half.ckpt"
    save = Save(path)
    outcome(rank, DDPStrategy(), Heated(), AttentionMonitor(every_n_steps=2), steps=12, callbacks=[save])
    os.environ.update(LOCAL_RANK=str(rank))
    monitor = AttentionMonitor(every_n_steps=2)
    trainer = quiet(strategy=DDPStrategy(), devices=WORLD, callbacks=[monitor], use_distributed_sampler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Heated(), loader_of(rank, 12), ckpt_path=path, weights_only=False)
    critical = [event.critical_step for event in monitor.events if event.critical_step is not None]
    return {
        "whole": whole["events"],
        "resumed": [str(event) for event in monitor.events],
        "onsets": [event.step for event in monitor.events],
        "kinds": {event.kind for event in monitor.events},
        "critical": critical,
        "losses": whole["losses"],
    }


class Save(pl.Callback):
    """Saves a checkpoint after the sixth step and ends there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_a_resumed_run_raises_the_events_of_an_unbroken_one_on_every_rank(tmp_path: Path) -> None:
    found = run_ranks(resumed, WORLD, str(tmp_path))
    first, second = found
    assert all(math.isfinite(loss) for rank in found for loss in rank.pop("losses"))
    assert first == second
    assert first["resumed"] == first["whole"]
    assert first["kinds"] == {"saturated"}
    assert set(first["onsets"]) == {0}  # before the checkpoint, and told of once
    assert min(first["critical"]) > 6  # after it


def spawned(method: str, folder: Path) -> Any:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    monitor = AttentionMonitor()
    with warnings.catch_warnings(), patch.dict(os.environ, MASTER_PORT=str(port)):
        warnings.simplefilter("ignore")
        trainer = quiet(
            strategy=DDPStrategy(start_method=method, process_group_backend="gloo"),  # type: ignore[arg-type] # a parameter
            devices=WORLD,
            callbacks=[monitor],
            logger=CSVLogger(folder, name="", version=""),
        )
        trainer.fit(Lit("hand"), DataLoader(TensorDataset(torch.randn(12, QUERIES, DIM)), batch_size=3))
    return trainer


@pytest.mark.parametrize("method", ["spawn", "fork"])  # fork is what notebooks use
def test_processes_that_lightning_starts_itself(method: str, tmp_path: Path) -> None:
    trainer = spawned(method, tmp_path)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert any("attn_logit_std/net.blocks.0" in line for line in lines[:1])
    assert len(lines) >= 3  # a header and two steps
    assert not dist.is_initialized()
    assert trainer.state.finished


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP1 refuses a CPU")
def test_fsdp1_gives_what_a_single_device_gives() -> None:
    found = []
    for strategy in ("auto", "fsdp"):
        monitor = AttentionMonitor()
        trainer = quiet(accelerator="gpu", devices=1, strategy=strategy, callbacks=[monitor])
        trainer.fit(Uneven(), loader_of(0))
        found.append(values_of(monitor.history))
    assert_alike(found[1], found[0])

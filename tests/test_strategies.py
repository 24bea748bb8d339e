"""Lightning's strategies on real gloo processes: one record, one decision, and the numbers of a single process."""

from __future__ import annotations

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
from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor, AttentionProbe, QKClip
from attn_monitor.events import AttentionSaturationError, AttentionWarning
from attn_monitor.statistics import attention_rows
from tests.models import DIM, LIGHTNING_ADVICE, Lit, quiet
from tests.processes import run_ranks

pytestmark = [pytest.mark.slow, *LIGHTNING_ADVICE]

WORLD = 2
SIZES = (3, 2)
"""Samples per batch on each rank."""
STEPS, QUERIES = 3, 5
BLOCKS = ["net.blocks.0", "net.blocks.1"]


class Uneven(Lit):
    """Two attentions on batches that differ between the ranks; a rank may leave the second one out."""

    def __init__(self, *, skipping: int | None = None, hot: int | None = None, lr: float = 0.1) -> None:
        torch.manual_seed(13)
        super().__init__("hand", "sdpa")
        self.skipping, self.hot, self.lr = skipping, hot, lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_rank(self, rank: int, x: Tensor) -> Tensor:
        first, second = self.net.blocks
        x = x * 40 if rank == self.hot else x
        x = x + first(x)
        x = x if rank == self.skipping else x + second(x)
        loss: Tensor = self.net.head(x).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.on_rank(self.global_rank, batch[0])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.on_rank(self.global_rank, batch[0])


def data(rank: int, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(31 + rank)
    return [torch.randn(SIZES[rank], QUERIES, DIM, generator=generator) for _ in range(steps)]


def loader_of(rank: int, steps: int = STEPS) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat(data(rank, steps))), batch_size=SIZES[rank])


def values_of(history: Any) -> list[Any]:
    return [
        (step, {layer: {name: v.tolist() for name, v in stats.measured().items()} for layer, stats in record.items()})
        for step, record in history
    ]


def outcome(
    rank: int, strategy: Strategy, model: Lit, watching: AttentionMonitor | None, **settings: Any
) -> dict[str, Any]:
    """Train on this rank of a group that exists, and return what it knows afterwards."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(WORLD))
    stages = settings.pop("validation", None)
    count = settings.pop("steps", STEPS)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [*([watching] if watching else []), *settings.pop("callbacks", [])]
        trainer = quiet(
            strategy=strategy, devices=WORLD, callbacks=callbacks, use_distributed_sampler=False, **settings
        )
        try:
            trainer.fit(model, loader_of(rank, count), stages)
        except AttentionSaturationError as raised:
            error = str(raised)
    said = [str(w.message) for w in caught if issubclass(w.category, AttentionWarning) and "logger" not in str(w)]
    monitor = watching or AttentionMonitor()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "history": values_of(monitor.history),
        "evaluations": {
            stage: {layer: stats.measured()["logit_max"].tolist() for layer, stats in record.items()}
            for stage, record in monitor.evaluations.items()
        },
        "events": [str(event) for event in monitor.events],
        "metrics": metrics,
        "steps": trainer.global_step,
        "losses": [float(loss) for loss in model.losses],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "error": error,
        "said": said,
    }


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


def trouble(rank: int) -> dict[str, Any]:
    """Things that go wrong on rank 1 only."""
    found = {}
    real = attention_rows

    def failing(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise MemoryError("no tile")
        return real(*args, **kwargs)

    with patch("attn_monitor.looks.attention_rows", failing):
        found["statistic"] = outcome(rank, DDPStrategy(), Uneven(), AttentionMonitor())
    monitor = AttentionMonitor()
    attach = AttentionProbe.attach

    def refusing(probe: AttentionProbe, *args: Any, **kwargs: Any) -> None:
        if rank == 1 and not monitor.history and not failed:
            failed.append(1)
            raise OSError("not now")
        attach(probe, *args, **kwargs)

    failed: list[int] = []
    with patch.object(AttentionProbe, "attach", refusing):
        found["attach"] = outcome(rank, DDPStrategy(), Uneven(), monitor)
    judged = AttentionMonitor(every_n_steps=10)
    if rank == 1:
        judged._judge.take = lambda *_: 1 / 0  # type: ignore[assignment,method-assign] # an error of ours
    found["judge"] = outcome(rank, DDPStrategy(), Uneven(hot=1), judged, steps=12)
    return found


@pytest.fixture(scope="module")
def troubled() -> list[dict[str, Any]]:
    return run_ranks(trouble, WORLD)


def test_a_statistic_that_fails_on_one_rank_is_missing_on_all(troubled: list[Any]) -> None:
    first, second = (rank["statistic"] for rank in troubled)
    assert first["history"] == second["history"]
    assert len(first["history"]) == STEPS == first["steps"]
    assert not any(BLOCKS[1] in record for _, record in first["history"])
    assert any("rank 1: MemoryError: no tile" in text for text in first["said"])


def test_a_rank_that_fails_to_attach_costs_one_record_on_all(troubled: list[Any]) -> None:
    first, second = (rank["attach"] for rank in troubled)
    assert first["history"] == second["history"]
    assert [step for step, _ in first["history"]] == [1, 2]
    assert any("rank 1: attaching to the model failed: OSError: not now" in text for text in first["said"])


def test_ranks_go_on_observing_the_same_steps_if_one_can_not_judge(troubled: list[Any]) -> None:
    first, second = (rank["judge"] for rank in troubled)
    assert [step for step, _ in first["history"]] == [step for step, _ in second["history"]]
    assert first["steps"] == second["steps"] == 12


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


def unwritable(rank: int, folder: str) -> dict[str, Any]:
    """A checkpoint is wanted at the first flagged head, and a file stands where its folder should."""
    monitor = AttentionMonitor(every_n_steps=1, save_checkpoint=True)
    return outcome(rank, DDPStrategy(), Uneven(hot=1, lr=1e-5), monitor, steps=4, default_root_dir=folder)


def test_a_checkpoint_that_can_not_be_written_holds_up_no_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("no folder")
    first, second = run_ranks(unwritable, WORLD, str(tmp_path))
    assert first["steps"] == second["steps"] == 4
    assert any("saving a checkpoint at step" in text for text in first["said"])


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """Train in one go, and in two with a checkpoint between."""
    whole = outcome(rank, DDPStrategy(), Uneven(hot=1), AttentionMonitor(every_n_steps=2), steps=12)
    path = f"{folder}/half.ckpt"
    save = Save(path)
    outcome(rank, DDPStrategy(), Uneven(hot=1), AttentionMonitor(every_n_steps=2), steps=12, callbacks=[save])
    os.environ.update(LOCAL_RANK=str(rank))
    monitor = AttentionMonitor(every_n_steps=2)
    trainer = quiet(strategy=DDPStrategy(), devices=WORLD, callbacks=[monitor], use_distributed_sampler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Uneven(hot=1), loader_of(rank, 12), ckpt_path=path, weights_only=False)
    return {"whole": whole["events"], "resumed": [str(event) for event in monitor.events]}


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
    assert found[0] == found[1]
    assert found[0]["whole"]
    assert found[0]["resumed"] == found[0]["whole"]


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

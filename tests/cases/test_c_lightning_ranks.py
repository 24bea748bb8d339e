"""C: what several processes must agree on, and what of it is found on disk."""

from __future__ import annotations

import csv
import json
import math
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from attn_monitor.tags import EVENTS_FILE
from tests.cases.lit import data
from tests.cases.support import SelfAttention, Trained
from tests.models import LIGHTNING_ADVICE, quiet
from tests.processes import START_METHOD

pytestmark = LIGHTNING_ADVICE


class Branching(Trained):
    """Rank 1 runs the second attention in no batch; there alone the first is saturated at step 1 and nan at step 2."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"first": SelfAttention(12, 2), "second": SelfAttention(12, 2)}), lr=0.0)

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        if self.global_rank == 0:
            return net["second"](net["first"](batch[0])).square().mean()
        return net["first"](batch[0] * (1.0, 300.0, math.nan)[self.global_step]).square().mean()


class Note(Callback):
    """Counts the collectives of the monitor's own hooks, and writes down what each process knows."""

    def __init__(self, folder: str, monitor: AttentionMonitor) -> None:
        self.folder, self.monitor = folder, monitor

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        known = {
            "layers": [list(record) for _, record in self.monitor.history],
            "events": [str(event) for event in self.monitor.events],
            "keys": [key for key in trainer.callback_metrics if key.startswith("attn")],
        }
        Path(self.folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(known))


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier", "broadcast")


def counting(called: list[str], name: str) -> Any:
    """Return the collective, which notes each call of it."""
    real = getattr(torch.distributed, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return real(*args, **kwargs)

    return spy


class Counted(AttentionMonitor):
    """Writes down the collectives that happen inside the monitor."""

    folder: str

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        called: list[str] = []
        spies: dict[str, Any] = {name: counting(called, name) for name in COLLECTIVES}
        with patch.multiple(torch.distributed, **spies):
            super().on_train_batch_end(trainer, *args, **kwargs)
        with open(Path(self.folder, f"collectives{trainer.global_rank}.txt"), "a") as file:
            file.write(" ".join(["step", *called]) + "\n")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fit `Branching` in two spawned processes and return the folder with all that they left."""
    folder = tmp_path_factory.mktemp("spawned")
    monitor = Counted()
    monitor.folder = str(folder)
    # As fresh as a spawned process, but forked from the server of tests/processes.py, which has imported torch already.
    strategy = DDPStrategy(start_method=START_METHOD, process_group_backend="gloo", find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet(
            strategy=strategy,
            devices=2,
            callbacks=[monitor, Note(str(folder), monitor)],
            logger=CSVLogger(folder, name="csv", version=0),
        )
        trainer.fit(Branching(), data(6))
    assert list(monitor.history) == []  # the trap: what the workers saw stays with them
    return folder


@pytest.mark.slow
def test_c04_collectives_do_not_grow_with_metrics_or_layers(two_processes: Path) -> None:
    # A record is one gather and a decision, the first one also an exchange of names and a second gather. An alarm or
    # nan on rank 1 alone adds nothing.
    first, *later = (two_processes / "collectives0.txt").read_text().splitlines()
    assert first == "step all_gather all_gather_object all_gather all_reduce"
    assert later == ["step all_gather all_reduce"] * 2
    assert (two_processes / "collectives1.txt").read_text().splitlines() == [first, *later]


@pytest.mark.slow
def test_c05_ranks_that_see_different_layers_and_events_have_one_record(two_processes: Path) -> None:
    known = [json.loads((two_processes / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert known[0] == known[1]
    assert known[0]["layers"] == [["net.first", "net.second"]] * 3
    # The keys in their order, though rank 1 has no data of the second attention and is alone with all events.
    assert [key for key in known[0]["keys"] if key.startswith("attn_logit_std/")] == [
        "attn_logit_std/net.first",
        "attn_logit_std/net.second",
    ]
    told = [event.partition(": head ")[::2] for event in known[0]["events"]]
    assert [step for step, text in told if "is saturated" in text] == ["step 1"] * 2
    assert [(step, text[:14]) for step, text in told if "nan or inf" in text] == [
        ("step 2", f"{head} of net.first"[:14]) for head in range(2)
    ]


@pytest.mark.slow
def test_c14_the_parent_of_spawned_workers_finds_the_events_in_the_run(two_processes: Path) -> None:
    lines = (two_processes / "csv" / "version_0" / EVENTS_FILE).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert {(event["layer"], event["head"]) for event in found} == {("net.first", 0), ("net.first", 1)}


@pytest.mark.slow
def test_c14_what_spawned_workers_saw_is_on_disk(two_processes: Path) -> None:
    with open(two_processes / "csv" / "version_0" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attn_logit_std/net.first"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert all(float(row["attn_logit_std/net.second"]) > 0 for row in rows)
    assert {float(row["attn_monitor/observed_layers"]) for row in rows} == {2.0}

"""Trainings that go wrong for the flight recorder, and reading the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_monitor.flight_records import FlightRecord, from_json
from tests.models import DIM, Lit

_INF = float("inf")


def written(folder: str | Path) -> list[FlightRecord]:
    """Read the files of a folder, in the order of their steps; all of them must be strict JSON and none a leftover."""
    assert not list(Path(folder).glob("*.part"))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    paths = sorted(Path(folder).glob("attn_monitor_flight_*.json"), key=lambda path: int(path.stem.split("_")[-1]))
    texts = [path.read_text() for path in paths]
    for text in texts:
        json.loads(text, parse_constant=refuse)
    return [from_json(text) for text in texts]


class Planted(Lit):
    """Plants a value in the query weights of one head at a step, and passes over updates that are not finite."""

    def __init__(
        self, layer: int = 1, head: int = 1, step: int = 5, skipping: bool = True, value: float = _INF
    ) -> None:
        super().__init__("hand", "hand")  # the fused kernel of CPUs puts out numbers even for logits that are nan
        self.place, self.step, self.skipping, self.value = (layer, head), step, skipping, value

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_step == self.step:
            layer, head = self.place
            width = DIM // 2
            with torch.no_grad():
                self.net.blocks[layer].qkv.weight[head * width : (head + 1) * width] = self.value
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.skipping and not all(bool(p.grad.isfinite().all()) for p in self.parameters() if p.grad is not None):
            for parameter in self.parameters():
                parameter.grad = None


class Scheduled(Lit):
    """Halves its learning rate every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def disk_full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


class Overflowing(Lit):
    """A loss that is inf though all of the model is finite, for one step or from then on."""

    def __init__(self, *steps: int) -> None:
        super().__init__("sdpa", "hand")
        self.steps = steps

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + float("inf") if self.global_step in self.steps else loss

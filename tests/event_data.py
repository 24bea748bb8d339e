"""Event files as a training writes them, from arrays: what the tab and the report are tested with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

NAN = float("nan")
HOSTILE = (
    "a/b.c",
    "net[0]['x']",
    'say "hi"',
    "<script>window.injected=1</script>",
    "<img src=x onerror=window.injected=1>",
    "x}{&amp;%2F#?=+",
    "注意.层.\N{SNOWMAN}\N{RIGHT-TO-LEFT OVERRIDE}",
    "</script><!--",
)
"""Names of layers, runs and tags that break what is pasted together from strings."""


@dataclass
class StoredRun:
    """What one run writes; every table is [S, L, H]."""

    steps: Sequence[int]
    tables: Mapping[str, NDArray[np.float32]]
    layers: Sequence[str]
    head_dims: Sequence[float] = ()
    threshold: float = 0.5
    events: Mapping[int, Sequence[Mapping[str, object]]] = field(default_factory=dict)
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    prefix: str = ""

    def write(self, folder: Path, steps: Iterable[int] | None = None, writer: SummaryWriter | None = None) -> None:
        """Write some steps by index, all for `None`, into a folder or with a writer that stays open."""
        own = writer or SummaryWriter(str(folder), filename_suffix=".new")
        for index in range(len(self.steps)) if steps is None else steps:
            self._write_step(own, index)
        own.flush()
        if writer is None:
            own.close()
            self._date(folder)

    @staticmethod
    def _date(folder: Path) -> None:
        """Name the files as if each were an hour younger than the one before; within a second, order is chance."""
        for path in folder.glob("events.out.tfevents.*.new"):
            number = len(list(folder.glob("events.out.tfevents.*.part")))
            path.rename(folder / f"events.out.tfevents.{1_700_000_000 + 3600 * number}.host.1.part")

    def _write_step(self, writer: SummaryWriter, index: int) -> None:
        step = self.steps[index]
        values = [
            self._value(name, {"kind": "heads", "statistic": name, "threshold": self.threshold}, table[index])
            for name, table in self.tables.items()
        ]
        if index == 0:
            names: Any = [layer.encode() for layer in self.layers]
            values.append(self._value("layers", {"kind": "layers"}, names))
            dims = np.array(self.head_dims or [NAN] * len(self.layers), np.float32)
            values.append(self._value("head_dim", {"kind": "head_dim"}, dims))
        if self.events.get(step):
            records: Any = [json.dumps(event).encode() for event in self.events[step]]
            values.append(self._value("event_records", {"kind": "events"}, records))
        writer._get_file_writer().add_summary(Summary(value=values), step)
        for tag, series in self.scalars.items():
            writer.add_scalar(tag, series[index], step)

    def _value(self, name: str, content: Mapping[str, object], array: Any) -> Summary.Value:
        plugin_data = SummaryMetadata.PluginData(
            plugin_name="attn_monitor", content=json.dumps({"version": 1, **content}).encode()
        )
        metadata = SummaryMetadata(plugin_data=plugin_data, data_class=DATA_CLASS_TENSOR)
        return Summary.Value(
            tag=f"{self.prefix}attn_monitor/{name}", metadata=metadata, tensor=tensor_util.make_tensor_proto(array)
        )


def make_event(step: int, layer: str, head: int, **more: object) -> dict[str, object]:
    """Return an event as it is stored."""
    return {
        "step": step,
        "layer": layer,
        "head": head,
        "statistic": "logit_row_std",
        "value": 5.0,
        "head_dim": 64,
        "ratio": 0.625,
        "threshold": 0.5,
        "severity": "warning",
        "state": "opened",
        "message": f"step {step}: head {head} of {layer} is saturated",
        **more,
    }


def make_run(
    steps: Sequence[int] = (0, 10, 20, 30, 40, 50, 60),
    layers: Sequence[str] = ("layers.0.attn", "layers.1.attn", "layers.2.attn"),
    heads: int = 5,
    seed: int = 0,
    **more: Any,
) -> StoredRun:
    """Return a run whose head 3 of the second layer leaves the others; the last layer has two heads fewer."""
    random = np.random.default_rng(seed)
    shape = (len(steps), len(layers), heads)

    def noise() -> NDArray[np.float64]:
        values: NDArray[np.float64] = random.uniform(0.9, 1.1, shape)
        return values

    growth = np.ones(shape)
    sick = min(1, len(layers) - 1)
    growth[:, sick, min(3, heads - 1)] = np.geomspace(1, 12, len(steps))
    tables = {
        "saturation_ratio": 0.15 * growth * noise(),
        "logit_row_std": 1.2 * growth * noise(),
        "entropy_normalized": np.clip(0.9 * noise() / growth, 0, 1),
        "scale_ratio": np.ones(shape),
        "q_rms": growth**0.5 * noise(),
        "k_rms": growth**0.3 * noise(),
        "alignment": growth**0.2 * noise(),
        "nonfinite": np.zeros(shape),
    }
    tables["qk_std"] = tables["scale_ratio"] * tables["q_rms"] * tables["k_rms"] * tables["alignment"]
    for table in tables.values():
        table[:, -1, heads - 2 :] = NAN
    options: dict[str, Any] = {
        "head_dims": [64.0] * len(layers),
        "scalars": {"train_loss": list(np.geomspace(4, 1, len(steps)))},
        **more,
    }
    return StoredRun(steps, {name: table.astype(np.float32) for name, table in tables.items()}, layers, **options)

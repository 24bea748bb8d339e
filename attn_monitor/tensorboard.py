"""How a record looks to the loggers: scalar tags for all of them; images, per-head tensors and texts for TensorBoard.

One row per layer and one column per head; layers with fewer heads are padded with nan.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_monitor.catalog import STATISTICS
from attn_monitor.colors import heat_image
from attn_monitor.records import AttentionStatistics
from attn_monitor.saturation import SaturationEvent, SaturationRule

PLUGIN = "attn_monitor"
"""The plugin name of the per-head tensors, and the first part of the model-wide tags."""
LAYERS_TAG = f"{PLUGIN}/layers"
"""The names of the rows of the per-head tensors, rewritten when a layer joins. Rows never change their place."""
EVENTS_TAG = f"{PLUGIN}/events"
RATIO = "saturation_ratio"
_NOT_PER_HEAD = {"rows", "masked_rows", "scale"}
_FORMAT_VERSION = 1


def layer_tag(layer: str) -> str:
    """Return a layer's name as part of a tag: dots stay, what breaks loggers or grouping becomes "_".

    Two different names never give the same tag: a changed name ends in a digest of the original.

    Example:
        >>> layer_tag("encoder.layers.0.self_attn"), layer_tag("net.a b")
        ('encoder.layers.0.self_attn', 'net.a_b-223632')
    """
    clean = re.sub(r"[^\w.\-#@]", "_", layer)
    if clean == layer and not re.search(r"-[0-9a-f]{6}$", layer):
        return layer
    return f"{clean}-{hashlib.sha256(layer.encode()).hexdigest()[:6]}"


def scalars(
    statistics: Mapping[str, AttentionStatistics],
    chosen: Iterable[str],
    rule: SaturationRule,
    saturated_heads: int,
    prefix: str = "",
) -> dict[str, float]:
    """Return the scalar tags of a record.

    `attn_<statistic>/<layer>` is the mean over the heads with a finite value; `attn_<statistic>_max/<layer>` or
    `_min` is the worst head where larger or smaller is worse. No finite head, no tag. The model-wide
    `attn_monitor/saturated_heads` and `attn_monitor/observed_layers` are always there; where rows are sampled,
    `attn_monitor/sampling_error_max` is the largest standard error of any chosen statistic of any head, relative to its
    value.

    Args:
        statistics: The record.
        chosen: The statistics that get tags.
        rule: Gives `attn_monitor/saturation_ratio_max`.
        saturated_heads: How many heads have an open event.
        prefix: Stands before every tag, `"val_"` for example.
    """
    tags: dict[str, float] = {}
    chosen = sorted(chosen, key=list(STATISTICS).index)
    for name in chosen:
        worse = STATISTICS[name].worse
        for layer, stats in statistics.items():
            finite = _finite(getattr(stats, name))
            if not finite:
                continue
            tags[f"attn_{name}/{layer_tag(layer)}"] = math.fsum(finite) / len(finite)
            if worse == "up":
                tags[f"attn_{name}_max/{layer_tag(layer)}"] = max(finite)
            elif worse == "down":
                tags[f"attn_{name}_min/{layer_tag(layer)}"] = min(finite)
    tags[f"{PLUGIN}/saturated_heads"] = float(saturated_heads)
    tags[f"{PLUGIN}/observed_layers"] = float(len(statistics))
    if ratios := [ratio for stats in statistics.values() for ratio in _finite(rule.ratio(stats))]:
        tags[f"{PLUGIN}/{RATIO}_max"] = max(ratios)
    if errors := [error for stats in statistics.values() for error in _relative_errors(stats, chosen)]:
        tags[f"{PLUGIN}/sampling_error_max"] = max(errors)
    return {f"{prefix}{tag}": value for tag, value in tags.items()}


def _relative_errors(stats: AttentionStatistics, chosen: Iterable[str]) -> list[float]:
    """Return the standard errors of the chosen statistics of every head, relative to the values."""
    known = [name for name in chosen if name in stats.standard_error]
    return [ratio for name in known for ratio in _finite(stats.standard_error[name] / getattr(stats, name).abs())]


def head_tables(
    statistics: Mapping[str, AttentionStatistics], rule: SaturationRule, layers: Sequence[str]
) -> dict[str, Tensor]:
    """Return a [layers, heads] float32 table of each per-head number, nan where there is no such head or value."""
    width = max((stats.heads for stats in statistics.values()), default=0)
    tables: dict[str, Tensor] = {}
    for layer, stats in statistics.items():
        errors = {f"{name}_standard_error": error for name, error in stats.standard_error.items()}
        for name, values in {**stats.measured(), **errors, RATIO: rule.ratio(stats)}.items():
            if name not in _NOT_PER_HEAD:
                table = tables.setdefault(name, torch.full((len(layers), width), math.nan, device="cpu"))
                table[layers.index(layer), : stats.heads] = values.float()
    return tables


class HeadWriter:
    """Writes what scalars cannot show to TensorBoard's `SummaryWriter`s.

    A kind of write that fails is given up for that writer and its message returned, so that scalars go on alone.

    Args:
        chosen: The statistics that get an image; the tensors hold everything that was measured.
        rule: Gives the table of saturation ratios.
        prefix: Stands before every tag.
    """

    def __init__(self, chosen: Iterable[str], rule: SaturationRule, prefix: str = "") -> None:
        self._chosen = [*sorted(chosen, key=list(STATISTICS).index), RATIO]
        self._rule = rule
        self._prefix = prefix
        self._layers: list[str] = []
        self._given_up: set[tuple[int, str]] = set()

    def write(
        self,
        experiments: Sequence[object],
        step: int,
        statistics: Mapping[str, AttentionStatistics],
        events: Sequence[SaturationEvent],
    ) -> list[str]:
        """Write a record and its new events to every TensorBoard writer among the loggers' experiments.

        Returns:
            What failed, in words.
        """
        joined = [layer for layer in statistics if layer not in self._layers]
        self._layers += joined
        tables = head_tables(statistics, self._rule, self._layers)
        problems: list[str] = []
        for index, writer in enumerate(experiments):
            if not hasattr(writer, "add_image") or not hasattr(writer, "add_text"):
                continue
            jobs: dict[str, Callable[[Any], None]] = {
                "text": lambda writer: self._write_events(writer, step, events),
                "images": lambda writer: self._write_images(writer, step, tables),
            }
            if _is_torch_writer(writer):
                jobs["tensors"] = lambda writer: self._write_tables(writer, step, tables, bool(joined))
            for kind, job in jobs.items():
                if (index, kind) in self._given_up:
                    continue
                try:
                    job(writer)
                except Exception as error:
                    self._given_up.add((index, kind))
                    problems.append(f"{kind} ({type(error).__name__}: {error})")
        return problems

    def _write_events(self, writer: Any, step: int, events: Sequence[SaturationEvent]) -> None:
        for event in events:
            writer.add_text(f"{self._prefix}{EVENTS_TAG}", str(event), step)

    def _write_images(self, writer: Any, step: int, tables: Mapping[str, Tensor]) -> None:
        for name in self._chosen:
            if name in tables:
                tag = f"{self._prefix}attn_heads/{name}"
                writer.add_image(tag, heat_image(name, tables[name]).numpy(), step, dataformats="HWC")

    def _write_tables(self, writer: Any, step: int, tables: Mapping[str, Tensor], joined: bool) -> None:
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
        from tensorboard.util import tensor_util

        def value(tag: str, array: object, content: Mapping[str, object], description: str) -> Summary.Value:
            metadata = SummaryMetadata(
                summary_description=description,
                plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN, content=json.dumps(content).encode()),
                data_class=DATA_CLASS_TENSOR,  # without it TensorBoard serves the tag to nobody
            )
            return Summary.Value(
                tag=f"{self._prefix}{tag}", metadata=metadata, tensor=tensor_util.make_tensor_proto(array)
            )

        values = [
            value(
                f"{PLUGIN}/{name}",
                table.numpy(),
                {"version": _FORMAT_VERSION, "kind": "heads", "statistic": name, "layers": self._layers},
                _description(name),
            )
            for name, table in tables.items()
        ]
        if joined:
            content = {"version": _FORMAT_VERSION, "kind": "layers"}
            values.append(value(LAYERS_TAG, [layer.encode() for layer in self._layers], content, "Rows, by index."))
        if values:
            writer._get_file_writer().add_summary(Summary(value=values), step)


def _description(name: str) -> str:
    row = STATISTICS.get(name)
    if row is None:
        return f"{name}; axes (layer, head)."
    return f"{name}: {row.definition}{f', in {row.unit}' if row.unit else ''}; axes (layer, head)."


def _finite(values: Tensor | None) -> list[float]:
    return [] if values is None else [value for value in values.tolist() if math.isfinite(value)]


def _is_torch_writer(writer: object) -> bool:
    """Tell torch's writer from tensorboardX's, whose messages are of another class; import neither."""
    module = sys.modules.get("torch.utils.tensorboard")
    return module is not None and isinstance(writer, module.SummaryWriter)

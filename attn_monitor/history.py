"""The history of a monitor in a checkpoint: one tensor and plain values, bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attn_monitor.phrases import error_line
from attn_monitor.records import AttentionStatistics

Records = Iterable[tuple[int, Mapping[str, AttentionStatistics]]]

MOST_BYTES = 32 * 2**20
"""How much the numbers of a history take in a checkpoint at most; of larger models it has fewer records."""
MOST_TENSORS = 50_000
"""Of how many tensors: 256 records of 13 layers. Saving and restoring takes time for each of them, however small."""
_STATE_VERSION = 1
_ERRORS = "standard_error."
"""Stands before the names of the standard errors, which are tensors as well."""
_FIELDS = frozenset(entry.name for entry in fields(AttentionStatistics))


def history_state(history: Records) -> dict[str, Any]:
    """Return the latest records as one tensor and plain values; thousands of small tensors would be slow to save.

    Args:
        history: Steps and records, oldest first.
    """
    layouts: dict[tuple[Any, ...], int] = {}
    records: list[list[Any]] = []
    kept: list[list[Tensor]] = []
    left, more = MOST_BYTES, MOST_TENSORS
    for step, record in reversed(list(history)):
        columns = [(layer, dict(_tensors(statistics))) for layer, statistics in record.items()]
        tensors = [tensor for _, found in columns for tensor in found.values()]
        left -= sum(tensor.numel() for tensor in tensors) * 8
        more -= len(tensors)
        if left < 0 or more < 0:
            break
        layout = tuple(
            (layer, _plain(record[layer]), tuple((name, str(tensor.dtype)) for name, tensor in found.items()))
            for layer, found in columns
        )
        sizes = [[statistics.keys, statistics.calls] for statistics in record.values()]  # other in every batch
        records.append([step, layouts.setdefault(layout, len(layouts)), sizes])
        kept.append(tensors)
    one_kind = torch.float64  # holds the others: float32, and counts of rows
    flat = [
        tensor if tensor.dtype == one_kind else tensor.to(one_kind) for tensors in reversed(kept) for tensor in tensors
    ]
    return {
        "version": _STATE_VERSION,
        "layouts": [
            [[layer, dict(plain), [list(column) for column in columns]] for layer, plain, columns in layout]
            for layout in layouts
        ],
        "records": records[::-1],
        "values": torch.cat(flat) if flat else torch.empty(0, dtype=one_kind, device="cpu"),
    }


def history_from(state: Mapping[str, Any]) -> list[tuple[int, dict[str, AttentionStatistics]]]:
    """Return the records of `history_state`.

    Raises:
        ValueError: If the state does not fit.
    """
    try:
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"expected a history of version {_STATE_VERSION}, got {state['version']!r}")
        values, start, history = state["values"].to("cpu", torch.float64), 0, []
        for step, layout, sizes in state["records"]:
            record: dict[str, AttentionStatistics] = {}
            for (layer, plain, columns), (keys, calls) in zip(state["layouts"][layout], sizes, strict=True):
                end = start + plain["heads"] * len(columns)
                record[str(layer)] = _statistics(plain, columns, values[start:end].clone(), int(keys), int(calls))
                start = end
            history.append((int(step), record))
        if start != len(values):
            raise ValueError(f"expected {start} numbers, got {len(values)}")
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its parts do not fit ({error_line(error)})") from error
    return history


def _tensors(statistics: AttentionStatistics) -> list[tuple[str, Tensor]]:
    if not statistics.standard_error:
        return list(statistics.measured().items())
    errors = [(f"{_ERRORS}{name}", error) for name, error in statistics.standard_error.items()]
    return [*statistics.measured().items(), *errors]


def _plain(statistics: AttentionStatistics) -> tuple[tuple[str, Any], ...]:
    """Return what is no tensor, so that records alike share it."""
    return (
        ("heads", statistics.heads),
        ("head_dim", statistics.head_dim),
        ("approximate", tuple(sorted(statistics.approximate))),
    )


def _statistics(
    plain: Mapping[str, Any], columns: Sequence[tuple[str, str]], values: Tensor, keys: int, calls: int
) -> AttentionStatistics:
    found: dict[str, Any] = {}
    errors: dict[str, Tensor] = {}
    for (name, dtype), column in zip(columns, values.view(len(columns), plain["heads"]), strict=True):
        kind = getattr(torch, dtype.removeprefix("torch."))
        if name.startswith(_ERRORS):
            errors[name.removeprefix(_ERRORS)] = column.to(kind)
        elif name in _FIELDS:
            found[name] = column.to(kind)
    return AttentionStatistics(
        **found,
        head_dim=plain["head_dim"],
        keys=keys,
        calls=calls,
        approximate=frozenset(plain["approximate"]),
        standard_error=errors,
    )

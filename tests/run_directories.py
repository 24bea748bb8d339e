"""Reading the directories that tests have written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_monitor.reports.runs import Findings, find_runs, read_runs
from attn_monitor.views import RunData
from tests.event_data import StoredRun, make_run

LAYERS, HEADS = make_run().layers, 5


def read(directory: Path) -> Findings:
    return read_runs(find_runs(directory))


def only(directory: Path) -> RunData:
    """Read a directory with one run that has tables and nothing to complain about."""
    findings = read(directory)
    [run] = findings.runs
    assert (findings.scalar_runs, findings.foreign, findings.notes) == ([], [], [])
    return run


def ratios(steps: Sequence[int], low: float = 0.1, layers: Sequence[str] = LAYERS, **more: Any) -> StoredRun:
    """Return a run with one table, whose values at each step are that step times `low`, plus 0.001 a head."""
    places = np.arange(len(layers) * HEADS).reshape(1, len(layers), HEADS) / 1000
    values = low * np.array(steps).reshape(-1, 1, 1) + places
    return StoredRun(steps, {"saturation_ratio": values.astype(np.float32)}, layers, **more)


def write_events(folder: Path, *lines: object) -> None:
    (folder / "metrics.csv").write_text("step,attn_entropy/a\n0,1.0\n")
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "attn_monitor_events.jsonl").write_text("\n".join(texts))

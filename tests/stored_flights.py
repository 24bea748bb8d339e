"""A flight record that no training made, and its file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from attn_monitor.flight_records import (
    Beginning,
    FlightRecord,
    Observation,
    flight_name,
    to_json,
    write_flight,
)
from attn_monitor.reports.runs import Findings, find_runs, read_runs

NAN, INF = math.nan, math.inf


def make_flight(step: int = 40, layers: tuple[str, str] = ("a.attn", "b.attn"), **more: Any) -> FlightRecord:
    """Return a record of three observations of two layers with 2 and 3 heads."""
    observations = [
        Observation(
            step=when,
            loss=loss,
            learning_rates=[[0.01, 0.02]],
            grad_norm=norm,
            layer_grad_norms={layers[0]: 0.5 * when, layers[1]: None},
        )
        for when, loss, norm in ((step - 20, 2.5, 1.5), (step - 10, 1.25, None), (step, NAN, INF))
    ]
    ratio = np.array([[0.1, 0.2, 0.3, 0.4, NAN], [0.2, 0.3, 0.4, 0.5, 0.6], [0.3, NAN, 7.5, 0.6, 0.7]], np.float32)
    options: dict[str, Any] = {
        "reasons": ["critical event", "loss not finite"],
        "written": "2031-02-03T04:05:06+00:00",
        "diagnosis": [f"step {step}: head 0 of {layers[1]} is saturated\n  likely cause: this and that"],
        "began": Beginning(step=step - 1, loss="nan", seen_at=step, layer=layers[1], head=0, text="it began there"),
        "limit": 0.5,
        "heads": dict(zip(layers, (2, 3), strict=True)),
        "head_dims": dict(zip(layers, (64, None), strict=True)),
        "observations": observations,
        "losses": [(step - 20, 2.5), (step - 10, 1.25), (step - 1, NAN), (step, -INF)],
        "tables": {"saturation_ratio": ratio, "logit_max": 10 * ratio},
        **more,
    }
    return FlightRecord(step=step, **options)


def read(directory: Path) -> Findings:
    """Read everything below a directory."""
    return read_runs(find_runs(directory))


def store(folder: Path, record: FlightRecord) -> Path:
    """Write a record under its usual name."""
    return write_flight(folder, to_json(record), flight_name(record.step))

"""Runs to summarize: one head that collapses while the others are healthy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attn_monitor.views import RunData, Series, Table
from tests.event_data import make_event

LAYERS, HEADS, STEPS = ("encoder.0", "decoder.0"), 3, (0, 10, 20, 30)
SICK = (1, 2)


def make_series(*values: float, steps: Sequence[int] = STEPS) -> Series:
    return Series(np.array(steps, np.int64), np.array(values, np.float64))


def make_table(healthy: float, sick: Sequence[float]) -> Table:
    """Return a table that is the same for all heads but one."""
    values = np.full((len(STEPS), len(LAYERS), HEADS), healthy, np.float32)
    values[:, SICK[0], SICK[1]] = sick
    return Table(np.array(STEPS, np.int64), values)


def collapsing() -> RunData:
    """Head 2 of decoder.0: its queries double three times, its alignment at the end; flagged at 20, critical at 30."""
    opened = make_event(20, "decoder.0", 2, message="step 20: head 2 of decoder.0 is saturated, for a reason")
    return RunData(
        name="version_0",
        layers=LAYERS,
        head_dims=[64, 64],
        threshold=0.5,
        tables={
            "saturation_ratio": make_table(0.125, [0.15, 0.3, 0.6, 2.4]),
            "logit_row_std": make_table(1.0, [1.2, 2.4, 4.8, 19.2]),
            "entropy_normalized": make_table(0.9, [0.9, 0.8, 0.4, 0.05]),
            "grad_logits_norm": make_table(0.0, [3.0, 2.0, 1.0, 0.5]),
            "scale_ratio": make_table(1.0, [1.0] * 4),
            "q_rms": make_table(1.0, [1.0, 2.0, 4.0, 8.0]),
            "k_rms": make_table(1.0, [1.0] * 4),
            "alignment": make_table(1.0, [1.2, 1.2, 1.2, 2.4]),
            "qk_std": make_table(1.0, [1.2, 2.4, 4.8, 19.2]),
        },
        events=[opened, {**opened, "step": 30, "severity": "critical", "state": "critical"}],
        scalars={
            "train_loss": make_series(4.0, 3.0, 2.5, 3.5),
            "val_loss": make_series(4.5, 3.75, steps=(9, 25)),
            "grad_2.0_norm_total": make_series(7.0, 6.0, 50.0, 0.25),
            "glossary": make_series(1.0, 1.0, 1.0, 1.0),
        },
    )

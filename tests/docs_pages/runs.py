"""The trainings that the documentation shows: one that collapses, two repairs of it.

    python -m tests.docs_pages --train    # trains them into runs/walk and writes what the pages say of them

They are those of `python examples/char_gpt.py --lr 1e-2 --scale 1` and so on, with every statistic measured.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from attn_monitor import AttentionMonitor, AttentionStatistics
from attn_monitor.catalog import STATISTICS
from attn_monitor.events import AttentionWarning
from examples.char_gpt import CharGPT, RandomWindows, Recipe, read_text

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "runs" / "walk"
STEPS, SEED, EVERY = 300, 0, 10
RECIPES = (
    Recipe("1_unscaled", lr=1e-2, scale=1.0),
    Recipe("2_scaled", lr=1e-2),
    Recipe("3_qk_norm", lr=1e-2, qk_norm=True),
)
COMMANDS = {
    "1_unscaled": "python examples/char_gpt.py --lr 1e-2 --scale 1",
    "2_scaled": "python examples/char_gpt.py --lr 1e-2",
    "3_qk_norm": "python examples/char_gpt.py --lr 1e-2 --qk-norm",
}
"""What shows the same on the reader's screen."""


@dataclass
class Run:
    """What a training left behind.

    Attributes:
        name: Its name.
        recipe: Its recipe, in words.
        loss: The mean loss of the last 20 steps.
        losses: The loss of every step.
        said: What the monitor warned of, in order, as a terminal shows it.
        events: Step, severity, layer and head of every event at the end.
        steps: The observed steps.
        heads: By statistic, the values of all heads at each of these steps; nan is not measured.
    """

    name: str
    recipe: str
    loss: float
    losses: list[float]
    said: list[str]
    events: list[dict[str, Any]]
    steps: list[int] = field(default_factory=list)
    heads: dict[str, list[list[float]]] = field(default_factory=dict)

    def at(self, step: int, statistic: str) -> list[float]:
        """Return the values of all heads at an observed step."""
        return self.heads[statistic][self.steps.index(step)]


def train(recipe: Recipe) -> Run:
    """Train one model as the example does."""
    pl.seed_everything(SEED, verbose=False)
    model = CharGPT(recipe.lr, recipe.scale, recipe.qk_norm)
    monitor = AttentionMonitor(every_n_steps=EVERY, statistics=list(STATISTICS))
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=[monitor],
        logger=TensorBoardLogger(FOLDER, name=recipe.name, version=""),
        log_every_n_steps=EVERY,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AttentionWarning)
        trainer.fit(model, RandomWindows(read_text(), STEPS, SEED))
    losses = torch.stack(model.losses)
    run = Run(
        name=recipe.name,
        recipe=str(recipe),
        loss=float(losses[-20:].mean()),
        losses=losses.tolist(),
        said=[
            warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno, "").rstrip()
            for warning in caught
            if issubclass(warning.category, AttentionWarning)
        ],
        events=[
            {"step": event.step, "critical_step": event.critical_step, "layer": event.layer, "head": event.head}
            for event in monitor.events
        ],
    )
    for step, layers in monitor.history:
        run.steps.append(step)
        for name in (*STATISTICS, "scale_ratio", "nonfinite"):
            run.heads.setdefault(name, []).append(_all_heads(layers, name))
    return run


def _all_heads(layers: Mapping[str, AttentionStatistics], name: str) -> list[float]:
    values: list[float] = []
    for stats in layers.values():
        found = getattr(stats, name)
        values += [math.nan] * stats.heads if found is None else found.tolist()
    return values


def train_all() -> None:
    """Train every recipe and keep what it left."""
    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for recipe in RECIPES:
        print(f"Training {recipe.name}: {recipe}", flush=True)
        shutil.rmtree(FOLDER / recipe.name, ignore_errors=True)  # a second run in one folder would mix with the first
        run = train(recipe)
        (FOLDER / f"{recipe.name}.json").write_text(json.dumps(asdict(run)), encoding="utf-8")


def load() -> dict[str, Run]:
    """Return what the trainings left.

    Raises:
        FileNotFoundError: If there are none.
    """
    missing = [recipe.name for recipe in RECIPES if not (FOLDER / f"{recipe.name}.json").exists()]
    if missing:
        raise FileNotFoundError(f"no trainings {missing} in {FOLDER}: run python -m tests.docs_pages --train")
    return {
        recipe.name: Run(**json.loads((FOLDER / f"{recipe.name}.json").read_text(encoding="utf-8")))
        for recipe in RECIPES
    }

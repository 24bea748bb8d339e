"""Records on disk, so that a table can be drawn again without training again."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from tests.alarms.recipes import Recipe
from tests.alarms.training import Record, train

FOLDER = Path(__file__).parents[2] / ".alarms"
PREFIX = "statistic "


def path(recipe: Recipe, folder: Path) -> Path:
    """Return where the record of a training is kept."""
    return folder / f"{recipe.key}.npz"


def store(record: Record, folder: Path) -> None:
    """Write a record; one that is interrupted leaves none."""
    folder.mkdir(parents=True, exist_ok=True)
    final = path(record.recipe, folder)
    partial = final.with_suffix(f".{os.getpid()}.part")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            loss=record.loss,
            gradient_norm=record.gradient_norm,
            steps=record.steps,
            keys=np.array(record.keys),
            **{PREFIX + name: values for name, values in record.statistics.items()},
        )
    partial.replace(final)


def load(recipe: Recipe, folder: Path) -> Record | None:
    """Return the record of a training, or `None` if there is none."""
    if not path(recipe, folder).exists():
        return None
    with np.load(path(recipe, folder)) as arrays:
        statistics = {name.removeprefix(PREFIX): arrays[name] for name in arrays.files if name.startswith(PREFIX)}
        return Record(recipe, arrays["loss"], arrays["gradient_norm"], arrays["steps"], statistics, int(arrays["keys"]))


def records(recipes: Sequence[Recipe], folder: Path, workers: int) -> list[Record]:
    """Return the records of all trainings, after training what is missing."""
    collect([recipe for recipe in recipes if load(recipe, folder) is None], folder, workers)
    found = [load(recipe, folder) for recipe in recipes]
    return [record for record in found if record is not None]


def collect(recipes: Sequence[Recipe], folder: Path, workers: int) -> None:
    """Train, some trainings side by side with one thread each."""
    if not recipes:
        return
    if workers == 1:
        report(train_and_store(recipe, folder) for recipe in recipes)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=prepare) as pool:
        waiting = [pool.submit(train_and_store, recipe, folder) for recipe in recipes]
        report(future.result() for future in as_completed(waiting))


def prepare() -> None:
    """Make a worker use one core."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def train_and_store(recipe: Recipe, folder: Path) -> str:
    """Train, keep the record, and return what it was and how long it took."""
    started = time.perf_counter()
    record = train(recipe)
    store(record, folder)
    return f"{recipe}: loss {record.loss[-20:].mean():.3f}, {time.perf_counter() - started:.0f} s"


def report(lines: Iterable[str]) -> None:
    """Say on the terminal what has been trained."""
    for line in lines:
        print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)

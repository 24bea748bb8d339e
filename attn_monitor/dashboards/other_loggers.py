"""What loggers other than TensorBoard's get: scalars under names they accept, pictures where they take some, events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from attn_monitor.dashboards.pictures import Picture
from attn_monitor.tags import EVENTS_FILE, safe_name

_MLFLOW = "MLFlowLogger"
_MLFLOW_UNWANTED = r"[^a-zA-Z0-9_.\- /]"
_MLFLOW_LONGEST = 250
_MLFLOW_BATCH = 1000
"""How many metrics MLflow takes in one call."""


def mlflow_name(tag: str) -> str:
    """Return a tag as a name that MLflow accepts, and whose file no other metric needs; different tags stay different.

    Lightning's logger drops what MLflow does not allow, so that two names can become one.

    Example:
        >>> mlflow_name("attn_logit_std/layers.0.attn"), mlflow_name("attn_logit_std/layers.0.attn#1")
        ('attn_logit_std/layers.0.attn', 'attn_logit_std/layers.0.attn_1-35430d')
    """
    group, slash, layer = tag.rpartition("/")
    only_dots = re.fullmatch(r"\.+", layer)  # the name of a folder, not of a file
    unwanted = r"\." if only_dots else _MLFLOW_UNWANTED
    return f"{group}{slash}{safe_name(layer, unwanted, _MLFLOW_LONGEST - len(group) - len(slash))}"


def log_scalars(logger: Any, tags: Mapping[str, float], step: int) -> None:
    """Have a logger log scalars."""
    if not _is(logger, _MLFLOW):
        logger.log_metrics(dict(tags), step=step)
        return
    waiting = iter(tags.items())
    while part := dict(islice(waiting, _MLFLOW_BATCH)):
        logger.log_metrics({mlflow_name(tag): value for tag, value in part.items()}, step=step)


def takes_pictures(logger: object) -> bool:
    """Tell whether a logger takes pictures: one with Lightning's `log_image`, or MLflow."""
    return callable(getattr(logger, "log_image", None)) or _is(logger, _MLFLOW)


def log_pictures(logger: Any, pictures: Mapping[str, Picture], step: int) -> None:
    """Have a logger log pictures.

    Args:
        logger: One that `takes_pictures`.
        pictures: The pictures by tag.
        step: The x value.
    """
    for tag, picture in pictures.items():
        if _is(logger, _MLFLOW):
            logger.experiment.log_image(logger.run_id, picture.rgb(), key=mlflow_name(tag), step=step)
        else:
            logger.log_image(key=tag, images=[picture.rgb()], step=step)


def append_records(loggers: Iterable[object], records: Sequence[str], name: str = EVENTS_FILE) -> None:
    """Append events or notes to a plain file in the folder of every logger that has one, where they survive any crash.

    Args:
        loggers: The loggers.
        records: They, as JSON.
        name: The name of the file.
    """
    folders = [getattr(logger, "log_dir", None) for logger in loggers]
    for folder in dict.fromkeys(folder for folder in folders if isinstance(folder, str) and "://" not in folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / name).open("a", encoding="utf-8") as file:
            file.writelines(f"{record}\n" for record in records)


def _is(logger: object, name: str) -> bool:
    """Look for a class by its name, which two packages have, and subclasses of both."""
    return any(base.__name__ == name for base in type(logger).__mro__)

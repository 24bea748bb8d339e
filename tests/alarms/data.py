"""What the models learn from: the sources of the standard library, and scikit-learn's handwritten digits."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from tests.alarms.models import VOCABULARY
from tests.alarms.recipes import Recipe

TEXT_SIZE = 2_000_000


@cache
def text() -> Tensor:
    """Return the beginning of the standard library's sources as ASCII codes."""
    read = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        read += path.read_bytes()
        if len(read) >= TEXT_SIZE:
            break
    return torch.frombuffer(bytearray(read[:TEXT_SIZE]), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the images, [1797, 8, 8] from -1 to 1, and what they show."""
    loaded = import_module("sklearn.datasets").load_digits()
    return torch.tensor(loaded.images, dtype=torch.float32) / 8 - 1, torch.tensor(loaded.target)


def batches(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield input and target of every step; they depend on the seed alone."""
    generator = torch.Generator().manual_seed(recipe.seed)
    make = {"gpt": windows, "vit": chosen_digits}[recipe.task]
    for _ in range(recipe.setting.steps):
        yield make(recipe, generator)


def windows(recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random pieces of the text, and the same pieces one character further."""
    length = recipe.setting.tokens
    starts = torch.randint(len(text()) - length, (recipe.setting.batch, 1), generator=generator)
    pieces = text()[starts + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:].flatten()


def chosen_digits(recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random digits, with repetition."""
    images, shown = digits()
    chosen = torch.randint(len(images), (recipe.setting.batch,), generator=generator)
    return images[chosen], shown[chosen]

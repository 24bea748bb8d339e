"""Which trainings there are: models, learning rates, variants of attention and seeds, and which compete."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Literal, NamedTuple

Task = Literal["gpt", "vit"]
Part = Literal["tuning", "reported", "fresh"]
"""What a training is used for."""
VERSION = 1
"""Part of the key of a cached training: raise it when what a training does or records has changed."""


@dataclass(frozen=True)
class Variant:
    """How attention gets its logits.

    Attributes:
        scale_ratio: scale * sqrt(d_k), 1 for the textbook's.
        qk_norm: Whether queries and keys are normalised per head, with a learned gain.
        softcap: Where the logits are bent off, if anywhere.
    """

    scale_ratio: float | None = 1.0
    qk_norm: bool = False
    softcap: float | None = None

    def scale(self, head_dim: int) -> float:
        """Return what multiplies q.k."""
        return 1.0 if self.scale_ratio is None else self.scale_ratio / math.sqrt(head_dim)


VARIANTS: Mapping[str, Variant] = {
    "1/sqrt(d_k)": Variant(),
    "unscaled": Variant(scale_ratio=None),
    "2/sqrt(d_k)": Variant(scale_ratio=2.0),
    "QK-norm": Variant(qk_norm=True),
    "softcap 20": Variant(softcap=20.0),
}


@dataclass(frozen=True)
class Setting:
    """What all trainings of a model share.

    Attributes:
        layers: Number of blocks.
        heads: Attention heads of each.
        head_dim: d_k, so the width is heads * head_dim.
        tokens: Length of the text, or patches and the class token.
        batch: Pieces of text, or images, a step.
        steps: Length of a training.
        warmup: Steps over which the learning rate rises.
        every: An observation every so many steps.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    batch: int
    steps: int
    warmup: int = 20
    every: int = 4

    @property
    def width(self) -> int:
        """The width of the model."""
        return self.heads * self.head_dim

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.heads} heads, d_k {self.head_dim}, {self.tokens} tokens, batch {self.batch}, "
            f"{self.steps} steps, observed every {self.every}"
        )


class Family(NamedTuple):
    """Trainings that compete: all that differs is the variant of attention."""

    task: Task
    lr: float
    seed: int


@dataclass(frozen=True)
class Recipe:
    """One training."""

    task: Task
    setting: Setting
    lr: float
    variant: str
    seed: int

    @property
    def family(self) -> Family:
        """Whom it is compared with."""
        return Family(self.task, self.lr, self.seed)

    @property
    def key(self) -> str:
        """The name of its record in the cache."""
        described = {"version": VERSION, **asdict(self), "attention": asdict(VARIANTS[self.variant])}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:20]

    def __str__(self) -> str:
        return f"{self.task} lr {self.lr:g} {self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """All trainings of one model.

    Learning rates take turns: the first, third, ... are for tuning, the others are reported. Fresh seeds are for
    neither: nothing is decided by them.
    """

    task: Task
    setting: Setting
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    variants: tuple[str, ...] = tuple(VARIANTS)
    fresh_seeds: tuple[int, ...] = ()

    def recipes(self) -> list[Recipe]:
        """Return them all, the families of the first seed first."""
        return [
            Recipe(self.task, self.setting, lr, variant, seed)
            for seed, lr, variant in product((*self.seeds, *self.fresh_seeds), self.rates, self.variants)
        ]

    def part(self, recipe: Recipe) -> Part:
        """Return what a training is used for."""
        if recipe.seed in self.fresh_seeds:
            return "fresh"
        return "reported" if self.rates.index(recipe.lr) % 2 else "tuning"

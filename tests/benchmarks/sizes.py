"""What is measured at which size: in full for the page, and tiny to see that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 0


@dataclass(frozen=True)
class ModelSize:
    """A decoder-only transformer and its batches of random tokens."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, {self.context} tokens, batch {self.batch}, "
            f"vocabulary {self.vocabulary}"
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes of all tables.

    Attributes:
        rounds: How often every way has its turn.
        memory_rounds: The same where memory is measured, which varies less.
        model: The model that is trained.
        max_queries: How many rows the monitor samples where it does.
        dim: D of the attention that stands alone.
        lengths: T of the attention that stands alone, in ascending order.
        exact_length: Up to here all heads are compared with the float64 computation, beyond only one.
        short_length: Up to here everything is measured, and apart; beyond, where a look takes half a minute, time and
            memory in the same runs, without a warm-up and without the set of all statistics.
        growing_heads: Numbers of heads, at the first of `lengths`.
        growing_lengths: Values of T, with 4 heads.
        growing_layers: Numbers of layers.
        deep_model: Whose first observed step is measured, but for its width, its tokens and its batch.
        first_steps: Those: width, tokens and batch.
    """

    rounds: int
    memory_rounds: int
    model: ModelSize
    max_queries: int
    dim: int
    lengths: tuple[int, ...]
    exact_length: int
    short_length: int
    growing_heads: tuple[int, ...]
    growing_lengths: tuple[int, ...]
    growing_layers: tuple[int, ...]
    deep_model: ModelSize
    first_steps: tuple[tuple[int, int, int], ...]


FULL = Sizes(
    rounds=10,
    memory_rounds=3,
    model=ModelSize(layers=6, width=384, heads=6, context=512, batch=4, vocabulary=256),
    max_queries=64,
    dim=64,
    lengths=(512, 2048, 8192, 32768),
    exact_length=2048,
    short_length=8192,
    growing_heads=(2, 4, 8, 16),
    growing_lengths=(256, 512, 1024, 2048, 4096),
    growing_layers=(1, 2, 4, 8),
    deep_model=ModelSize(layers=12, width=0, heads=4, context=0, batch=0, vocabulary=256),
    first_steps=((64, 32, 4), (128, 64, 4), (256, 128, 4), (512, 256, 4)),
)
QUICK = Sizes(
    rounds=2,
    memory_rounds=1,
    model=ModelSize(layers=2, width=16, heads=2, context=12, batch=3, vocabulary=20),
    max_queries=5,
    dim=8,
    lengths=(8, 16, 24, 32),
    exact_length=16,
    short_length=24,
    growing_heads=(2, 4, 8, 16),
    growing_lengths=(4, 8, 16, 32, 64),
    growing_layers=(1, 2, 3, 4),
    deep_model=ModelSize(layers=2, width=0, heads=2, context=0, batch=0, vocabulary=20),
    first_steps=((8, 5, 2), (16, 7, 3)),
)

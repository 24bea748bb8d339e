"""What watching costs: the training step of a small GPT, watched in several ways, as a ratio to the unwatched step.

    python -m tests.benchmarks.step_ratio [--rounds 15]

All ways take turns within one training, one step each, in an order that rotates. Each step is divided by the unwatched
step of its round, so that whatever else slows the machine down for a while hits both.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F

from attn_monitor import AttentionMonitor, __version__
from attn_monitor.catalog import STATISTICS

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 6, 384, 6, 512, 4, 256
SEED = 0
WARMUP_ROUNDS = 2
NEVER = 10**9
CADENCE = 50  # Lightning's default `log_every_n_steps`
REPORT = Path(__file__).parents[2] / "docs" / "benchmarks.md"


class Core(nn.Module):
    """The attention itself, a module of its own so that the naive hook gets queries and keys for free."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = Core()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)
        heads = self.core(*(part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts))
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(pl.LightningModule):
    """A decoder-only transformer on random tokens: the cost of a step does not depend on what is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def training_step(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.tokens(tokens[:, :-1]) + self.positions.weight))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@dataclass
class RandomTokens:
    """So many batches of random tokens."""

    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(self.steps):
            yield torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)


class NaiveHook(pl.Callback):
    """What one writes by hand: a forward hook that materialises the logits, masked right, three numbers per head."""

    def __init__(self) -> None:
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.measured: dict[str, list[float]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, module in pl_module.named_modules():
            if isinstance(module, Core):
                self.handles.append(module.register_forward_hook(self._hook(name)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for logger in trainer.loggers:
            flat = {f"{tag}/{head}": value for tag, row in self.measured.items() for head, value in enumerate(row)}
            logger.log_metrics(flat, trainer.global_step)

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            query, key = inputs[:2]
            visible = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
            logits = query @ key.mT / query.shape[-1] ** 0.5
            allowed = logits[:, :, visible]
            probabilities = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            entropy = torch.special.entr(probabilities).sum(-1)
            self.measured[f"std/{name}"] = allowed.transpose(0, 1).flatten(1).std(1).tolist()
            self.measured[f"max/{name}"] = allowed.amax((0, 2)).tolist()
            self.measured[f"entropy/{name}"] = entropy.mean((0, 2)).tolist()

        return hook


class TakingTurns(pl.Callback):
    """Lets each callback live on its own steps, and times them from its first hook to its last.

    Args:
        ways: The callbacks by name, `None` for an unwatched step.
    """

    def __init__(self, ways: Mapping[str, pl.Callback | None]) -> None:
        self.ways = ways
        self.seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._started = 0.0

    def turn(self, step: int) -> str:
        """Return whose step it is."""
        rounds, place = divmod(step, len(self.ways))
        return list(self.ways)[(place + rounds) % len(self.ways)]

    def _all(self, hook: str, *arguments: Any) -> None:
        for callback in self.ways.values():
            if callback is not None:
                getattr(callback, hook)(*arguments)

    def _one(self, hook: str, trainer: pl.Trainer, *arguments: Any) -> None:
        callback = self.ways[self.turn(trainer.fit_loop.epoch_loop._batches_that_stepped)]
        if callback is not None:
            getattr(callback, hook)(trainer, *arguments)

    def setup(self, *arguments: Any, **keywords: Any) -> None:
        self._all("setup", *arguments, *keywords.values())

    def on_fit_start(self, *arguments: Any) -> None:
        self._all("on_fit_start", *arguments)

    def on_train_start(self, *arguments: Any) -> None:
        self._all("on_train_start", *arguments)

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._started = time.perf_counter()
        self._one("on_train_batch_start", trainer, *arguments)

    def on_before_backward(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._one("on_before_backward", trainer, *arguments)

    def on_after_backward(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._one("on_after_backward", trainer, *arguments)

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._one("on_train_batch_end", trainer, *arguments)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.seconds[self.turn(step)].append(time.perf_counter() - self._started)

    def on_train_end(self, *arguments: Any) -> None:
        self._all("on_train_end", *arguments)

    def teardown(self, *arguments: Any, **keywords: Any) -> None:
        self._all("teardown", *arguments, *keywords.values())


BASE = "unwatched"
CONTROL = "unwatched, a second time"
OBSERVED = "monitor, observed step"


def ways() -> dict[str, pl.Callback | None]:
    """Return the ways to watch a step."""
    return {
        BASE: None,
        CONTROL: None,
        "monitor, step not observed": AttentionMonitor(every_n_steps=NEVER),
        "monitor, observed step, gradients=False": AttentionMonitor(every_n_steps=1, gradients=False),
        OBSERVED: AttentionMonitor(every_n_steps=1),
        "monitor, observed step, all statistics": AttentionMonitor(every_n_steps=1, statistics=list(STATISTICS)),
        "hand-written hook that materialises the logits": NaiveHook(),
    }


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way's steps, one per round."""
    pl.seed_everything(SEED, verbose=False)
    turns = TakingTurns(ways())
    steps = (rounds + WARMUP_ROUNDS) * len(turns.ways)
    with tempfile.TemporaryDirectory() as logdir:
        pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            callbacks=[turns],
            logger=TensorBoardLogger(logdir),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_model_summary=False,
        ).fit(GPT(), RandomTokens(steps))
    return {name: seconds[WARMUP_ROUNDS:] for name, seconds in turns.seconds.items()}


def report(seconds: Mapping[str, list[float]]) -> str:
    """Return the page."""
    ratios = {
        name: [own / base for own, base in zip(taken, seconds[BASE], strict=True)] for name, taken in seconds.items()
    }
    middle = {name: statistics.median(values) for name, values in ratios.items()}
    amortised = 1 + (middle[OBSERVED] - 1) / CADENCE
    rows = []
    for name, values in ratios.items():
        quartiles = statistics.quantiles(values, n=4)
        spread = "-" if name == BASE else f"{quartiles[0]:.3f} to {quartiles[2]:.3f}"
        rows.append(f"| {name} | {middle[name]:.3f} | {spread} | {statistics.median(seconds[name]) * 1e3:.0f} |")
        if name == OBSERVED:
            rows.append(f"| the same on 1 step of {CADENCE}, the default (computed) | {amortised:.3f} | - | - |")
    table = "\n".join(rows)
    versions = f"attn_monitor {__version__}, torch {torch.__version__}, Lightning {version('pytorch-lightning')}"
    return f"""# Cost

The training step (forward, loss, backward, AdamW, logging to TensorBoard) of a GPT with {LAYERS} layers, width {WIDTH},
{HEADS} heads, {CONTEXT} tokens and batch {BATCH} in float32, watched in several ways, divided by the unwatched step.
One training, in which the ways take turns; medians over {len(seconds[BASE])} rounds, with the middle half beside them.
The second unwatched row shows how far noise alone goes. The computed row takes unobserved steps as free, since nothing
of the monitor is on the model then.

| step | ratio | middle half | median, ms |
|---|---|---|---|
{table}

{versions}, TensorBoard {version("tensorboard")}, Python {platform.python_version()}, {platform.machine()},
{torch.get_num_threads()} threads, seed {SEED}. Reproduce with `make bench`, which writes this page.
"""


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    page = report(measure(parser.parse_args().rounds))
    print(page)
    REPORT.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

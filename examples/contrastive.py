"""A contrastive loss with a learned temperature under `AttentionMonitor`: once running away, once kept in bounds.

    pip install '.[examples]'    # from a checkout
    python examples/contrastive.py                              # both runs, side by side
    python examples/contrastive.py --lr 3e-3 --limit 100        # one run of your own

As in CLIP, two encoders see two views of the same things, and a softmax over the batch must find which belong together.
Its logits are cosines times a temperature that is learned, and it has no sqrt(d_k) to be measured against: here the
yardstick is sqrt(2 ln n), where n logits condense onto a few. The data are scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # scikit-learn has no hints
from torch import Tensor, nn
from torch.nn import functional as F

from attn_monitor import AttentionMonitor, observe_logits

BATCH, WIDTH, FEATURES = 128, 128, 32
START = 5.0  # temperature, multiplying the cosines


def views(digits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return two views of each digit, [B, 8, 8]: each with a tenth of its pixels gone, and noise."""

    def view() -> Tensor:
        kept = torch.rand(digits.shape, generator=generator) > 0.1
        return digits * kept + 0.05 * torch.randn(digits.shape, generator=generator)

    return view(), view()


@dataclass
class Pairs:
    """Batches of two views of random digits, the same ones for every run."""

    steps: int
    seed: int

    def __post_init__(self) -> None:
        self.digits = torch.tensor(load_digits().images / 16, dtype=torch.float32)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            yield views(self.digits[torch.randperm(len(self.digits), generator=generator)[:BATCH]], generator)


class Contrastive(pl.LightningModule):
    """Two encoders, a learned temperature, and one line that shows the logits to the monitor."""

    def __init__(self, lr: float, limit: float) -> None:
        super().__init__()
        self.lr, self.limit = lr, math.log(limit)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(START)))
        self.left, self.right = (
            nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, FEATURES)) for _ in range(2)
        )
        self.losses: list[Tensor] = []
        self.hits: list[Tensor] = []
        self.temperatures: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = F.normalize(self.left(batch[0]), dim=-1), F.normalize(self.right(batch[1]), dim=-1)
        temperature = self.log_temperature.exp()
        logits = left @ right.T * temperature
        observe_logits("contrastive", logits)
        partner = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2
        self.log_dict({"train/loss": loss, "train/temperature": temperature})
        self.losses.append(loss.detach())
        self.hits.append((logits.argmax(-1) == partner).float().mean())
        self.temperatures.append(temperature.detach())
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.log_temperature.data.clamp_(max=self.limit)  # as CLIP does, with a limit of 100

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@dataclass
class Recipe:
    """What one run is made of."""

    name: str
    lr: float
    limit: float = math.inf


RUNAWAY = Recipe("runaway", lr=3e-2)
CLAMPED = Recipe("clamped", lr=3e-3, limit=8.0)


@dataclass
class Outcome:
    """What a finished run left behind."""

    recipe: Recipe
    model: Contrastive
    monitor: AttentionMonitor

    def curve(self, statistic: str) -> list[float]:
        """Return a statistic of the contrastive logits at every observed step."""
        return [float(getattr(layers["contrastive"], statistic)) for _, layers in self.monitor.history]

    def rows(self) -> dict[str, str]:
        """Return the column of the table that describes this run."""
        temperature, spread, events = self.model.temperatures[-1], self.curve("logit_row_std")[-1], self.monitor.events
        return {
            "learning rate, limit": f"{self.recipe.lr:g}, {self.recipe.limit:g}",
            "loss, last 20 steps": f"{torch.stack(self.model.losses[-20:]).mean():.3f}",
            "partners found, last 20 steps": f"{torch.stack(self.model.hits[-20:]).mean():.1%}",
            "temperature": f"{START:g} -> {temperature:.1f}",
            "logit_row_std": f"{spread:.2f}",
            "of which the cosines": f"{spread / temperature:.2f}",
            "largest critical_ratio (limit 1)": f"{max(self.curve('critical_ratio')):.2f}",
            "entropy_normalized": f"{self.curve('entropy_normalized')[-1]:.3f}",
            "jacobian_trace": f"{self.curve('jacobian_trace')[-1]:.3f}",
            "first event": f"step {events[0].step}" if events else "none",
        }


def train(recipe: Recipe, steps: int, seed: int, logdir: Path) -> Outcome:
    """Train one model. The rule has no head dimension here, and so compares with sqrt(2 ln n) by itself."""
    pl.seed_everything(seed, verbose=False)
    model, monitor = Contrastive(recipe.lr, recipe.limit), AttentionMonitor(every_n_steps=10)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[monitor],
        logger=TensorBoardLogger(logdir, name=recipe.name),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, Pairs(steps, seed))
    return Outcome(recipe, model, monitor)


def show(outcomes: list[Outcome], logdir: Path) -> None:
    """Print the runs side by side, and where to see more of them."""
    table = Table("", *(outcome.recipe.name for outcome in outcomes))
    columns = [outcome.rows() for outcome in outcomes]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console = Console()
    console.print("\nThe last observed step; the largest ratio is that of the whole run.", table)
    console.print(f"Logs, for tensorboard --logdir: {logdir}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Train, show, and return 0 if the runaway temperature was flagged and the clamped one was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, help=f"learning rate ({CLAMPED.lr:g})")
    parser.add_argument("--limit", type=float, help="largest temperature (no limit)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", type=Path, default=Path("runs/contrastive"))
    options = parser.parse_args(arguments)
    own = options.lr is not None or options.limit is not None
    recipes = [Recipe("own", options.lr or CLAMPED.lr, options.limit or math.inf)] if own else [RUNAWAY, CLAMPED]

    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.WARNING)  # no words about accelerators there are not
    outcomes = [train(recipe, options.steps, options.seed, options.logdir) for recipe in recipes]
    show(outcomes, options.logdir)
    if own:
        return 0
    runaway, clamped = outcomes
    return 0 if runaway.monitor.events and not clamped.monitor.events else 1


if __name__ == "__main__":
    sys.exit(main())

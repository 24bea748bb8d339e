"""A small character-level GPT under `AttentionMonitor`: once collapsing, once healthy.

    pip install '.[examples]'    # from a checkout
    python examples/char_gpt.py                        # both runs, side by side
    python examples/char_gpt.py --lr 1e-2 --qk-norm    # one run of your own

The text is the source code of Python's standard library, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from attn_monitor import AttentionMonitor, SaturationEvent, SaturationRule

VOCABULARY = 128  # ASCII
LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 128
BATCH, WARMUP = 16, 20


class CausalSelfAttention(nn.Module):
    """Multi-head attention with the two switches that decide whether it saturates: the scale and QK-norm."""

    def __init__(self, scale: float | None, qk_norm: bool) -> None:
        super().__init__()
        head_dim = WIDTH // HEADS
        self.scale = scale
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        query, key = self.q_norm(query), self.k_norm(key)
        # A fused kernel: the logits never exist as a tensor. `scale=None` means 1 / sqrt(d_k).
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, both pre-norm and residual."""

    def __init__(self, scale: float | None, qk_norm: bool) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention(scale, qk_norm)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CharGPT(pl.LightningModule):
    """The usual decoder-only transformer; nothing in it knows that it is watched."""

    def __init__(self, lr: float, scale: float | None = None, qk_norm: bool = False) -> None:
        super().__init__()
        self.lr = lr
        self.losses: list[Tensor] = []
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block(scale, qk_norm) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, following = batch
        loss = F.cross_entropy(self(text).flatten(0, 1), following.flatten())
        self.log("train/loss", loss, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def read_text(size: int = 2_000_000) -> Tensor:
    """Return the first `size` bytes of the standard library's sources as ASCII codes."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.tensor(list(text[:size])).clamp(max=VOCABULARY - 1)


@dataclass
class RandomWindows:
    """Batches of random pieces of the text, each with the same pieces one character further."""

    text: Tensor
    steps: int
    seed: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        window = torch.arange(CONTEXT + 1)
        for _ in range(self.steps):
            starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=generator)
            pieces = self.text[starts + window]
            yield pieces[:, :-1], pieces[:, 1:]


@dataclass
class Recipe:
    """What one run is made of."""

    name: str
    lr: float
    scale: float | None = None
    qk_norm: bool = False

    def __str__(self) -> str:
        scale = "1/sqrt(d_k)" if self.scale is None else f"{self.scale:g}"
        return f"lr {self.lr:g}, scale {scale}{', QK-norm' if self.qk_norm else ''}"


COLLAPSING = Recipe("collapsing", lr=1e-2, scale=1.0)
HEALTHY = Recipe("healthy", lr=3e-3, qk_norm=True)


@dataclass
class Outcome:
    """What a finished run left behind."""

    recipe: Recipe
    monitor: AttentionMonitor
    loss: float

    def heads(self, statistic: str) -> Tensor:
        """Return a statistic of every head at the last observed step."""
        _, layers = self.monitor.history[-1]
        return torch.cat([getattr(statistics, statistic) for statistics in layers.values()])

    def highest_ratio(self) -> float:
        """Return the largest logit_row_std / sqrt(d_k) of any head at any observed step."""
        rule = SaturationRule()
        return max(float(rule.ratio(layer).max()) for _, layers in self.monitor.history for layer in layers.values())

    def first_event(self) -> SaturationEvent | None:
        """Return the first event; of several at one step, that of the head that was worst then."""
        if not self.monitor.events:
            return None
        step = min(event.step for event in self.monitor.events)
        layers, rule = dict(self.monitor.history)[step], SaturationRule()
        return max(
            (event for event in self.monitor.events if event.step == step),
            key=lambda event: float(rule.ratio(layers[event.layer])[event.head].nan_to_num(torch.inf)),
        )

    def rows(self) -> dict[str, str]:
        """Return the column of the table that describes this run."""
        first = self.first_event()
        return {
            "recipe": str(self.recipe),
            "loss, last 20 steps": f"{self.loss:.3f}",
            "largest logit_row_std / sqrt(d_k)": f"{self.highest_ratio():.2f}",
            "lowest entropy_normalized": f"{self.heads('entropy_normalized').min():.4f}",
            "lowest jacobian_trace": f"{self.heads('jacobian_trace').min():.4f}",
            "lowest grad_logits_norm": f"{self.heads('grad_logits_norm').min():.1e}",
            "heads flagged": f"{len({(event.layer, event.head) for event in self.monitor.events})} of {LAYERS * HEADS}",
            "first event": f"step {first.step}, {first.layer} head {first.head}" if first else "none",
        }


def train(recipe: Recipe, text: Tensor, steps: int, seed: int, logdir: Path) -> Outcome:
    """Train one model. To the training, the monitor is one more callback."""
    print(f"\nTraining the {recipe.name} model: {recipe}", flush=True)
    pl.seed_everything(seed, verbose=False)
    model = CharGPT(recipe.lr, recipe.scale, recipe.qk_norm)
    monitor = AttentionMonitor(every_n_steps=10)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[monitor, TQDMProgressBar(refresh_rate=10)],
        logger=TensorBoardLogger(logdir, name=recipe.name),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, RandomWindows(text, steps, seed))
    return Outcome(recipe, monitor, float(torch.stack(model.losses[-20:]).mean()))


def show(outcomes: list[Outcome], logdir: Path) -> None:
    """Print the runs side by side, and how to see more of them."""
    table = Table("", *(outcome.recipe.name for outcome in outcomes))
    columns = [outcome.rows() for outcome in outcomes]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console = Console()
    console.print("\nWorst head of the last observed step; the largest ratio is that of the whole run.", table)
    programs = Path(sys.executable).parent
    console.print(
        f"Logs:           {logdir}\n"
        f"In TensorBoard: {programs / 'tensorboard'} --logdir {logdir}\n"
        f"In one page:    {programs / 'attn-monitor'} report {logdir}",
        soft_wrap=True,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, help="learning rate after warm-up (3e-3)")
    parser.add_argument("--scale", help="factor of the logits, or none for 1/sqrt(d_k), the default")
    parser.add_argument("--qk-norm", action="store_true", help="normalise queries and keys")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", type=Path, default=Path("runs/char_gpt"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, show, and return 0 if the collapsing run was flagged for its missing scale and the healthy one was not."""
    options = parse(arguments)
    own = options.lr is not None or options.scale is not None or options.qk_norm
    scale = None if options.scale in (None, "none") else float(options.scale)
    recipes = [Recipe("own", options.lr or HEALTHY.lr, scale, options.qk_norm)] if own else [COLLAPSING, HEALTHY]

    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.WARNING)  # no words about accelerators there are not
    text = read_text()
    outcomes = [train(recipe, text, options.steps, options.seed, options.logdir) for recipe in recipes]
    show(outcomes, options.logdir)
    if own:
        return 0
    collapsing, healthy = outcomes
    named = [event for event in collapsing.monitor.events if "the scale 1/sqrt(d_k) is missing" in event.cause]
    return 0 if named and len(named) == len(collapsing.monitor.events) and not healthy.monitor.events else 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # more would spend most of their time waiting for each other where cores are few or busy
    sys.exit(main())

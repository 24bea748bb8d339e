"""Why attention divides by sqrt(d_k), as an experiment: products, softmax, and trainings that choose differently.

    pip install '.[examples]'    # from a checkout
    python examples/why_sqrt_dk.py                          # all of it, tables and pictures
    python examples/why_sqrt_dk.py --lr 1e-3 --seeds 3      # where the choices hardly matter, and how much is chance

The text is the source code of Python's standard library, so nothing is downloaded. What the results mean is in
docs/why_sqrt_dk.md.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from attn_monitor import AttentionMonitor, AttentionWarning, SaturationRule
from attn_monitor.functional import attention_statistics, softmax_statistics

VOCABULARY, LAYERS, WIDTH, HEADS, CONTEXT = 128, 2, 128, 4, 64
HEAD_DIM = WIDTH // HEADS
BATCH, WARMUP, LAST = 8, 20, 20
DIMENSIONS = (1, 4, 16, 64, 256, 1024)
SPREADS = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)


def products(dimensions: Sequence[int] = DIMENSIONS, items: int = 256, rows: int = 64) -> dict[int, float]:
    """Return the variance of q . k by d_k, for independent entries of unit variance; the prediction is d_k."""
    variances = {}
    for dimension in dimensions:
        query, key = torch.randn(2, items, 1, rows, dimension)  # [B, H, Q, D]
        spread = attention_statistics(query, key, scale=1.0, statistics=["logit_std"]).logit_std
        assert spread is not None
        variances[dimension] = float(spread) ** 2
    return variances


CONCENTRATION = ("entropy_normalized", "max_probability", "jacobian_trace", "jacobian_norm")


def concentration(keys: int, spreads: Sequence[float] = SPREADS, rows: int = 500) -> dict[float, dict[str, float]]:
    """Return what softmax makes of independent Gaussian logits, by their standard deviation."""
    found = {}
    for spread in spreads:
        statistics = softmax_statistics(spread * torch.randn(rows, keys), statistics=CONCENTRATION)
        found[spread] = {name: float(getattr(statistics, name)) for name in CONCENTRATION}
    return found


def critical_std(keys: int) -> float:
    """Return the standard deviation at which softmax over so many Gaussian logits falls onto a few of them."""
    return math.sqrt(2 * math.log(keys))


@dataclass(frozen=True)
class Choice:
    """How one model makes its logits: scale / sqrt(d_k) * q . k, and what else people do."""

    name: str
    scale: float = 1.0
    learned: int = 0  # how many learned factors multiply the scale: one a layer, or one a head
    norm: str = ""  # of queries and keys: "layer" for LayerNorm, "unit" for cosine similarity
    softcap: float = math.inf
    softmax: torch.dtype = torch.float32


ROOT = math.sqrt(HEAD_DIM)
CHOICES = (
    Choice("1/sqrt(d_k)"),
    Choice("no scale", ROOT),
    Choice("1/d_k", 1 / ROOT),
    Choice("0.8/sqrt(d_k)", 0.8),
    Choice("1.2/sqrt(d_k)", 1.2),
    Choice("alpha/sqrt(d_k), learned", learned=1),
    Choice("alpha a head, learned", learned=HEADS),
    Choice("QK-norm", norm="layer"),
    Choice("cosine, learned temperature", ROOT**2, learned=1, norm="unit"),
    Choice("softcap 30", softcap=30.0),
    Choice("no scale, softcap 30", ROOT, softcap=30.0),
    Choice("softmax in fp16", softmax=torch.float16),
    Choice("softmax in bf16", softmax=torch.bfloat16),
    Choice("no scale, softmax in bf16", ROOT, softmax=torch.bfloat16),
)


class Attention(nn.Module):
    """Causal attention, written out so that every choice is one line."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.LayerNorm(HEAD_DIM) for _ in range(2))
        self.factor = nn.Parameter(torch.ones(choice.learned, 1, 1)) if choice.learned else 1.0

    def forward(self, x: Tensor) -> Tensor:
        choice = self.choice
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if choice.norm == "layer":
            query, key = self.q_norm(query), self.k_norm(key)
        elif choice.norm == "unit":
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        logits = query @ key.mT * (choice.scale / ROOT) * self.factor
        if choice.softcap < math.inf:
            logits = choice.softcap * torch.tanh(logits / choice.softcap)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        probabilities = logits.to(choice.softmax).masked_fill(future, -math.inf).softmax(-1)
        return self.out((probabilities.to(value.dtype) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, both pre-norm and residual."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(choice)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CharGPT(pl.LightningModule):
    """A small character model; nothing in it knows that it is watched."""

    def __init__(self, choice: Choice, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.losses: list[Tensor] = []
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Block(choice) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def training_step(self, text: Tensor) -> Tensor:
        logits = self.head(self.layers(self.tokens(text[:, :-1]) + self.positions.weight))
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("train/loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


@cache
def read_text(size: int = 2_000_000) -> Tensor:
    """Return the first `size` bytes of the standard library's sources as ASCII codes."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in sources)[:size])).clamp(max=VOCABULARY - 1)


@dataclass
class RandomWindows:
    """Batches of random pieces of the text: the same ones for every choice."""

    steps: int
    seed: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        text, generator = read_text(), torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
            yield text[starts + torch.arange(CONTEXT + 1)]


@dataclass
class Run:
    """What one training left behind."""

    choice: Choice
    losses: Tensor
    factors: list[float]
    monitor: AttentionMonitor

    @property
    def loss(self) -> float:
        """The mean loss of the last steps."""
        return float(self.losses[-LAST:].mean())

    def lowest(self, statistic: str) -> float:
        """Return the lowest value of any head at the last observed step."""
        _, layers = self.monitor.history[-1]
        return min(float(getattr(statistics, statistic).min()) for statistics in layers.values())

    def largest_ratio(self) -> float:
        """Return the largest logit_row_std / sqrt(d_k) of any head at any observed step."""
        rule = SaturationRule()
        return max(float(rule.ratio(layer).max()) for _, layers in self.monitor.history for layer in layers.values())

    def flagged(self) -> int:
        """Return how many heads had an event."""
        return len({(event.layer, event.head) for event in self.monitor.events})


def train(choice: Choice, lr: float, steps: int, seed: int, out: Path) -> Run:
    """Train one model from the same weights on the same text as all others."""
    pl.seed_everything(seed, verbose=False)
    model = CharGPT(choice, lr)
    monitor = AttentionMonitor(every_n_steps=max(1, steps // 20), adaptive_steps=0)  # the same steps for all
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[monitor],
        logger=TensorBoardLogger(out, name=re.sub(r"[^\w.]+", "-", choice.name).strip("-"), version=f"seed{seed}"),
        log_every_n_steps=min(10, steps),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)  # the table says it
        warnings.simplefilter("ignore", FutureWarning)  # Lightning 2.6 on torch >= 2.12
        trainer.fit(model, RandomWindows(steps, seed))
    learned = [tensor.flatten() for name, tensor in model.named_parameters() if name.endswith("factor")]
    factors = torch.cat(learned).tolist() if learned else []
    return Run(choice, torch.stack(model.losses), factors, monitor)


def row(runs: Sequence[Run]) -> list[object]:
    """Return the row of one choice: the mean loss of its seeds and half their range, and the worst of the rest."""
    losses = [run.loss for run in runs]
    loss = f"{sum(losses) / len(losses):.3f}"
    first = min((run.monitor.events[0].step for run in runs if run.monitor.events), default=None)
    return [
        runs[0].choice.name,
        f"{loss} ± {(max(losses) - min(losses)) / 2:.3f}" if len(runs) > 1 else loss,
        f"{max(run.largest_ratio() for run in runs):.2f}",
        f"{min(run.lowest('entropy_normalized') for run in runs):.3f}",
        f"{min(run.lowest('jacobian_trace') for run in runs):.3f}",
        ", ".join(str(run.flagged()) for run in runs),
        "none" if first is None else f"step {first}",
    ]


def show(title: str, header: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as Markdown has it."""
    cells = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for line in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def draw_theory(variances: dict[int, float], softmaxes: dict[int, dict[float, dict[str, float]]], out: Path) -> None:
    """Draw what is measured without training, and what is predicted."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    product, *panels = figure.subplots(1, 4)
    product.loglog(variances.keys(), variances.keys(), "k--", label="predicted: d_k")
    product.loglog(variances.keys(), variances.values(), "o", label="measured")
    product.set(xlabel="d_k", title="variance of q . k")
    for panel, name in zip(panels, ("entropy_normalized", "jacobian_trace", "jacobian_norm"), strict=True):
        for color, (keys, found) in zip(("C0", "C1"), softmaxes.items(), strict=False):
            values = [statistics[name] for statistics in found.values()]
            panel.semilogx(found.keys(), values, "o-", color=color, label=f"{keys} keys")
            panel.axvline(critical_std(keys), color=color, linestyle=":", label=f"sqrt(2 ln {keys})")
        panel.set(xlabel="standard deviation of the logits", title=name)
    for axes in (product, panels[0]):
        axes.legend()
    figure.savefig(out / "softmax.png", dpi=90)


def draw_trainings(runs: Sequence[Run], out: Path) -> None:
    """Draw a dot for every training: how it ended, and how its worst head was."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    drawn = {
        f"loss, last {LAST} steps": [run.loss for run in runs],
        "largest logit_row_std / sqrt(d_k)": [run.largest_ratio() for run in runs],
        "jacobian_trace, worst head at the end": [run.lowest("jacobian_trace") for run in runs],
    }
    for axes, (title, values) in zip(panels, drawn.items(), strict=True):
        axes.plot(values, [run.choice.name for run in runs], "o")
        axes.set(title=title)
        axes.grid(alpha=0.3)
    panels[0].invert_yaxis()
    panels[1].set(xscale="log")
    panels[1].axvline(SaturationRule().default_limit, color="C3", linestyle=":")
    figure.savefig(out / "trainings.png", dpi=90)


def main(arguments: list[str] | None = None) -> int:
    """Measure, train, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate after warm-up (1e-2: scales matter)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1, help="how many trainings of each choice")
    parser.add_argument("--quick", action="store_true", help="6 steps: only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/why_sqrt_dk"), help="for pictures and TensorBoard logs")
    options = parser.parse_args(arguments)
    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.WARNING)  # no words about accelerators there are not
    options.out.mkdir(parents=True, exist_ok=True)

    pl.seed_everything(0, verbose=False)
    variances, softmaxes = products(), {keys: concentration(keys) for keys in (64, 1024)}
    rows = [[dimension, f"{variance:.2f}", dimension] for dimension, variance in variances.items()]
    show("Variance of q . k", ["d_k", "measured", "predicted"], rows)
    for keys, found in softmaxes.items():
        rows = [[spread, *(f"{value:.3f}" for value in values.values())] for spread, values in found.items()]
        title = f"Softmax over {keys} Gaussian logits; the critical standard deviation is {critical_std(keys):.2f}"
        show(title, ["logit std", *CONCENTRATION], rows)
    draw_theory(variances, softmaxes, options.out)

    steps, runs = 6 if options.quick else options.steps, []
    for choice in CHOICES:
        runs += [train(choice, options.lr, steps, seed, options.out) for seed in range(options.seeds)]
        print(f"trained: {choice.name}", file=sys.stderr, flush=True)
    header = f"choice|loss, last {LAST}|largest ratio|lowest entropy|lowest trace|flagged|first event".split("|")
    title = f"Trainings of {LAYERS * HEADS} heads: lr {options.lr:g}, {steps} steps, seeds 0 to {options.seeds - 1}"
    groups = [runs[start : start + options.seeds] for start in range(0, len(runs), options.seeds)]
    show(title, header, [row(group) for group in groups])
    print("\nThe first event of each choice:")
    for run in (group[0] for group in groups):
        learned = f" (learned factors: {min(run.factors):.2f} to {max(run.factors):.2f})" if run.factors else ""
        print(f"  {run.choice.name}{learned}: {run.monitor.events[0] if run.monitor.events else 'none'}")
    draw_trainings(runs, options.out)
    print(f"\nPictures and logs: {options.out}, for tensorboard --logdir")
    return 0


if __name__ == "__main__":
    sys.exit(main())

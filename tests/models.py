"""What several tests share: records made by hand, tiny models that train under Lightning, and independent formulas."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor
from attn_monitor.events import AttentionWarning
from attn_monitor.records import AttentionStatistics

BATCH, QUERIES, DIM, HEADS = 3, 5, 12, 2

LIGHTNING_ADVICE = [
    # Advice about speed and settings that tiny models on the CPU can't follow, of both packages.
    pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning 2.6 walks batches with a check that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # Every trainer of these tests without a logger: the monitor says so once a fit.
    pytest.mark.filterwarnings("ignore:the trainer has no logger"),
]
"""For `pytestmark`: what third parties warn of when the tests run under `-W error`."""
Kind = Literal["hand", "sdpa", "mha"]


def make_record(
    heads: int = 2, *, head_dim: int | None = 64, nonfinite: Sequence[int] | None = None, **values: Sequence[float]
) -> AttentionStatistics:
    """Return a record that holds just the given per-head values."""
    tensors: dict[str, Any] = {name: torch.tensor(value) for name, value in values.items()}
    return AttentionStatistics(
        **tensors,
        rows=torch.full((heads,), 14),
        masked_rows=torch.zeros(heads, dtype=torch.long),
        nonfinite=torch.tensor(nonfinite if nonfinite is not None else [0] * heads),
        head_dim=head_dim,
        keys=7,
        calls=1,
    )


def split_heads(qkv: Tensor, heads: int = HEADS) -> tuple[Tensor, ...]:
    """[B, Q, 3 H D] to three of [B, H, Q, D]."""
    return tuple(part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))


class HandWritten(nn.Module):
    """Attention in plain products and softmax. Keeps its logits, with their gradient, when asked to."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.dropout = nn.Dropout(dropout)
        self.kept: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x))
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.kept is not None:
            logits.retain_grad()
            self.kept.append(logits)
        return (self.dropout(logits.softmax(-1)) @ v).transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """Attention by `F.scaled_dot_product_attention`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x))
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)


class SelfAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of one argument."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(DIM, HEADS, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # one argument instead of three
        return super().forward(x, x, x, need_weights=False)[0]


KINDS: dict[Kind, type[nn.Module]] = {"hand": HandWritten, "sdpa": Fused, "mha": SelfAttention}


class Net(nn.Module):
    """Residual attention blocks and a linear head."""

    def __init__(self, kinds: Sequence[Kind] = ("hand",), dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KINDS[kind](dropout) for kind in kinds])
        self.head = nn.Linear(DIM, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        out: Tensor = self.head(x)
        return out


class Lit(pl.LightningModule):
    """Trains a `Net` to put out zeros."""

    def __init__(self, *kinds: Kind, dropout: float = 0.0, reentrant: bool | None = None, gain: float = 1.0) -> None:
        super().__init__()
        self.net: Any = Net(kinds or ("hand",), dropout, reentrant)
        self.losses: list[Tensor] = []
        with torch.no_grad():
            blocks: Any = self.net.blocks
            for block in blocks:
                weight: Tensor = block.in_proj_weight if isinstance(block, nn.MultiheadAttention) else block.qkv.weight
                weight[: 2 * DIM] *= gain

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self.net(batch[0]) ** 2).mean()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int, seed: int = 7) -> list[Tensor]:
    """Return the same random batches every time."""
    return list(torch.randn(count, BATCH, QUERIES, DIM, generator=torch.Generator().manual_seed(seed)))


def loader(count: int, seed: int = 7) -> DataLoader[Any]:
    """Return a loader of `batches`."""
    return DataLoader(TensorDataset(torch.cat(batches(count, seed))), batch_size=BATCH)


@cache
def _root() -> str:
    """Return a folder for what is written without a logger, which is gone after the tests."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def quiet(package: Any = pl, **settings: Any) -> Any:
    """Return a silent trainer on the CPU; nothing is written unless asked for."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "default_root_dir": _root(),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return package.Trainer(**{**defaults, **settings})


def fit(model: pl.LightningModule, monitor: AttentionMonitor, count: int, **settings: Any) -> tuple[Any, list[str]]:
    """Train and return the trainer and the monitor's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet(callbacks=[monitor, *settings.pop("callbacks", [])], **settings)
        trainer.fit(model, loader(count))
    return trainer, [str(warning.message) for warning in caught if issubclass(warning.category, AttentionWarning)]


def read_events(folder: str | Path) -> EventAccumulator:
    """Read a TensorBoard run back, all of it."""
    everything = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def by_hand(logits: Tensor, gradient: Tensor | None = None) -> dict[str, Tensor]:
    """Return headline statistics per head of unmasked logits [B, H, Q, K], straight from their definitions."""
    logits = logits.detach().double()
    p = logits.softmax(-1)
    keys = logits.shape[-1]

    def rows(values: Tensor) -> Tensor:
        return values.mean((0, 2))

    found = {
        "logit_std": logits.transpose(0, 1).flatten(1).std(-1, correction=0),
        "logit_row_std": rows(logits.var(-1, correction=0)).sqrt(),
        "logit_max": logits.amax((0, 2, 3)),
        "entropy_normalized": rows(-(p * p.log()).sum(-1) / math.log(keys)),
        "jacobian_trace": rows((1 - (p**2).sum(-1)) / (1 - 1 / keys)),
    }
    if gradient is not None:
        found["grad_logits_norm"] = gradient.detach().double().pow(2).sum((0, 2, 3)).sqrt()
    return found

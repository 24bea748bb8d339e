"""A small vision transformer on scikit-learn's handwritten digits, with Lightning: the monitor is one callback.

    pip install '.[examples]'    # from a checkout
    python examples/vit_digits.py

Validation is observed too: its statistics are logged as `val_attn_...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import TensorBoardLogger
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # scikit-learn has no hints
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionMonitor

PATCH, WIDTH, HEADS, LAYERS = 2, 32, 4, 2
EPOCHS, BATCH, TRAINED = 8, 32, 1400


class VisionTransformer(pl.LightningModule):
    """16 patches of 2 x 2 pixels, a class token, and torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH**2, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (8 // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), self.patches(patches)], dim=1)
        return self.head(self.encoder(x + self.positions)[:, 0])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val/accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> int:
    """Train, and check that it learned and that its attention stayed alive."""
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    images = (images - images.mean()) / images.std()
    train = DataLoader(TensorDataset(images[:TRAINED], labels[:TRAINED]), BATCH, shuffle=True)
    held_out = DataLoader(TensorDataset(images[TRAINED:], labels[TRAINED:]), BATCH)

    monitor = AttentionMonitor(stages=("train", "validate"))
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[monitor],
        logger=TensorBoardLogger(Path("runs/vit_digits"), name=None),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(VisionTransformer(), train, held_out)

    step, layers = monitor.history[-1]
    for name, statistics in layers.items():
        print(f"step {step}, {name}: entropy_normalized by head {statistics.entropy_normalized}")
    accuracy = float(trainer.callback_metrics["val/accuracy"])
    widest = float(trainer.callback_metrics["attn_monitor/saturation_ratio_max"])
    print(f"accuracy {accuracy:.3f}, largest logit_row_std / sqrt(d_k) {widest:.2f}, {len(monitor.events)} events")
    assert len(layers) == len(monitor.evaluations["validate"]) == LAYERS
    assert accuracy > 0.85
    assert not any(event.severity == "critical" for event in monitor.events)
    return 0


if __name__ == "__main__":
    sys.exit(main())

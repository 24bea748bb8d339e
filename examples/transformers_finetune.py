"""A model of transformers in a plain LightningModule, watched without a change to it.

    pip install transformers
    python examples/transformers_finetune.py

The weights are random, from a config, so nothing is downloaded. The task is to tell whether token 0 is in a sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from attn_monitor import AttentionMonitor

TOKENS, LENGTH, SEQUENCES, BATCH, EPOCHS = 16, 11, 2048, 64, 3


def sequences(count: int) -> TensorDataset:
    """Return random sequences [count, LENGTH], and whether token 0 is in each."""
    tokens = torch.randint(TOKENS, (count, LENGTH))
    return TensorDataset(tokens, (tokens == 0).any(-1).long())


class Classifier(pl.LightningModule):
    """The usual way to train a model of transformers with Lightning."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=TOKENS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self.bert(batch[0], labels=batch[1]).loss
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        guess = self.bert(batch[0]).logits.argmax(-1)
        self.log("val/accuracy", (guess == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> int:
    """Train, and check that it learned and that every layer was seen."""
    pl.seed_everything(0, verbose=False)
    monitor = AttentionMonitor()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[monitor],
        logger=TensorBoardLogger(Path("runs/transformers_finetune"), name=None),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    train, held_out = DataLoader(sequences(SEQUENCES), BATCH, shuffle=True), DataLoader(sequences(512), BATCH)
    trainer.fit(Classifier(), train, held_out)

    step, layers = monitor.history[-1]
    for name, statistics in layers.items():
        print(f"step {step}, {name}: entropy_normalized by head {statistics.entropy_normalized}")
    accuracy = float(trainer.callback_metrics["val/accuracy"])
    print(f"accuracy {accuracy:.3f}, {len(monitor.events)} events")
    assert len(layers) == 2
    assert accuracy > 0.9
    return 0


if __name__ == "__main__":
    sys.exit(main())

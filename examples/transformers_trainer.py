"""A model of transformers fine-tuned by transformers' own Trainer, with the monitor as one more callback.

    pip install transformers accelerate
    python examples/transformers_trainer.py

The weights are random, from a config, so nothing is downloaded. The task is to tell whether token 0 is in a sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from attn_monitor.integrations.transformers import AttentionMonitorCallback

TOKENS, LENGTH, SEQUENCES, BATCH, EPOCHS = 16, 11, 2048, 64, 3


class Sequences(Dataset[dict[str, Tensor]]):
    """Random sequences, and whether token 0 is in each."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(TOKENS, (count, LENGTH))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": (self.tokens[index] == 0).any().long()}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of right answers."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> int:
    """Train, and check that it learned and that every layer was seen."""
    set_seed(0)
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
    monitor = AttentionMonitorCallback()
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            output_dir=str(Path("runs/transformers_trainer")),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            report_to=["tensorboard"],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Sequences(SEQUENCES),
        eval_dataset=Sequences(512),
        compute_metrics=accuracy,
        callbacks=[monitor],
    )
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]

    step, layers = monitor.history[-1]
    for name, statistics in layers.items():
        print(f"step {step}, {name}: entropy_normalized by head {statistics.entropy_normalized}")
    print(f"accuracy {found:.3f}, {len(monitor.events)} events")
    assert len(layers) == 2
    assert found > 0.9
    return 0


if __name__ == "__main__":
    sys.exit(main())

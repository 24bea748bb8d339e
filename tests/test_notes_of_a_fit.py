"""What is said once about a model is kept with its run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from tests.models import DIM, LIGHTNING_ADVICE, Lit, fit, split_heads

pytestmark = LIGHTNING_ADVICE


class Unscaled(nn.Module):
    """Attention without 1/sqrt(d_k)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x))
        return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)


def test_the_scale_audit_is_kept_with_the_run(tmp_path: Path) -> None:
    model, logger = Lit("hand"), TensorBoardLogger(tmp_path)
    model.net.blocks[0] = Unscaled()
    _, said = fit(model, AttentionMonitor(), 2, logger=logger)
    [line] = (Path(logger.log_dir) / "attn_monitor_notes.jsonl").read_text().splitlines()
    note = json.loads(line)
    assert note["step"] == 0
    assert note["note"].startswith("scale audit: ")
    assert note["note"] in said

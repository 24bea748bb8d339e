"""A Lightning Fabric loop with gradient accumulation, observed on every tenth step.

    python examples/fabric_loop.py

It needs nothing but the package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionProbe, AttentionStatistics, SaturationRule

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 11, 8
STEPS, EVERY, MICRO_BATCHES = 30, 10, 2


def observed(
    fabric: Fabric, model: nn.Module, data: DataLoader[tuple[Tensor, ...]], micro_batches: int = MICRO_BATCHES
) -> list[Mapping[str, AttentionStatistics]]:
    """Train, and return what was measured on each observed step, by layer."""
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches, rule, records = iter(fabric.setup_dataloaders(data)), SaturationRule(), []
    # A GradScaler, which only "16-mixed" has, multiplies the loss: gradients are divided by what it holds.
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    for step in range(STEPS):
        probe = AttentionProbe(model, grad_scale=scaler.get_scale if scaler else 1.0) if step % EVERY == 0 else None
        with probe or nullcontext():
            for _ in range(micro_batches):
                [x] = next(batches)
                # Fabric leaves it to the loop to divide. The norms are then the whole batch's: `compute` needs nothing.
                fabric.backward((model(x) - x.flip(1)).square().mean() / micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            records.append(probe.compute())
            for name, statistics in records[-1].items():
                ratio, norm = rule.ratio(statistics).max(), statistics.grad_logits_norm
                print(f"step {step}: {name}, largest logit_row_std / sqrt(d_k) {ratio:.3f}, grad_logits_norm {norm}")
    return records


def main() -> int:
    """Train on the CPU, and check that every observed step was seen, with healthy heads."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    data = TensorDataset(torch.randn(STEPS * MICRO_BATCHES * BATCH, LENGTH, WIDTH))
    records = observed(fabric, model, DataLoader(data, BATCH))
    assert len(records) == STEPS // EVERY
    ratios = [SaturationRule().ratio(statistics).max() for layers in records for statistics in layers.values()]
    assert len(ratios) == len(records)
    assert max(ratios) < 0.5, "a head is saturated"
    return 0


if __name__ == "__main__":
    sys.exit(main())

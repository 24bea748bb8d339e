"""A Lightning Fabric loop with gradient accumulation, observed on every tenth step.

python examples/fabric_loop.py
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionProbe, SaturationRule

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 11, 8
STEPS, EVERY, MICRO_BATCHES = 30, 10, 2


def observed(fabric: Fabric, model: nn.Module, data: DataLoader[tuple[Tensor, ...]]) -> list[float]:
    """Train, and return the largest logit_row_std / sqrt(d_k) of each observed step."""
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches, rule, ratios = iter(fabric.setup_dataloaders(data)), SaturationRule(), []
    for step in range(STEPS):
        # The loss is divided by the number of micro-batches, so the gradients are: `grad_scale` undoes it.
        probe = AttentionProbe(model, grad_scale=1 / MICRO_BATCHES) if step % EVERY == 0 else None
        with probe or nullcontext():
            for _ in range(MICRO_BATCHES):
                [x] = next(batches)
                fabric.backward((model(x) - x.flip(1)).square().mean() / MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            layers = probe.compute()
            ratios.append(max(float(rule.ratio(statistics).max()) for statistics in layers.values()))
            print(f"step {step}: {list(layers)}, largest logit_row_std / sqrt(d_k) {ratios[-1]:.3f}")
    return ratios


def main() -> int:
    """Train on the CPU, and check that every observed step was seen, with healthy heads."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    data = TensorDataset(torch.randn(STEPS * MICRO_BATCHES * BATCH, LENGTH, WIDTH))
    ratios = observed(fabric, model, DataLoader(data, BATCH))
    assert len(ratios) == STEPS // EVERY
    assert max(ratios) < 0.5, "a head is saturated"
    return 0


if __name__ == "__main__":
    sys.exit(main())

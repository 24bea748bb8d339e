"""A loop of Hugging Face's accelerate with gradient accumulation, observed on every tenth step.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]  # ships no marker for its hints
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionProbe, SaturationRule

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 11, 8
STEPS, EVERY, MICRO_BATCHES = 30, 10, 2


def observed(accelerator: Accelerator, model: nn.Module, data: DataLoader[tuple[Tensor, ...]]) -> list[float]:
    """Train, and return the largest logit_row_std / sqrt(d_k) of each observed step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    batches, rule, ratios = iter(data), SaturationRule(), []
    for step in range(STEPS):
        # `backward` divides the loss by the number of micro-batches, so the gradients are: `grad_scale` undoes it.
        probe = AttentionProbe(model, grad_scale=1 / MICRO_BATCHES) if step % EVERY == 0 else None
        with probe or nullcontext():
            for _ in range(MICRO_BATCHES):
                with accelerator.accumulate(model):
                    [x] = next(batches)
                    accelerator.backward((model(x) - x.flip(1)).square().mean())
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
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES)
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    data = TensorDataset(torch.randn(STEPS * MICRO_BATCHES * BATCH, LENGTH, WIDTH))
    ratios = observed(accelerator, model, DataLoader(data, BATCH))
    assert len(ratios) == STEPS // EVERY
    assert max(ratios) < 0.5, "a head is saturated"
    return 0


if __name__ == "__main__":
    sys.exit(main())

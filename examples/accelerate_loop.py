"""A loop of Hugging Face's accelerate with gradient accumulation, observed on every tenth step.

pip install accelerate
python examples/accelerate_loop.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]  # ships no marker for its hints
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from attn_monitor import AttentionProbe, AttentionStatistics, SaturationRule

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 11, 8
STEPS, EVERY, MICRO_BATCHES = 30, 10, 2


def observed(
    accelerator: Accelerator, model: nn.Module, data: DataLoader[tuple[Tensor, ...]]
) -> list[Mapping[str, AttentionStatistics]]:
    """Train, and return what was measured on each observed step, by layer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    batches, rule, records = iter(data), SaturationRule(), []
    # A GradScaler, which only "fp16" has, multiplies the loss: gradients are divided by what it holds.
    scaler = accelerator.scaler
    for step in range(STEPS):
        probe = AttentionProbe(model, grad_scale=scaler.get_scale if scaler else 1.0) if step % EVERY == 0 else None
        with probe or nullcontext():
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(model):
                    [x] = next(batches)
                    # This divides the loss by their number. The norms are then the whole batch's, and `compute` needs
                    # nothing.
                    accelerator.backward((model(x) - x.flip(1)).square().mean())
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
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES)
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    data = TensorDataset(torch.randn(STEPS * MICRO_BATCHES * BATCH, LENGTH, WIDTH))
    records = observed(accelerator, model, DataLoader(data, BATCH))
    assert len(records) == STEPS // EVERY
    ratios = [SaturationRule().ratio(statistics).max() for layers in records for statistics in layers.values()]
    assert len(ratios) == len(records)
    assert max(ratios) < 0.5, "a head is saturated"
    return 0


if __name__ == "__main__":
    sys.exit(main())

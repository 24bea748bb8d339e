"""A plain torch loop: a probe on every tenth step, the rule, and TensorBoard by hand.

    python examples/plain_loop.py

The task needs attention: the answer, given at the end of a sequence, is the token at its third place.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionProbe, SaturationRule

TOKENS, LENGTH, WIDTH, HEADS, LAYERS = 16, 12, 64, 4, 2
STEPS, BATCH, EVERY = 60, 64, 10


class Model(nn.Module):
    """A transformer that reads a sequence and names one token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(tokens) + self.positions.weight)[:, -1])


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random sequences [B, LENGTH], and the third token of each."""
    tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator)
    return tokens, tokens[:, 2]


def main() -> int:
    """Train, log, and check that it learned with healthy heads."""
    torch.manual_seed(0)
    model, generator, rule = Model(), torch.Generator().manual_seed(1), SaturationRule()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ratios, losses = [], []
    with SummaryWriter("runs/plain_loop") as writer:
        for step in range(STEPS):
            tokens, target = batch(generator)
            # Between the observed steps nothing of the probe is on the model.
            with AttentionProbe(model) if step % EVERY == 0 else nullcontext() as probe:
                loss = F.cross_entropy(model(tokens), target)
                loss.backward()  # inside, so that gradients at the softmax are measured too
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if probe is None:
                continue
            layers = probe.compute()
            for name, statistics in layers.items():
                for statistic, per_head in statistics.measured().items():
                    writer.add_scalar(f"attn_{statistic}/{name}", per_head.mean(), step)
            ratios.append(max(float(rule.ratio(statistics).max()) for statistics in layers.values()))
            print(f"step {step:3}: loss {losses[-1]:.3f}, largest logit_row_std / sqrt(d_k) {ratios[-1]:.3f}")

    assert len(ratios) == STEPS // EVERY
    assert max(ratios) < 0.5, "a head is saturated"
    assert losses[-1] < losses[0] / 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

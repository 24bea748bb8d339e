"""A compiled model: observed steps run eagerly, and nothing is compiled again for them.

    python examples/compiled.py
    python examples/compiled.py --backend aot_eager

Inductor needs a C++ compiler; without one the program takes a backend that generates no code.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from attn_monitor import AttentionProbe

WIDTH, HEADS, BATCH, LENGTH, STEPS, EVERY = 64, 4, 8, 32, 30, 10


class Block(nn.Module):
    """Attention by the fused kernel, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def has_compiler() -> bool:
    """Tell whether inductor can generate code here."""
    return torch.cuda.is_available() or any(map(shutil.which, ("c++", "g++", "clang++")))


def main(arguments: list[str] | None = None) -> int:
    """Train compiled, observe some steps, and check that they compiled nothing and agree with the eager model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="of torch.compile (inductor where there is a compiler, else aot_eager)")
    backend = parser.parse_args(arguments).backend or ("inductor" if has_compiler() else "aot_eager")

    torch.manual_seed(0)
    model, counter = nn.Sequential(Block(), Block()), CompileCounterWithBackend(backend)
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(STEPS, BATCH, LENGTH, WIDTH)
    graphs: list[int] = []
    for step, x in enumerate(data):
        # The probe may be given the model or its compiled form.
        with AttentionProbe(model) if step % EVERY == EVERY - 1 else nullcontext() as probe:
            loss = (compiled(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counter.frame_count)
        if probe is not None:
            layers = probe.compute()
            spreads = {name: statistics.logit_row_std for name, statistics in layers.items()}
            print(f"step {step}, {backend}: loss {loss.item():.4f}, {graphs[-1]} graphs, logit_row_std {spreads}")
            assert list(layers) == ["0", "1"]
            assert all(statistics.grad_logits_norm is not None for statistics in layers.values())

    print(f"{graphs[0]} graphs after the first step, {graphs[-1]} after the last")
    assert graphs[0] == graphs[-1] > 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

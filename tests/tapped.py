"""Attention whose gradients are known, with activations kept or thrown away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_monitor import AttentionProbe, AttentionStatistics

B, H, T, D = 5, 3, 7, 11
E = H * D
ALLOWED = torch.ones(T, T, dtype=torch.bool).tril()

Path = Literal["fused", "softmax"]


class Attention(nn.Module):
    """Causal attention, with or without an output projection behind it."""

    def __init__(self, path: Path, project: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E) if project else nn.Identity()
        self.path = path
        self.dropout = dropout
        self.kept: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.path == "fused":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            logits = (q @ k.mT / math.sqrt(D)).masked_fill(~ALLOWED, -1e4)
            probs = F.softmax(logits, dim=-1)
            if self.kept is not None:
                logits.retain_grad()
                probs.retain_grad()
                self.kept.append((logits, probs))
            out = F.dropout(probs, self.dropout) @ v
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result


class Net(nn.Module):
    """Four residual attentions, of one shared module or several, in checkpointed regions of one or two."""

    def __init__(self, path: Path, *, shared: bool = False, paired: bool = False, project: bool = True) -> None:
        super().__init__()
        blocks = [Attention(path, project) for _ in range(1 if shared else 4)]
        self.blocks = nn.ModuleList(blocks)
        self.shared, self.paired = shared, paired
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        blocks = [self.blocks[0]] * 4 if self.shared else list(self.blocks)
        regions = [blocks[:2], blocks[2:]] if self.paired else [[block] for block in blocks]
        for region in regions:
            run = nn.Sequential(*region)
            x = x + (run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant))
        return x


def measured(net: nn.Module, x: Tensor, **options: Any) -> Mapping[str, AttentionStatistics]:
    with AttentionProbe(net, **options) as probe:
        net(x.clone().requires_grad_()).square().mean().backward()
    assert not probe.skipped
    assert not probe.notes
    return probe.compute()

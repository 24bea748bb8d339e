"""Attention to clip, and a probe that clips it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from attn_monitor.clip_records import Clipped
from attn_monitor.qk_clip import Clipper, QKClip
from attn_monitor.records import AttentionStatistics
from tests.zoo.entry import enliven, without_dropout

BATCH, TOKENS = 3, 11
ABOVE = 400.0  # four times tau, so gamma is 1/4 and its root 1/2: nothing is rounded


class Clipping:
    """A model under a probe, with QK-Clip, whose largest logits a test may choose."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], clip: QKClip | None = None, **watch: Any) -> None:
        self.model, self.inputs = model, inputs
        self.probe = AttentionProbe(model, gradients=False, **watch)
        self.clipper = Clipper(clip or QKClip(), self.probe)

    def observe(self) -> Mapping[str, AttentionStatistics]:
        self.probe.reset()
        with self.probe:
            self.clipper.begin(self.model)
            self.model(**self.inputs)
        self.clipper.end()
        return self.probe.compute()

    def clip(self, layer: str, heads: Mapping[int, float]) -> Clipped:
        """Observe twice as if these heads had these largest logits, the others small ones."""
        for _ in range(2):
            clipped = self.clipper.apply(self.model, pretend(self.observe(), layer, heads))
        return clipped


def pretend(
    statistics: Mapping[str, AttentionStatistics], layer: str, heads: Mapping[int, float]
) -> dict[str, AttentionStatistics]:
    def largest(name: str, heads_there: int) -> Tensor:
        return torch.tensor([heads.get(head, 1.0) if name == layer else 1.0 for head in range(heads_there)])

    return {name: replace(stats, logit_max=largest(name, stats.heads)) for name, stats in statistics.items()}


def hidden(width: int) -> Tensor:
    return torch.randn(BATCH, TOKENS, width, generator=torch.Generator().manual_seed(3))


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 29, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))}


def library(name: str, head: str, implementation: str = "sdpa", **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(vocab_size=29, **sizes)
    model: nn.Module = getattr(transformers, f"{name}{head}")._from_config(config, attn_implementation=implementation)
    enliven(model, 1.4)
    without_dropout(model)
    return model.train()


class Block(nn.Module):
    """Attention of three heads of seven, as nanoGPT has it; `layout` says how the fused output is read."""

    HEADS, DEPTH = 3, 7

    def __init__(self, layout: str = "chunk", flash: bool = True, batch_second: bool = False) -> None:
        super().__init__()
        width = self.HEADS * self.DEPTH
        self.layout, self.flash, self.batch_second = layout, flash, batch_second
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = {"chunk": (3, self.HEADS, self.DEPTH), "by head": (self.HEADS, 3, self.DEPTH)}
        shape["depth first"] = (self.DEPTH, 3, self.HEADS)
        order = {"chunk": (2, 0, 3, 1, 4), "by head": (3, 0, 2, 1, 4), "depth first": (3, 0, 4, 1, 2)}[self.layout]
        return tuple(self.c_attn(x).unflatten(-1, shape[self.layout]).permute(order).unbind(0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -math.inf).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_second:
            x = x.transpose(0, 1)
            q, k, v = (part.permute(2, 1, 0, 3) for part in self.project(x))  # of [Q, B]
            return self.c_proj(self.attend(q, k, v).permute(2, 0, 1, 3).flatten(2)).transpose(0, 1)
        return self.c_proj(self.attend(*self.project(x)).transpose(1, 2).flatten(2))


class Packed(nn.MultiheadAttention):
    def __init__(self, weights: bool = False, **settings: Any) -> None:
        super().__init__(21, 3, batch_first=True, **settings)
        self.weights = weights
        nn.init.normal_(self.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # one argument instead of three
        return super().forward(x, x, x, need_weights=self.weights)[0]


def part(start: int, head: int, depth: int) -> range:
    return range(start + head * depth, start + (head + 1) * depth)


def block(layout: str, **settings: Any) -> Case:
    changed = {
        "chunk": [*part(0, 1, 7), *part(21, 1, 7)],
        "by head": [*range(21, 35)],
        "depth first": [feature * 9 + side * 3 + 1 for feature in range(7) for side in (0, 1)],
    }[layout]
    names = {"c_attn.weight": changed, "c_attn.bias": changed}
    return Block(layout, **settings), {"x": hidden(21)}, "Block", names, 0.5


LLAMA: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 13, "num_hidden_layers": 1}
Case = tuple[nn.Module, dict[str, Any], str, dict[str, Any], float]
"""A model, its inputs, the record, which entries of which parameters make head 1, and by what they are multiplied."""


class Normalised(Block):
    """As the example has it, after moving the heads to the front."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(7), nn.RMSNorm(7)
        nn.init.normal_(self.q_norm.weight)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v

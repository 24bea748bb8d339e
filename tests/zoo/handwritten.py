"""Attention as people write it themselves, where libraries do not go."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import BATCH, Entry, Shape, noise
from tests.zoo.truth import all_softmaxes

WIDTH, HEADS, DEPTH, LENGTH = 32, 4, 8, 9
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


class Block(nn.Module):
    """Projects into heads [B, H, T, D], attends in the way it is given, projects back."""

    def __init__(self, attend: Callable[[Block, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.vector = nn.Parameter(torch.zeros(HEADS))
        self.router = nn.Parameter(torch.randn(WIDTH, 5))
        self.raw = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, DEPTH)).transpose(1, 2) for part in self.project(x))
        y: Tensor = self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(2))
        return y

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


class RawBlock(Block):
    """Projects by matrices of its own, and routes by another."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        gates = (y @ self.router).softmax(-1)
        return y + (gates @ self.router.mT) * gates.amax(-1, keepdim=True)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x @ weight for weight in self.raw)


class BlindAttention(Block):
    """A block that is called attention; nobody can see any in it."""


class ScriptedAttention(nn.Module):
    """Plain attention of one head, for torch.jit."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).transpose(-2, -1)).softmax(-1) @ x


class BelowTorch(torch.autograd.Function):
    """Attends where torch sees nothing of it, as an extension does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = np.exp(q.numpy() @ k.mT.numpy() / math.sqrt(DEPTH))
        weights = torch.from_numpy(scores / scores.sum(-1, keepdims=True))
        ctx.save_for_backward(weights)
        return torch.from_numpy(weights.numpy() @ v.numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weights,) = ctx.saved_tensors
        return None, None, weights.mT @ gradients[0]


def nanogpt(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(CAUSAL[None, None] == 0, float("-inf"))
    return F.softmax(att, dim=-1) @ v


def nanogpt_flash(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)


def heads_last(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    weights = torch.softmax(torch.einsum("bnhd,bmhd->bnmh", q, k) * DEPTH**-0.5, dim=-2)
    return torch.einsum("bnmh,bmhd->bhnd", weights, v)


def chunked(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(part @ k.mT * DEPTH**-0.5).softmax(-1) @ v for part in q.split(4, dim=2)], dim=2)


def largest_first(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(DEPTH)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def distances(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.cdist(q, k) / -0.5).softmax(-1) @ v


def cosine(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1) / 0.1).softmax(-1) @ v


def normalised(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10.0).softmax(-1) @ v


def below_torch(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = BelowTorch.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch gives it no hints
    return out


def linear(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])


def additive(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q[..., :, None, :] + k[..., None, :, :]).sum(-1).softmax(-1) @ v


def softmax_plus_one(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.pad(q @ k.mT / math.sqrt(DEPTH), (0, 1)).softmax(-1)[..., :-1] @ v


def learned_sink(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sink = block.vector.view(1, HEADS, 1, 1).expand(len(q), -1, LENGTH, -1)
    return torch.cat([sink, q @ k.mT / math.sqrt(DEPTH)], dim=-1).softmax(-1)[..., 1:] @ v


def grouped(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, ::2], v[:, ::2]
    scores = torch.einsum("bgrtd,bgsd->bgrts", q.unflatten(1, (2, 2)), k) / math.sqrt(DEPTH)
    return torch.einsum("bgrts,bgsd->bgrtd", scores.softmax(-1), v).flatten(1, 2)


def one_key_head(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bsd->bhts", q, k[:, 0]) / math.sqrt(DEPTH)
    return torch.einsum("bhts,bsd->bhtd", scores.softmax(-1), v[:, 0])


def as_bigcode(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = q.transpose(1, 2).reshape(len(q), -1, DEPTH)
    scores = (rows @ k[:, 0].mT / math.sqrt(DEPTH)).view(len(q), LENGTH, HEADS, LENGTH)
    return (scores.softmax(-1).flatten(1, 2) @ v[:, 0]).view(len(q), LENGTH, HEADS, DEPTH).transpose(1, 2)


def _own(name: str, attend: Any, shape: Shape = (DEPTH, None), kind: type[Block] = Block, **more: Any) -> Entry:
    return Entry(
        f"by hand: {name}",
        lambda implementation: kind(attend),
        noise("x", (BATCH, LENGTH, WIDTH)),
        ("eager",),
        shapes={"*": shape},
        truth=all_softmaxes,
        library="torch",
        **more,
    )


HANDWRITTEN = (
    _own("nanoGPT", nanogpt),
    _own("nanoGPT, flash", nanogpt_flash),
    _own("raw parameters beside a raw router", nanogpt, kind=RawBlock),
    _own("heads last, softmax on axis -2", heads_last, reported=lambda p: p.movedim(2, 1)),
    _own("queries in chunks", chunked),
    _own("largest subtracted", largest_first),
    _own("grouped queries by einsum", grouped, reported=lambda p: p.flatten(1, 2)),
    _own("one key head by einsum", one_key_head),
    _own("one key head, heads folded into the rows", as_bigcode, reported=lambda p: p.transpose(1, 2)),
    _own("distances by cdist", distances, (DEPTH, -2.0), unfactored=["*"]),
    _own("cosine of normalised vectors", normalised, (DEPTH, 10.0)),
    _own("cosine_similarity", cosine, unseen=("where its logits come from was not seen",)),
    _own("softmax with one added", softmax_plus_one),
    _own("learned sink", learned_sink),
    _own("additive attention", additive, unseen=("where its logits come from was not seen",)),
    _own("linear attention", linear, kind=BlindAttention, told=True),
    _own("kernel below torch", below_torch, kind=BlindAttention, told=True),
    Entry(
        "by hand: compiled by torch.jit",
        lambda implementation: nn.Sequential(torch.jit.script(ScriptedAttention())),
        noise("input", (BATCH, LENGTH, WIDTH)),
        ("eager",),
        truth=all_softmaxes,
        told=True,
        repeatable=False,
        library="torch",
    ),
)

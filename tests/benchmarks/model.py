"""What is trained: a small GPT of our own, and GPT-2 of the same shape from transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from tests.benchmarks.sizes import SEED, ModelSize


class Core(nn.Module):
    """The attention itself, a module of its own so that a hook gets queries and keys for free."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with its projections.

    Args:
        width: Of the model.
        heads: How many.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = self.core(*(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts))
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(pl.LightningModule):
    """Predicts the next of random tokens: the cost of a step does not depend on what is learned."""

    def predicted(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        raise NotImplementedError

    def training_step(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.predicted(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class GPT(Decoder):
    """A decoder-only transformer on `F.scaled_dot_product_attention`."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary))

    def predicted(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions.weight))


class GPT2(Decoder):
    """GPT-2 of transformers without dropout, on its `sdpa` attention.

    Attributes:
        reporting: Whether the model is asked for its attention probabilities.
        attentions: The probabilities of the last step that reported, per layer.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.context,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)
        self.model.set_attn_implementation("sdpa")
        self.reporting = False
        self.attentions: tuple[Tensor, ...] = ()

    def predicted(self, tokens: Tensor) -> Tensor:
        output = self.model(tokens, use_cache=False, output_attentions=self.reporting)
        self.attentions = output.attentions if self.reporting else ()
        return output.logits


@dataclass
class RandomTokens:
    """So many batches of random tokens."""

    size: ModelSize
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        shape = self.size.batch, self.size.context + 1
        for _ in range(self.steps):
            yield torch.randint(self.size.vocabulary, shape, generator=generator)


def plain_step(model: Decoder, size: ModelSize) -> Callable[[], None]:
    """Return a training step on one batch, in a loop without Lightning."""
    [tokens] = RandomTokens(size, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model.training_step(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

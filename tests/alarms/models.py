"""The two models: a character GPT and a small ViT, with one attention whose logits can be made in several ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.alarms.recipes import VARIANTS, Recipe, Setting, Variant

VOCABULARY = 128  # ASCII
CLASSES = 10
PATCH = 2
SHARP = 0.95
"""A row is sharp from this probability on, by a criterion that others use."""


class Attention(nn.Module):
    """Multi-head attention; where it is `looking`, it can say how many rows are sharp, beside our statistics."""

    def __init__(self, setting: Setting, variant: Variant, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.softcap = setting.heads, causal, variant.softcap
        self.scale = variant.scale(setting.head_dim)
        self.qkv = nn.Linear(setting.width, 3 * setting.width)
        self.out = nn.Linear(setting.width, setting.width)
        self.q_norm = nn.RMSNorm(setting.head_dim) if variant.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(setting.head_dim) if variant.qk_norm else nn.Identity()
        nn.init.normal_(self.qkv.weight, std=setting.width**-0.5)  # so that the textbook's q.k has variance d_k
        self.looking = False
        self._looked_at = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        query, key = self.q_norm(query), self.k_norm(key)
        if self.looking:
            self._looked_at = query.detach(), key.detach()
        if self.softcap is None:
            heads = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, scale=self.scale)
        else:
            heads = self._logits(query, key).softmax(-1) @ value
        return self.out(heads.transpose(1, 2).flatten(2))

    def _logits(self, query: Tensor, key: Tensor) -> Tensor:
        logits = query @ key.mT * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.causal:
            blocked = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(blocked, -torch.inf)
        return logits

    @torch.no_grad()
    def sharp_rows(self) -> Tensor:
        """Return the share of sharp rows of each head where it last looked."""
        largest = self._logits(*self._looked_at).softmax(-1).amax(-1)
        if self.causal:
            largest = largest[..., 1:]  # the first row has one key, and no choice
        return (largest > SHARP).float().mean((0, 2))


class Block(nn.Module):
    """Attention and MLP, both pre-norm and residual."""

    def __init__(self, setting: Setting, variant: Variant, causal: bool) -> None:
        super().__init__()
        width = setting.width
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(setting, variant, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """What both models share: positions, blocks and a last norm."""

    def __init__(self, setting: Setting, variant: Variant, causal: bool, outputs: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(setting.tokens, setting.width)
        self.blocks = nn.ModuleList(Block(setting, variant, causal) for _ in range(setting.layers))
        self.head = nn.Sequential(nn.LayerNorm(setting.width), nn.Linear(setting.width, outputs))

    def encode(self, x: Tensor) -> Tensor:
        x = x + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x

    @property
    def attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]


class CharGPT(Transformer):
    """Predicts the next character."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        super().__init__(setting, variant, causal=True, outputs=VOCABULARY)
        self.embedding = nn.Embedding(VOCABULARY, setting.width)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.encode(self.embedding(text))).flatten(0, 1)


class DigitsViT(Transformer):
    """Classifies images of 8 x 8 by a class token before the patches."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        super().__init__(setting, variant, causal=False, outputs=CLASSES)
        self.embedding = nn.Linear(PATCH * PATCH, setting.width)
        self.class_token = nn.Parameter(torch.randn(setting.width))

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        first = self.class_token.expand(len(images), 1, -1)
        return self.head(self.encode(torch.cat([first, self.embedding(patches)], 1))[:, 0])


def model(recipe: Recipe) -> Transformer:
    """Return a new model; its weights depend on the seed alone."""
    torch.manual_seed(recipe.seed)
    kind = {"gpt": CharGPT, "vit": DigitsViT}[recipe.task]
    return kind(recipe.setting, VARIANTS[recipe.variant])

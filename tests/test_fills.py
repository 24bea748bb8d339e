"""Masks that fill with less than a huge number: by function, and as zeros and fills that are added."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_monitor import AttentionProbe, AttentionStatistics
from attn_monitor.functional import attention_statistics
from tests.reference import assert_same

B, H, T, D = 2, 3, 17, 8
ALLOWED = torch.ones(T, T, dtype=torch.bool).tril()


def set_item(scores: Tensor, fill: float) -> Tensor:
    scores = scores.clone()
    scores[..., ~ALLOWED] = fill
    return scores


def zeros_and(fill: float) -> Tensor:
    return torch.zeros(T, T).masked_fill(~ALLOWED, fill)


WAYS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda scores, fill: scores.masked_fill(~ALLOWED, fill),
    "where": lambda scores, fill: torch.where(ALLOWED, scores, fill),
    "where with a tensor": lambda scores, fill: torch.where(ALLOWED, scores, torch.tensor(fill)),
    "set item": set_item,
    "added": lambda scores, fill: scores + zeros_and(fill),
    "added twice": lambda scores, fill: scores + zeros_and(fill) + zeros_and(fill),
    "added, then scaled": lambda scores, fill: (scores * 2 + zeros_and(fill)) * 0.5,
    "windows": lambda scores, fill: (scores.view(1, B, H, T, T) + zeros_and(fill)).view(B, H, T, T),
}


class Eager(nn.Module):
    def __init__(self, way: Callable[[Tensor, float], Tensor], fill: float) -> None:
        super().__init__()
        self.way, self.fill = way, fill

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.way(query @ key.mT / D**0.5, self.fill).softmax(-1) @ key


class Fused(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=zeros_and(self.fill))


def seen(model: nn.Module, query: Tensor, key: Tensor) -> AttentionStatistics:
    with AttentionProbe(model) as probe:
        model(query, key)
    [statistics] = probe.compute().values()
    return statistics


@pytest.mark.parametrize("fill", [-100.0, -8999.0])
@pytest.mark.parametrize("way", [*WAYS, "fused"])
def test_a_fill_of_any_size_is_a_mask(way: str, fill: float) -> None:
    query, key = torch.randn(2, B, H, T, D)
    model = Fused(fill) if way == "fused" else Eager(WAYS[way], fill)
    assert_same(seen(model, query, key), attention_statistics(query, key, attn_mask=ALLOWED))


@pytest.mark.parametrize("way", ["masked_fill", "added", "fused"])
def test_what_leaves_something_of_an_entry_is_no_mask(way: str) -> None:
    query, key = torch.randn(2, B, H, T, D)
    model = Fused(-20.0) if way == "fused" else Eager(WAYS[way], -20.0)
    lowest = seen(model, query, key).logit_min
    assert lowest is not None
    assert float(lowest.max()) < -15


def test_a_bias_that_reaches_low_is_a_bias() -> None:
    query, key = torch.randn(2, B, H, T, D)
    slope = -30.0 * (torch.arange(T)[:, None] - torch.arange(T)).abs()  # as of ALiBi: zeros, -30, -60, ...
    found = attention_statistics(query, key, attn_mask=slope)
    assert found.logit_min is not None
    assert float(found.logit_min.max()) < -300
    assert found.rows.tolist() == [B * T] * H


def test_shifted_windows_of_a_fresh_swin_are_healthy() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=64, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = transformers.SwinModel(copy.deepcopy(config))
    with AttentionProbe(model) as probe:
        model(torch.randn(2, 3, 64, 64))
    found = probe.compute()
    assert len(found) == 4
    for name, statistics in found.items():
        assert statistics.logit_min is not None, name
        assert statistics.logit_row_std is not None, name
        assert float(statistics.logit_min.min()) > -5, name  # the mask of a shifted window adds -100
        assert float(statistics.logit_row_std.max()) < 1, name


class Dotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        setattr(self, "block.0", nn.MultiheadAttention(D, 2, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, "block.0")(x, x, x)[0]
        return out


def test_a_child_may_have_a_dot_in_its_name() -> None:
    model = nn.Sequential(Dotted())
    with AttentionProbe(model, modules="0.block.*") as probe:
        model(torch.randn(2, 5, D))
    assert list(probe.compute()) == ["0.block.0"]

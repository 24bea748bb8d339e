"""Scores by every spelling of a product, and products that are none of an attention's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, attention_reference, gradient_reference
from tests.spellings import ALLOWED, E, T

Scores = Callable[[Tensor, Tensor], Tensor]
"""From query [Q, E] and key [K, E] to the scores [Q, K]."""
FLOOR = ~ALLOWED * -1e4


class OneHead(nn.Module):
    """One unbatched head, with scores made in the given way."""

    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = (self.scores(q, k) / math.sqrt(E) + FLOOR).softmax(-1) @ v
        return out


def watched(model: nn.Module, *inputs: Tensor) -> AttentionStatistics:
    with AttentionProbe(model) as probe:
        model(*inputs).square().sum().backward()
    assert not probe.skipped
    (stats,) = probe.compute().values()
    return stats


@pytest.mark.parametrize(
    "scores",
    [
        F.linear,
        torch.inner,
        lambda q, k: q.inner(k),
        lambda q, k: torch.tensordot(q, k, dims=([1], [1])),
        lambda q, k: torch.tensordot(q, k.T, dims=1),
        lambda q, k: torch.addmm(q.new_zeros(T), q, k.T),
        lambda q, k: torch.addbmm(q.new_zeros(T, T), q.unflatten(1, (3, -1)).transpose(0, 1), _halved(k)),
        lambda q, k: torch.mul(q[:, None], k).sum(dim=-1),
        lambda q, k: torch.einsum("qdc,kcd->qk", q.unflatten(1, (3, -1)), k.unflatten(1, (3, -1)).transpose(1, 2)),
        lambda q, k: torch.matmul(input=q, other=k.T),
    ],
)
def test_scores_of_one_head_are_those_of_the_reference(scores: Scores) -> None:
    model, x = OneHead(scores), torch.randn(T, E)
    stats = watched(model, x)
    model = model.double()
    q, k, v = (part.detach()[None, None] for part in model.qkv(x.double()).chunk(3, -1))
    output = 2 * model(x.double()).detach()[None, None]
    gradients = gradient_reference(q, k, v, output, is_causal=True)
    assert_matches(stats, attention_reference(q, k, is_causal=True))
    assert_matches(stats, gradients, names=["grad_logits_norm", "grad_probs_norm"])
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale.item(), E**-0.5)


def _halved(k: Tensor) -> Tensor:
    return k.unflatten(1, (3, -1)).permute(1, 2, 0)


def test_the_sum_of_a_product_that_something_was_added_to_is_no_score() -> None:
    model = OneHead(lambda q, k: (q[:, None] * k + 1.0).sum(-1))
    with AttentionProbe(model) as probe:
        model(torch.randn(T, E)).sum().backward()
    assert dict(probe.compute()) == {}


class Adapted(nn.Module):
    """A router whose weight an adapter of low rank changes."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(E, 5), nn.Linear(E, 2), nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        gates = F.linear(x, self.base.weight + 0.5 * (self.up.weight @ self.down.weight)).softmax(-1)
        return torch.einsum("btx,btxe->bte", gates, torch.stack([x] * 5, dim=2))


def test_a_router_with_an_adapted_weight_is_no_attention() -> None:
    with AttentionProbe(model := Adapted()) as probe:
        model(torch.randn(2, T, E)).sum().backward()
    assert dict(probe.compute()) == {}
    assert probe.skipped == {}


class Generated(nn.Module):
    """A classifier, or an expert, whose weight another layer makes."""

    def __init__(self, *, weighs: bool) -> None:
        super().__init__()
        self.make, self.project, self.weighs = nn.Linear(E, 5 * E), nn.Linear(E, E), weighs

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(x.mean((0, 1))).view(5, E)
        probs = F.linear(self.project(x), weight).softmax(-1)
        return probs @ weight if self.weighs else probs.amax(-1, keepdim=True) * x


def test_a_generated_weight_makes_attention_only_if_the_probabilities_weigh_values() -> None:
    with AttentionProbe(model := Generated(weighs=False)) as probe:
        model(torch.randn(2, T, E)).sum().backward()
    assert dict(probe.compute()) == {}
    assert probe.skipped == {}
    assert watched(Generated(weighs=True), torch.randn(2, T, E)).keys == 5

"""Functions that scores go through before the softmax, and attention of one query: measured or told, without alarms."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, attention_reference, gradient_reference, softmax_reference
from tests.spellings import ALLOWED, SCALE, Attention, B, D, E, H, T

Scores = Callable[[Tensor, Tensor], Tensor]


def watched(model: nn.Module, x: Tensor, *, training: bool = True) -> tuple[AttentionStatistics, str]:
    with torch.set_grad_enabled(training), AttentionProbe(model) as probe:
        out = model(x)
        if training:
            out.square().sum().backward()
    assert not probe.skipped
    ((name, stats),) = probe.compute().items()
    return stats, probe.notes.get(name, "")


# -- functions between the product and the softmax ------------------------------------------------------------------

BENT: dict[str, Scores] = {
    "squared distance": lambda q, k: -(torch.cdist(q, k) ** 2),
    "distance, pow": lambda q, k: -torch.cdist(q, k).pow(2),
    "distance, square": lambda q, k: -torch.cdist(q, k).square(),
    "relu": lambda q, k: F.relu(q @ k.mT),
    "leaky relu": lambda q, k: F.leaky_relu(q @ k.mT, 0.2),
    "sigmoid": lambda q, k: (q @ k.mT).sigmoid(),
    "abs": lambda q, k: (q @ k.mT).abs(),
    "pow": lambda q, k: (q @ k.mT).pow(2),
    "clamp from 0 on": lambda q, k: (q @ k.mT).clamp(min=0),
    "softsign": lambda q, k: F.softsign(q @ k.mT),
    "base 2": lambda q, k: 2 ** (q @ k.mT * 0.1),
}


@pytest.mark.parametrize("scores", BENT.values(), ids=BENT)
@pytest.mark.parametrize("training", [True, False])
def test_logits_that_are_no_scale_times_a_product_are_measured_without_the_factors(
    scores: Scores, training: bool
) -> None:
    model, x = Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v), torch.randn(B, T, E)
    stats, note = watched(model, x, training=training)
    q, k, _ = (part.detach().double() for part in model.heads(x))
    assert_matches(stats, softmax_reference(scores(q, k), torch.ones(T, T, dtype=torch.bool)), absolute=1e-5)
    assert (stats.heads, stats.head_dim) == (H, D)
    assert (stats.scale, stats.q_rms, stats.qk_std, stats.alignment) == (None, None, None, None)
    assert (stats.grad_logits_norm is not None) == training
    assert "before the softmax" in note


@pytest.mark.parametrize("scores", BENT.values(), ids=BENT)
def test_one_folded_head_is_measured_too(scores: Scores) -> None:
    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        return (scores(q, k).softmax(-1) @ v).unflatten(0, (B, H))

    stats, _ = watched(Attention(folded), torch.randn(B, T, E))
    assert (stats.heads, stats.rows.tolist()) == (H, [B * T] * H)


@pytest.mark.parametrize("early", [True, False])
def test_masks_before_and_after_a_leaky_relu_are_masks(early: bool) -> None:
    def graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        if early:
            return F.leaky_relu(scores.masked_fill(~ALLOWED, -torch.inf)).softmax(-1) @ v
        return F.leaky_relu(scores).masked_fill(~ALLOWED, -9e15).softmax(-1) @ v

    model, x = Attention(graph), torch.randn(B, T, E)
    stats, _ = watched(model, x)
    q, k, _ = (part.detach().double() for part in model.heads(x))
    assert_matches(stats, softmax_reference(F.leaky_relu(q @ k.mT), ALLOWED))


def test_a_softmax_to_the_base_of_2_by_hand_is_told() -> None:
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.exp2(q @ k.mT)
        return weights / weights.sum(-1, keepdim=True) @ v

    with AttentionProbe(model := Attention(by_hand)) as probe:
        model(torch.randn(B, T, E))
    assert dict(probe.compute()) == {}
    assert "observe_logits" in probe.skipped["Attention"]


# -- functions after which the scores are still those of query and key ----------------------------------------------

HALF = torch.rand(T, T) > 0.5
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda s: s.clamp(-0.5, 0.5),
    "clamp_max": lambda s: s.clamp_max(0.3),
    "clamp_min": lambda s: torch.clamp_min(s, -0.3),
    "clip": lambda s: s.clip(max=0.3),
    "minimum": lambda s: torch.minimum(s, torch.full((), 0.3)),
    "maximum": lambda s: torch.maximum(s, torch.full((), -0.3)),
    "max": lambda s: torch.max(s, torch.full((), -0.3)),
    "dropout": lambda s: F.dropout(s, 0.5),
    "tril": lambda s: s.tril(),
    "triu": torch.triu,
    "nan_to_num": lambda s: s.nan_to_num(),
    "masked_scatter": lambda s: s.masked_scatter(HALF, torch.zeros(B * H * T * T)),
}


@pytest.mark.parametrize("function", KEPT.values(), ids=KEPT)
def test_the_product_is_told_from_what_was_done_to_it(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Attention(lambda q, k, v: function(q @ k.mT * SCALE).softmax(-1) @ v), 2 * torch.randn(B, T, E)
    torch.manual_seed(0)
    stats, _ = watched(model, x)
    torch.manual_seed(0)
    q, k, _ = (part.detach() for part in model.heads(x))
    logits = function(q @ k.mT * SCALE)
    assert_matches(stats, softmax_reference(logits, torch.ones(T, T, dtype=torch.bool)))
    assert_matches(stats, attention_reference(q, k, scale=SCALE), names=["qk_std", "alignment", "q_rms", "k_rms"])


# -- one query ------------------------------------------------------------------------------------------------------


class OneQuery(nn.Module):
    """Attends from one state [B, E] to the tokens [B, T, E], as translation models and recommenders do."""

    def __init__(self, scores: Scores, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.scores, self.weigh = nn.Linear(E, 3 * E), scores, weigh

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q[:, 0], k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.weigh(self.scores(q, k).softmax(-1), v)


SCORES: dict[str, Scores] = {
    "product and sum": lambda q, k: (q[:, None] * k).sum(-1),
    "keys first": lambda q, k: (k * q.unsqueeze(1)).sum(dim=2),
    "expanded": lambda q, k: (q[:, None].expand_as(k) * k).sum(-1),
    "scaled before the sum": lambda q, k: (q[:, None] * k / 0.5).sum(-1) * 0.5,
    "mean": lambda q, k: (q[:, None] * k).mean(-1) * E,
    "bmm": lambda q, k: torch.bmm(k, q[:, :, None]).squeeze(-1),
    "einsum": lambda q, k: torch.einsum("bd,bsd->bs", q, k),
}
WEIGHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda w, v: torch.bmm(w.unsqueeze(1), v).squeeze(1),
    "product and sum": lambda w, v: (w[..., None] * v).sum(1),
    "values first": lambda w, v: (v * w.unsqueeze(-1)).sum(dim=1),
    "einsum": lambda w, v: torch.einsum("bs,bsd->bd", w, v),
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("weigh", WEIGHED.values(), ids=WEIGHED)
def test_attention_of_one_query(scores: Scores, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = OneQuery(scores, weigh), torch.randn(B, T, E)
    stats, _ = watched(model, x)
    q, k, v = (part.detach() for part in model.parts(x))
    q, k, v = q[:, None, None], k[:, None], v[:, None]
    gradients = gradient_reference(q, k, v, 2 * model(x).detach()[:, None, None], scale=1.0)
    assert_matches(stats, attention_reference(q, k, scale=1.0))
    assert_matches(stats, gradients, names=["grad_logits_norm", "grad_probs_norm"], relative=1e-4)
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale.item(), 1.0)


@pytest.mark.parametrize("training", [True, False])
def test_probabilities_that_are_averaged_before_they_weigh_values(training: bool) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return torch.mv(v.T, (q @ k.T).softmax(-1).mean(0))

    model, x = Averaged(), torch.randn(T, E)
    stats, _ = watched(model, x, training=training)
    q, k, _ = (part.detach()[None, None] for part in model.qkv(x).chunk(3, -1))
    assert_matches(stats, attention_reference(q, k, scale=1.0))


def test_one_query_without_a_batch() -> None:
    class Unbatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (k @ q[0]).softmax(0) @ v

    stats, note = watched(Unbatched(), torch.randn(T, E))
    assert (stats.heads, stats.keys, stats.rows.tolist(), note) == (1, T, [1], "")


# -- what must not be told ------------------------------------------------------------------------------------------


class Free(nn.Module):
    def __init__(self, function: Callable[[Free, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.function = nn.Linear(E, 3 * E), function
        self.classes, self.project = nn.Parameter(torch.randn(5, E)), nn.Linear(E, E)
        self.make, self.narrow, self.one = nn.Linear(E, 5 * E), nn.Linear(E, 4), nn.Linear(E, 1)
        self.wide = nn.Linear(4, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, *self.qkv(x).chunk(3, -1))

    def made(self, x: Tensor) -> Tensor:
        """Return a matrix [B, 5, E] for each sample."""
        made: Tensor = self.make(x.mean(1)).unflatten(-1, (5, E))
        return made


def gate(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = m.wide(F.relu(m.narrow(q.mean(1))))
    return (v * gates.softmax(-1)[:, None]).sum(1) + (v * gates.sigmoid()[:, None]).sum(1)


def selective_kernels(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    branches = torch.stack([k, v], 1)
    gates = torch.stack([m.project(branches.sum(1).mean(1)), m.project(q.mean(1))], 1)[..., None, :].softmax(1)
    return (branches * gates).sum(1)


def contrastive(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = F.relu(q[:, 0] @ k[:, 0].T).softmax(-1)
    return (p * p.log()).sum(-1) + (q * k[:, :1]).sum(-1).softmax(-1).amax() + F.relu(q @ k.mT).softmax(-1).amax()


def router(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = F.relu(q @ m.classes.T).softmax(-1)
    return (gates[..., None] * torch.stack([v] * 5, 2)).sum(2) * gates.mean((0, 1)).square().sum()


def usage(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ m.classes.T).softmax(-1).mean(1) @ m.made(v)[0]


def pooling(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (m.one(torch.tanh(q) * k.sigmoid()).softmax(1) * v).sum(1)


def projected_classes(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ m.project(m.classes).T).softmax(-1) + (m.project(m.classes) @ q.mT).softmax(1).mT


def projected_classes_in_a_batch(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    classes = F.normalize(F.gelu(m.project(m.classes.expand(len(q), -1, -1))), dim=-1)
    return (q @ classes.mT).softmax(-1)


def projected_classes_in_heads(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, m.project(m.classes)[None]))
    return (q @ k.mT).softmax(-1)


def generated_classes(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ m.made(k).mT).softmax(-1) + torch.einsum("btd,bnd->btn", q, m.made(v)).softmax(-1)


CLASSIFIERS = (projected_classes, projected_classes_in_a_batch, projected_classes_in_heads, generated_classes)


@pytest.mark.parametrize(
    "function",
    [gate, selective_kernels, contrastive, router, usage, pooling, *CLASSIFIERS],
    ids=lambda function: function.__name__,
)
def test_gates_routers_and_classifiers_are_not_told(function: Callable[..., Tensor]) -> None:
    probe = AttentionProbe(model := Free(function))
    for _ in range(2):  # also when only what was found is hooked
        with probe:
            model(torch.randn(B, T, E)).square().sum().backward()
        assert dict(probe.compute()) == {}
        assert probe.skipped == {}


def test_what_is_multiplied_in_place_is_not_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def gated(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for x in (q.detach().clone(), k.detach() * v.detach()[:, :1]):
            x.mul_(v.detach()[:, :1])
            kept.append(weakref.ref(x))
        return v

    with AttentionProbe(model := Free(gated)):
        model(torch.randn(B, T, E))
        assert [reference() for reference in kept] == [None, None]


def latents(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (m.project(m.classes) @ k.mT).softmax(-1) @ v


def memory(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ m.project(m.classes).T).softmax(-1) @ m.project(m.classes)


def generated_memory(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ m.made(k).mT).softmax(-1), 0.1) @ m.made(v)


@pytest.mark.parametrize(("function", "keys"), [(latents, T), (memory, 5), (generated_memory, 5)])
@pytest.mark.parametrize("training", [True, False])
def test_learned_and_generated_queries_and_keys_are_attention_once_they_weigh_values(
    function: Callable[..., Tensor], keys: int, training: bool
) -> None:
    stats, _ = watched(Free(function), torch.randn(B, T, E), training=training)
    assert (stats.keys, stats.head_dim) == (keys, E)
    assert (stats.grad_logits_norm is not None) == training


def test_gated_pooling_is_told_where_its_softmax_weighs_values() -> None:
    def pooled(m: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return m.one(torch.tanh(q) * k.sigmoid()).softmax(1).mT @ v

    with AttentionProbe(model := Free(pooled)) as probe:
        model(torch.randn(B, T, E))
    assert dict(probe.compute()) == {}
    assert "scores that are no product" in probe.skipped["Free"]

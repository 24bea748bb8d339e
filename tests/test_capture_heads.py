"""Grouped and multi-query attention by hand: heads that only the queries have are heads, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, attention_reference, gradient_reference

B, T, G, R, D = 2, 5, 2, 3, 4
H, E = G * R, 24
SCALE = 0.4
MASK = ~torch.ones(T, T, dtype=torch.bool).tril() * -1e4

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From projected query [B, T, H D], key and value [B, T, G D] to the output [B, T, H D]."""


class Grouped(nn.Module):
    """Projects into more heads of the queries than of the keys, attends in the given way."""

    def __init__(self, attend: Attend, groups: int = G) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, H * D), nn.Linear(E, groups * D), nn.Linear(E, groups * D)
        self.groups, self.attend = groups, attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.q(x), self.k(x), self.v(x))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return query [B, H, T, D], key and value [B, G, T, D]."""
        return tuple(layer(x).detach().unflatten(2, (-1, D)).transpose(1, 2) for layer in (self.q, self.k, self.v))


def in_heads(x: Tensor, *sizes: int) -> Tensor:
    return x.unflatten(2, (*sizes, D))


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = in_heads(q, G, R), in_heads(k, G), in_heads(v, G)
    scores = torch.einsum("btgrd,bsgd->bgrts", q, k) * SCALE + MASK
    return torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).flatten(2)


def by_einsum_repeats_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = in_heads(q, G, R), in_heads(k, G), in_heads(v, G)
    scores = torch.einsum("btgrd,bsgd->brgts", q, k) * SCALE + MASK
    return torch.einsum("brgts,bsgd->btgrd", scores.softmax(-1), v).flatten(2)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = in_heads(q, G, R), in_heads(k, G), in_heads(v, G)
    scores = torch.einsum("bsgd,btgrd->bsgrt", k, q).permute(0, 2, 3, 4, 1) * SCALE + MASK
    return torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).flatten(2)


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = in_heads(q, G, R).permute(0, 2, 3, 1, 4)
    k, v = (in_heads(part, G).transpose(1, 2)[:, :, None] for part in (k, v))
    return ((q @ k.mT * SCALE + MASK).softmax(-1) @ v).permute(0, 3, 1, 2, 4).flatten(2)


def folded_into_the_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = in_heads(q, H).transpose(1, 2).reshape(B, G, -1, D)
    k, v = (in_heads(part, G).transpose(1, 2) for part in (k, v))
    scores = q @ k.mT * SCALE + MASK.repeat(R, 1)
    return (scores.softmax(-1) @ v).reshape(B, H, T, D).transpose(1, 2).flatten(2)


def folded_behind_the_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = in_heads(q, G, R).transpose(1, 2).reshape(B * G, T * R, D)
    k, v = (in_heads(part, G).transpose(1, 2).reshape(B * G, T, D) for part in (k, v))
    scores = torch.bmm(q, k.mT) * SCALE + MASK.repeat_interleave(R, 0)
    return torch.bmm(scores.softmax(-1), v).view(B, G, T, R, D).transpose(1, 2).flatten(2)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bsd->bhts", in_heads(q, H).transpose(1, 2), k) * SCALE + MASK
    return torch.einsum("bhts,bsd->bthd", scores.softmax(-1), v).flatten(2)


def one_key_head_and_heads_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bsd->bhts", in_heads(q, H), k) * SCALE + MASK
    return torch.einsum("bhts,bsd->bthd", scores.softmax(-1), v).flatten(2)


def one_key_head_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = in_heads(q, H).transpose(1, 2) @ k[:, None].mT * SCALE + MASK
    return (scores.softmax(-1) @ v[:, None]).transpose(1, 2).flatten(2)


def as_bigcode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = torch.empty(B, T * H, T)
    scores = torch.baddbmm(empty, q.reshape(B, T * H, D), k.mT, beta=0, alpha=SCALE).view(B, T, H, T)
    probs = torch.where(MASK[:, None] == 0, scores, torch.full([], -1e4)).softmax(-1)
    return torch.bmm(probs.view(B, T * H, T), v).view(B, T, H * D)


def rows_and_heads_never_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.reshape(B, T * H, D) @ k.mT * SCALE + MASK.repeat_interleave(H, 0)
    return (scores.softmax(-1) @ v).view(B, T, H * D)


GROUPED = (*(by_einsum, by_einsum_repeats_first, keys_first, by_matmul, folded_into_the_rows, folded_behind_the_rows),)
SHARED = (
    *(one_key_head, one_key_head_and_heads_behind, one_key_head_broadcast, as_bigcode, rows_and_heads_never_apart),
)


def watched(model: nn.Module, x: Tensor) -> tuple[AttentionStatistics, str]:
    with AttentionProbe(model) as probe:
        model(x).square().sum().backward()
    assert not probe.skipped
    ((name, stats),) = probe.compute().items()
    return stats, probe.notes.get(name, "")


@pytest.mark.parametrize(
    ("attend", "groups"),
    [*((attend, G) for attend in GROUPED), *((attend, 1) for attend in SHARED)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_query_head_has_its_numbers(attend: Attend, groups: int) -> None:
    model, x = Grouped(attend, groups), 2 * torch.randn(B, T, E)
    stats, note = watched(model, x)
    q, k, v = model.heads(x)
    gradient = 2 * model(x).detach().unflatten(2, (H, D)).transpose(1, 2)
    gradients = gradient_reference(q, k, v, gradient, is_causal=True, scale=SCALE)
    assert_matches(stats, attention_reference(q, k, is_causal=True, scale=SCALE))
    assert_matches(stats, gradients, names=["grad_logits_norm", "grad_probs_norm"], relative=1e-4)
    assert (stats.heads, stats.head_dim, stats.keys, note) == (H, D, T, "")
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale, torch.full((H,), SCALE, dtype=torch.float64))


def test_repeats_before_groups_are_numbered_as_the_projection_has_them() -> None:
    def repeats_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = in_heads(q, R, G), in_heads(k, G), in_heads(v, G)
        probs = (torch.einsum("btrgd,bsgd->bgrts", q, k) * SCALE).softmax(-1)
        return torch.einsum("bgrts,bsgd->btrgd", probs, v).flatten(2)

    model, x = Grouped(repeats_outside), torch.randn(B, T, E)
    stats, _ = watched(model, x)
    q, k, _ = model.heads(x)
    assert_matches(stats, attention_reference(q, k.repeat(1, R, 1, 1), scale=SCALE))


@pytest.mark.parametrize("on_query", [True, False])
def test_a_temperature_per_repeat_is_the_scale_of_its_heads(on_query: bool) -> None:
    factor = torch.tensor([1.0, 2.0, 4.0])

    def warmed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = in_heads(q, G, R), in_heads(k, G), in_heads(v, G)
        q = q * factor[:, None] if on_query else q
        scores = torch.einsum("btgrd,bsgd->bgrts", q, k)
        scores = scores if on_query else scores * factor.view(R, 1, 1)
        return torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).flatten(2)

    model, x = Grouped(warmed), torch.randn(B, T, E)
    stats, _ = watched(model, x)
    q, k, _ = model.heads(x)
    assert_matches(stats, attention_reference(q, k, scale=factor.repeat(G)))
    assert stats.scale is not None
    assert stats.scale.tolist() == factor.repeat(G).tolist()


def unknown_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = torch.from_numpy(in_heads(q, H).detach().numpy())
    return torch.einsum("bhts,bsd->bthd", torch.einsum("bthd,bsd->bhts", q, k).softmax(-1), v).flatten(2)


def unknown_grouped_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = torch.from_numpy(in_heads(q, 1, H).detach().numpy()), in_heads(k, 1), in_heads(v, 1)
    scores = torch.einsum("btgrd,bsgd->bgrts", q, k)
    return torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).flatten(2)


def heads_attend_to_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((in_heads(q, H) @ in_heads(k, H).mT).softmax(-1) @ in_heads(v, H)).flatten(2)


@pytest.mark.parametrize(
    ("attend", "groups"), [(unknown_query, 1), (unknown_grouped_query, 1), (heads_attend_to_heads, H)]
)
def test_heads_that_nothing_tells_from_rows_are_pooled_with_a_note(attend: Attend, groups: int) -> None:
    stats, note = watched(Grouped(attend, groups), torch.randn(B, T, E))
    assert (stats.heads, stats.rows.tolist()) == (1, [B * T * H])
    assert "could not be told apart" in note

"""Small calls that are looked at side by side have the sums they have alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_monitor import looks as looks_module
from attn_monitor.catalog import ALL, FACTORS, GRADIENTS, HEADLINE
from attn_monitor.looks import SMALL, Looks
from attn_monitor.records import AttentionCall
from attn_monitor.softmax_gradients import qualifying_entries, softmax_gradient_sums
from attn_monitor.statistics import attention_rows, attention_sums
from attn_monitor.sums import AttentionSums
from tests.gradient_sums import attention_gradient_sums
from tests.reference import assert_same

B, Q, K, D, V = 3, 17, 19, 7, 5
CHOSEN = frozenset(HEADLINE) | frozenset(FACTORS)


class Watched:
    """Looks, with what they delivered, and how many heads each pass over the tiles had."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, statistics: frozenset[str] = CHOSEN, max_queries: int | None = None
    ) -> None:
        self.found: dict[Hashable, AttentionSums] = {}
        self.errors: dict[Hashable, str] = {}
        self.heads: list[int] = []
        self.looks = Looks(
            statistics,
            max_queries=max_queries,
            grad_scale=1.0,
            deliver=self.found.__setitem__,
            failed=lambda record, error: self.errors.__setitem__(record, str(error)),
        )
        for name in ("attention_rows", "softmax_rows", "attention_gradient_rows"):
            monkeypatch.setattr(looks_module, name, self._counted(getattr(looks_module, name)))

    def _counted(self, look: object) -> object:
        def counted(call: AttentionCall, *args: object, **kwargs: object) -> object:
            self.heads.append(call.shape.heads)
            return look(call, *args, **kwargs)  # type: ignore[operator] # one of three functions

        return counted


def fused(heads: int, groups: int = 0, **changes: object) -> AttentionCall:
    groups = groups or heads
    query, key, value = torch.randn(B, heads, Q, D), torch.randn(B, groups, K, D), torch.randn(B, groups, K, V)
    return replace(AttentionCall(query=query, key=key, value=value, scale=0.3), **changes)  # type: ignore[arg-type] # fields by name


def by_hand(heads: int, mask: Tensor) -> AttentionCall:
    query, key = torch.randn(B, heads, Q, D), torch.randn(B, heads, K, D)
    logits = (query @ key.mT * 0.3).masked_fill(~mask, -torch.inf)
    return AttentionCall(query=query, key=key, logits=logits, masks=(mask,), scale=0.3, plain=True)


def assert_alone(sums: AttentionSums, alone: AttentionSums, statistics: frozenset[str] = CHOSEN) -> None:
    found, wanted = sums.finalize(statistics), alone.finalize(statistics)
    assert_same(found, wanted)
    assert (found.head_dim, found.keys, found.calls) == (wanted.head_dim, wanted.keys, wanted.calls)
    assert found.approximate == wanted.approximate


@pytest.mark.parametrize(
    "changes",
    [
        ({}, {}, {}),
        ({"is_causal": True}, {"is_causal": True}, {"is_causal": True}),
        ({"scale": 0.1, "query_scale": 2.0}, {"scale": torch.rand(3) + 0.1}, {"scale": torch.tensor(0.7)}),
        ({"sinks": torch.arange(2.0)}, {"sinks": torch.ones(3)}, {"sinks": torch.zeros(5)}),
        ({"softcap": 2.0}, {"softcap": 2.0}, {"softcap": 2.0}),
    ],
    ids=["plain", "causal", "scales", "sinks", "softcap"],
)
@pytest.mark.parametrize("backward", [False, True])
def test_fused_calls_side_by_side_have_the_sums_they_have_alone(
    changes: tuple[dict[str, object], ...], backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    calls = [replace(fused(heads), **change) for heads, change in zip((2, 3, 5), changes, strict=True)]  # type: ignore[arg-type] # fields by name
    grads = [torch.randn(B, call.shape.heads, Q, V) if backward else None for call in calls]
    watched = Watched(monkeypatch)
    for number, (call, grad) in enumerate(zip(calls, grads, strict=True)):
        watched.looks.look(number, call, grad)
    assert (watched.heads, watched.found) == ([], {})
    watched.looks.empty()
    assert watched.heads == [10]
    for number, (call, grad) in enumerate(zip(calls, grads, strict=True)):
        assert_alone(watched.found[number], attention_sums(call, CHOSEN, grad_output=grad))


def test_grouped_queries_and_masks_of_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    one, each = torch.rand(1, 1, Q, K) < 0.7, torch.rand(1, 6, Q, K) < 0.7
    calls = [fused(4, 2, masks=(one,)), fused(6, 3, masks=(each,)), fused(6, 2, masks=(one,))]
    watched = Watched(monkeypatch)
    for number, call in enumerate(calls):
        watched.looks.look(number, call)
    watched.looks.empty()
    assert watched.heads == [10, 6]  # three heads to a key are not alike with two
    for number, call in enumerate(calls):
        assert_alone(watched.found[number], attention_sums(call, CHOSEN))


def test_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    calls = [fused(2), fused(3)]
    grads = [torch.randn(B, call.shape.heads, Q, V) for call in calls]
    watched = Watched(monkeypatch)
    for number, (call, grad) in enumerate(zip(calls, grads, strict=True)):
        watched.looks.look_at_gradients(number, call, grad)
    watched.looks.empty()
    assert watched.heads == [5]
    for number, (call, grad) in enumerate(zip(calls, grads, strict=True)):
        assert_alone(watched.found[number], attention_gradient_sums(call, grad), GRADIENTS)


def test_a_softmax_has_its_entries_and_both_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    calls = [by_hand(heads, torch.rand(B, 1, Q, K) < 0.6) for heads in (2, 3)]
    watched = Watched(monkeypatch)
    pending = [watched.looks.look_at_softmax(number, call) for number, call in enumerate(calls)]
    assert watched.heads == []
    wanted: list[AttentionSums] = []
    for number, call in enumerate(calls):
        grad = torch.randn(*call.shape)
        wanted.append(softmax_gradient_sums(qualifying_entries(call), grad_logits=grad, grad_probs=2 * grad))
        entries = pending[number].entries()
        assert entries is not None
        watched.looks.look_at_side(f"{number} logits", entries, "logits", grad)
        watched.looks.look_at_side(f"{number} probs", entries, "probabilities", grad.mul_(2))
        grad.zero_()  # it is ours no longer
    assert watched.heads == [5]
    watched.looks.empty()
    for number, call in enumerate(calls):
        assert_alone(watched.found[number], attention_sums(call, CHOSEN))
        both = watched.found[f"{number} logits"].merge(watched.found[f"{number} probs"])
        for name in ("grad_logits_norm", "grad_probs_norm"):
            torch.testing.assert_close(
                getattr(both.finalize(GRADIENTS), name), getattr(wanted[number].finalize(GRADIENTS), name)
            )


def test_what_must_stand_alone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    some = torch.rand(B, 1, Q, K) < 0.7
    padding = torch.zeros(B, 1, Q, 1, dtype=torch.bool)
    padding[1, :, 11:] = True
    padded = [fused(heads, masks=(~padding,), padding=padding) for heads in (2, 3)]
    watched = Watched(monkeypatch)
    for number, call in enumerate(padded):
        watched.looks.look(number, call)
    watched.looks.empty()
    assert watched.heads == [2, 3]

    first_keys = Watched(monkeypatch, ALL)
    masked = [fused(heads, masks=(some & (torch.arange(K) >= heads),)) for heads in (2, 3)]
    for number, call in enumerate(masked):
        first_keys.looks.look(number, call)
    first_keys.looks.empty()
    for number, call in enumerate(masked):
        assert_alone(first_keys.found[number], attention_sums(call, ALL), ALL)

    sampled = Watched(monkeypatch, max_queries=Q - 1)
    sampled.looks.look("sampled", fused(2))
    assert sampled.heads == [2]

    large = Watched(monkeypatch)
    large.looks.look("large", AttentionCall(logits=torch.randn(1, 1, 1, SMALL + 1), scale=None))
    assert large.heads == [1]


def test_the_call_that_fails_is_the_only_one_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(call: AttentionCall, *args: object, **kwargs: object) -> object:
        if call.shape.heads in {3, 10}:
            raise RuntimeError("no memory for three heads")
        return attention_rows(call, *args, **kwargs)  # type: ignore[arg-type] # handed on

    monkeypatch.setattr(looks_module, "attention_rows", picky)
    watched = Watched(monkeypatch)
    for heads in (2, 3, 5):
        watched.looks.look(heads, fused(heads))
    watched.looks.empty()
    assert watched.found.keys() == {2, 5}
    assert watched.errors == {3: "no memory for three heads"}


def test_a_softmax_that_fails_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    monkeypatch.setattr(looks_module, "softmax_rows", lambda *_, **__: 1 / 0)
    pending = watched.looks.look_at_softmax("broken", by_hand(2, torch.ones(1, 1, Q, K, dtype=torch.bool)))
    assert pending.entries() is None
    assert watched.errors == {"broken": "division by zero"}
    assert pending.entries() is None  # told once


def test_a_call_is_as_it_was_when_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    call, grad = fused(2), torch.randn(B, 2, Q, V)
    wanted = attention_sums(call, CHOSEN, grad_output=grad)
    watched = Watched(monkeypatch)
    watched.looks.look("changed", call, grad)
    for tensor in (call.query, call.key, call.value, grad):
        assert tensor is not None
        tensor.zero_()
    watched.looks.empty()
    assert_alone(watched.found["changed"], wanted)

"""Layers whose rows are pooled side by side have the sums they have alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_monitor import AttentionProbe, pooling
from attn_monitor.catalog import ALL
from attn_monitor.gradients import attention_gradient_rows
from attn_monitor.pooling import LayerRows, pooled
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_rows
from attn_monitor.sums import AttentionSums, finalized
from attn_monitor.waiting import WaitingQueue
from tests.reference import assert_same

B, Q, K, D, V = 3, 17, 19, 7, 5


def layer(heads: int, **changes: object) -> AttentionCall:
    query, key, value = torch.randn(B, heads, Q, D), torch.randn(B, heads, K, D), torch.randn(B, heads, K, V)
    return replace(AttentionCall(query=query, key=key, value=value, scale=0.3), **changes)  # type: ignore[arg-type] # fields by name


def layers() -> list[LayerRows]:
    """Return layers of many kinds, in an order that mixes them."""
    some = torch.rand(B, 1, Q, K) < 0.7
    padding = torch.zeros(B, 1, Q, 1, dtype=torch.bool)
    padding[1, :, 11:] = True
    given = [
        layer(2),
        layer(3, sinks=torch.randn(3)),
        layer(5, scale=torch.rand(5) + 0.1, query_scale=2.0, key_scale=torch.rand(5) + 0.5),
        layer(2, masks=(some,)),
        layer(3, masks=(torch.randn(1, 3, Q, K).masked_fill(~some, -1e9),), softcap=2.0),
        layer(1, masks=(~padding,), padding=padding),
        AttentionCall(logits=torch.randn(B, 2, Q, K) * 30, scale=None),
        layer(5, sinks=torch.randn(5)),
        layer(2, query=torch.full((B, 2, Q, D), torch.inf)),
        layer(3, query=torch.randn(B, 3, Q, D, dtype=torch.float64), key=torch.randn(B, 3, K, D, dtype=torch.float64)),
    ]
    found = [attention_rows(call, ALL) for call in given]
    found += [attention_rows(call, ALL, 7, torch.Generator().manual_seed(3)) for call in given[:3]]
    for call in (given[0], given[1], given[3]):
        grad = torch.randn(*call.shape[:3], V)
        found += [attention_rows(call, ALL, grad_output=grad), attention_gradient_rows(call, grad)]
        found.append(attention_gradient_rows(replace(call, dropout=True), grad, 5))
    return found


def test_layers_side_by_side_have_the_sums_they_have_alone() -> None:
    given = layers()
    together = pooled(given)
    assert [sums.heads for sums in together] == [rows.heads for rows in given]
    records = finalized(together, ALL)
    for rows, sums, record in zip(given, together, records, strict=True):
        [alone] = pooled([rows])
        torch.testing.assert_close(sums.additive, alone.additive, rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(sums.moments, alone.moments, rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(sums.extrema, alone.extrema, rtol=0, atol=0)
        wanted = alone.finalize(ALL)
        assert_same(record, wanted)
        assert (record.head_dim, record.keys, record.calls) == (wanted.head_dim, wanted.keys, wanted.calls)
        assert record.approximate == wanted.approximate
        assert record.standard_error.keys() == wanted.standard_error.keys()
        for name, value in wanted.standard_error.items():
            torch.testing.assert_close(record.standard_error[name], value, equal_nan=True)


def test_fewer_kinds_than_layers_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pool = pooling._pooled

    def counted(members: list[LayerRows]) -> AttentionSums:
        sizes.append(len(members))
        return pool(members)

    monkeypatch.setattr(pooling, "_pooled", counted)
    pooled([attention_rows(layer(heads), ALL) for heads in (2, 3, 5, 7)])
    assert sizes == [4]


def test_a_statistic_that_one_layer_lacks_is_absent_there_alone() -> None:
    broken = layer(2, query=torch.full((B, 2, Q, D), torch.nan))
    fine, empty = finalized(pooled([attention_rows(call, ALL) for call in (layer(3), broken)]), ALL)
    assert fine.entropy is not None
    assert fine.logit_std is not None
    assert (empty.entropy, empty.logit_std, empty.logit_max) == (None, None, None)
    assert empty.nonfinite.tolist() == [B * Q * K] * 2


def test_rows_wait_until_they_are_worth_it() -> None:
    delivered: list[tuple[str, int]] = []
    rows = [attention_rows(layer(heads), ALL) for heads in (2, 3, 5)]
    queue = WaitingQueue[str, LayerRows, AttentionSums](
        pooled,
        lambda key, sums: delivered.append((key, sums.heads)),
        lambda key, error: None,
        rows[0].rows.values + rows[1].rows.values,
    )
    queue.put("a", rows[0], rows[0].rows.values)
    queue.put("b", rows[1], rows[1].rows.values)
    assert delivered == []
    queue.put("c", rows[2], rows[2].rows.values)
    assert delivered == [("a", 2), ("b", 3), ("c", 5)]
    queue.put("d", rows[0], 1)
    queue.clear()
    queue.empty()
    assert len(delivered) == 3


def test_the_layer_that_cannot_be_pooled_is_the_only_one_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    good: list[str] = []
    bad: list[str] = []
    queue = WaitingQueue[str, LayerRows, AttentionSums](
        pooled, lambda key, sums: good.append(key), lambda key, error: bad.append(f"{key}: {error}"), 10**9
    )
    build = AttentionSums.build

    def picky(values: dict[str, Tensor], **more: object) -> AttentionSums:
        if len(values["rows"]) in {3, 10}:  # the second layer, alone or among the others
            raise RuntimeError("no memory for three heads")
        return build(values, **more)  # type: ignore[arg-type] # handed on

    monkeypatch.setattr(AttentionSums, "build", picky)
    for key, heads in {"a": 2, "b": 3, "c": 5}.items():
        queue.put(key, attention_rows(layer(heads), ALL), 1)
    queue.empty()
    assert (good, bad) == (["a", "c"], ["b: no memory for three heads"])


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_each_backward_pass_has_the_scale_of_its_own_loss() -> None:
    model, x = nn.ModuleList([Attention(), Attention()]), torch.randn(2, 3, Q, D, requires_grad=True)
    scales = iter([1.0, 8.0])
    with AttentionProbe(model, grad_scale=lambda: next(scales)) as probe:
        for module, factor in zip(model, (1.0, 8.0), strict=True):
            (module(x).square().sum() * factor).backward()
    one, other = (probe.compute()[name].grad_logits_norm for name in ("0", "1"))
    assert one is not None
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)

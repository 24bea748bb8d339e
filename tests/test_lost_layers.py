"""A layer whose statistics cannot be computed is lost alone, and named, in one process and in several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionProbe, observe_logits
from attn_monitor.metric import AttentionMetric
from attn_monitor.ranks import RankReduction, Seen
from attn_monitor.records import AttentionCall
from attn_monitor.statistics import attention_sums
from attn_monitor.sums import AttentionSums
from tests.attention_inputs import FORWARD
from tests.cases.support import Trained, fit, normal, serve
from tests.models import LIGHTNING_ADVICE
from tests.processes import run_ranks
from tests.reference import assert_matches, softmax_reference

pytestmark = LIGHTNING_ADVICE

ERROR = "ValueError: "
"""What a root says of a negative number, in words that depend on the version of Python."""
NAMES = ("first", "bad", "last")
SIZES = {"first": (3, 5), "bad": (2, 7), "last": (5, 11)}
"""Queries and keys."""


def logits_of(name: str, seed: int = 1) -> Tensor:
    queries, keys = SIZES[name]
    return torch.randn(queries, keys, generator=torch.Generator().manual_seed(seed + len(name)))


def sums_of(name: str, seed: int = 1) -> AttentionSums:
    """Return the sums of a layer; no public function takes the head dimension that the bad one has."""
    call = AttentionCall(logits=logits_of(name, seed)[None, None], scale=None, head_dim=-4 if name == "bad" else 6)
    return attention_sums(call, FORWARD)


def reference(logits: Tensor) -> dict[str, Tensor]:
    return softmax_reference(logits[None, None], torch.ones(logits.shape, dtype=torch.bool))


def test_a_metric_loses_the_layer_alone() -> None:
    metric = AttentionMetric()
    metric.update({name: sums_of(name) for name in NAMES})
    found = metric.compute()
    assert list(found) == ["first", "last"]
    assert list(metric.failures) == ["bad"]
    assert metric.failures["bad"].startswith(ERROR)
    for name, stats in found.items():
        assert_matches(stats, reference(logits_of(name)))
        assert stats.head_dim == 6
    metric.reset()
    metric.update({"last": sums_of("last")})
    assert list(metric.compute()) == ["last"]
    assert metric.failures == {}


class Three(nn.Module):
    """Shows the logits of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            observe_logits(name, logits_of(name), head_dim=6)
        return x * self.weight


def spoil(probe: AttentionProbe) -> None:
    """Give the bad layer a head dimension that no root can be drawn of, once it has been measured."""
    sums = probe._collector.sums
    sums["bad"] = replace(sums["bad"], head_dim=-4)


def test_a_probe_loses_the_layer_alone_and_tells() -> None:
    model = Three()
    with AttentionProbe(model) as probe:
        model(torch.ones(2))
    spoil(probe)
    found = probe.compute()
    assert list(found) == ["first", "last"]
    for name, stats in found.items():
        assert_matches(stats, reference(logits_of(name)))
    assert list(probe.skipped) == ["bad"]
    assert probe.skipped["bad"].startswith(ERROR)
    probe.reset()
    with probe:
        model(torch.ones(2))
    assert list(probe.compute()) == list(NAMES)
    assert dict(probe.skipped) == {}


def test_a_monitor_tells_of_the_layer_once_and_records_the_others() -> None:
    class Spoiling(AttentionMonitor):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            [observer] = self._observers.values()
            observer.end()
            spoil(observer.probe)
            super().on_train_batch_end(*args, **kwargs)

    monitor = Spoiling()
    trainer, said = fit(Trained(Three()), monitor, serve(normal(2, 5)))
    assert trainer.global_step == 2
    assert [list(record) for _, record in monitor.history] == [["first", "last"]] * 2
    [text] = [text for text in said if "not measured" in text]
    assert "bad" in text
    assert ERROR in text


def on_rank(rank: int) -> Any:
    ranks = RankReduction()
    found = []
    for _ in range(2):
        record = ranks.reduce(Seen(sums={name: sums_of(name, seed=rank) for name in NAMES}))
        values = {name: stats.measured() for name, stats in record.statistics.items()}
        found.append((values, dict(record.skipped)))
    return found


@pytest.mark.slow
def test_several_ranks_lose_the_layer_alike() -> None:
    first, second = run_ranks(on_rank, 2)
    for (values, skipped), (others, skipped_there) in zip(first, second, strict=True):
        assert list(values) == list(others) == ["first", "last"]
        assert list(skipped) == ["bad"]
        assert skipped == skipped_there
        assert skipped["bad"].startswith(ERROR)
        for name in values:
            both = torch.cat([logits_of(name, seed) for seed in range(2)])
            wanted = reference(both)
            for statistic in ("logit_mean", "logit_std", "entropy", "logit_max", "jacobian_trace"):
                torch.testing.assert_close(values[name][statistic].double(), wanted[statistic], rtol=1e-5, atol=1e-6)
                assert torch.equal(values[name][statistic], others[name][statistic])

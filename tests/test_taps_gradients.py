"""Gradients through every way activations are kept or thrown away, against autograd."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_same
from tests.tapped import ALLOWED, Attention, B, D, E, H, Net, Path, T, measured


@pytest.mark.parametrize("path", ["fused", "softmax"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("paired", [False, True], ids=["single", "paired"])
@pytest.mark.parametrize("project", [False, True], ids=["bare", "projected"])
@pytest.mark.parametrize("per_call", [False, True], ids=["pooled", "per call"])
def test_checkpointing_changes_no_number(
    path: Path, reentrant: bool, shared: bool, paired: bool, project: bool, per_call: bool
) -> None:
    # Without a projection the attention is the last operation of its region: its gradient comes before the
    # recomputation.
    net = Net(path, shared=shared, paired=paired, project=project)
    x = torch.randn(B, T, E)
    wanted = measured(net, x, per_call=per_call)
    checkpointed = copy.deepcopy(net)
    checkpointed.reentrant = reentrant
    found = measured(checkpointed, x, per_call=per_call)
    assert list(found) == list(wanted)
    assert len(found) == (4 if per_call or not shared else 1)
    for name, stats in wanted.items():
        assert stats.calls == (4 if shared and not per_call else 1)
        assert_same(found[name], stats, relative=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_softmax_gradients_are_those_of_autograd(dropout: float) -> None:
    attention = Attention("softmax", dropout=dropout)
    attention.kept = []
    x = torch.randn(B, T, E)
    with AttentionProbe(attention) as probe:
        attention(x).square().sum().backward()
    stats = probe.compute()["Attention"]
    ((logits, probs),) = attention.kept
    assert logits.grad is not None
    assert probs.grad is not None
    rows = ALLOWED & (ALLOWED.sum(-1, keepdim=True) >= 2)
    norms = [(grad.double() * rows).square().sum((0, 2, 3)).sqrt() for grad in (logits.grad, probs.grad)]
    assert stats.grad_logits_norm is not None
    assert stats.grad_probs_norm is not None
    assert stats.gradient_gain is not None
    torch.testing.assert_close(stats.grad_logits_norm, norms[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(stats.grad_probs_norm, norms[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(stats.gradient_gain, norms[0] / norms[1], rtol=1e-6, atol=0)
    assert stats.approximate == frozenset()  # dropout comes after the softmax, and is seen


def test_dropout_inside_a_kernel_makes_its_gradients_approximate() -> None:
    attention = Attention("fused", dropout=0.3)
    stats = measured(attention, torch.randn(B, T, E))["Attention"]
    assert stats.approximate == {"grad_logits_norm", "grad_probs_norm", "gradient_gain"}


def test_gradients_are_divided_by_the_scale_that_holds_in_the_backward_pass() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    wanted = measured(net, x)
    scale = 1.0
    with AttentionProbe(net, grad_scale=lambda: scale) as probe:
        loss = net(x).square().mean() * 1024
        scale = 1024.0
        loss.backward()
    for name, stats in probe.compute().items():
        assert_same(stats, wanted[name], relative=1e-6)


def test_squares_of_two_backward_passes_add() -> None:
    net, x = Net("softmax"), torch.randn(B, T, E)
    with AttentionProbe(net) as probe:
        for _ in range(2):
            net(x).square().mean().backward()
    once, twice = measured(net, x), probe.compute()
    halves = probe.compute(losses=2)
    for name, stats in once.items():
        assert stats.grad_logits_norm is not None
        assert twice[name].calls == 2
        torch.testing.assert_close(twice[name].grad_logits_norm, stats.grad_logits_norm * 2**0.5)
        torch.testing.assert_close(halves[name].grad_logits_norm, stats.grad_logits_norm / 2**0.5)


def test_frozen_attention_has_statistics_and_no_gradients() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    net.blocks[0].requires_grad_(False)
    with AttentionProbe(net) as probe:
        net(x).square().mean().backward()  # the input takes no gradient, so nothing flows into the first block
    found = probe.compute()
    assert found["blocks.0"].grad_logits_norm is None
    assert found["blocks.0"].logit_std is not None
    assert found["blocks.1"].grad_logits_norm is not None


def test_no_gradients_are_absent_and_not_zero() -> None:
    net, x = Net("softmax"), torch.randn(B, T, E)
    with AttentionProbe(net) as probe, torch.no_grad():
        net(x)
    assert all(stats.grad_logits_norm is None for stats in probe.compute().values())
    with AttentionProbe(net, gradients=False) as probe:
        net(x).sum().backward()
    assert all(stats.gradient_gain is None for stats in probe.compute().values())


def test_gradients_under_autocast_are_near_those_without() -> None:
    for path in ("fused", "softmax"):
        net, x = Net(path), torch.randn(B, T, E)
        wanted = measured(net, x)
        with AttentionProbe(net) as probe:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x).square().mean()
            loss.backward()
        for name, stats in probe.compute().items():
            assert stats.grad_logits_norm is not None
            assert wanted[name].grad_logits_norm is not None
            torch.testing.assert_close(stats.grad_logits_norm, wanted[name].grad_logits_norm, rtol=0.05, atol=0)


def test_offloaded_activations_keep_their_gradients() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    wanted = measured(net, x)
    with AttentionProbe(net) as probe:
        with torch.autograd.graph.save_on_cpu():
            loss = net(x).square().mean()
        loss.backward()
    for name, stats in probe.compute().items():
        assert_same(stats, wanted[name], relative=1e-6)


def test_a_checkpointed_function_outside_of_any_module_says_what_it_lacks() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.attend, x, use_reentrant=False)
            return out

    net = Root()
    with AttentionProbe(net) as probe:
        net(torch.randn(B, T, E)).sum().backward()
    stats = probe.compute()["Root"]
    assert stats.calls == 1
    assert stats.logit_std is not None
    assert stats.grad_logits_norm is None
    assert "not measured" in probe.notes["Root"]


def test_nothing_is_kept_between_forward_and_recomputation() -> None:
    net = Net("fused")
    net.reentrant = False
    seen: list[int] = []
    with AttentionProbe(net) as probe:
        loss = net(torch.randn(B, T, E)).square().mean()
        seen = [slot.payload is not None for slot in probe._collector._taps._slots]
        loss.backward()
    assert seen == [False] * 4


@pytest.mark.parametrize("path", ["fused", "softmax"])
@pytest.mark.parametrize("saved", ["everything", "transpose", "mm"])
def test_selective_checkpointing_does_not_see_our_operations(path: Path, saved: str) -> None:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        must = saved == "everything" or saved in str(operator)
        return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attention(path)

        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            out: Tensor = checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)
            return out

    def gradients(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model, x = Selective(), torch.randn(B, T, E, requires_grad=True)
    alone = gradients(model)
    with AttentionProbe(model) as probe:
        watched = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert not probe.skipped
    assert probe.compute()["block"].grad_logits_norm is not None


# -- the forward pass waits for the backward pass ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", ["fused", "softmax"])
def test_sampled_rows_estimate_the_gradients(path: Path) -> None:
    torch.manual_seed(0)
    attention = Attention(path)
    x = torch.randn(B, T, E)

    def norms(**options: Any) -> AttentionStatistics:
        with AttentionProbe(attention, **options) as probe:
            attention(x).square().sum().backward()
        return probe.compute()["Attention"]

    exact = norms()
    assert exact.grad_logits_norm is not None
    assert exact.approximate == frozenset()
    squares = []
    with AttentionProbe(attention, max_queries=3) as probe:
        for _ in range(300):
            attention(x).square().sum().backward()
            stats = probe.compute()["Attention"]
            assert stats.grad_logits_norm is not None
            assert {"grad_logits_norm", "grad_probs_norm", "gradient_gain"} <= stats.approximate
            squares.append(stats.grad_logits_norm.square())
            probe.reset()
    seen = torch.stack(squares)
    error = seen.std(0) / math.sqrt(len(seen))
    assert (seen.std(0) > 0.05 * seen.mean(0)).all()  # or else nothing is sampled
    assert ((seen.mean(0) - exact.grad_logits_norm.square()).abs() < 4 * error).all()

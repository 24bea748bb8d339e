"""Gradients through every way activations are kept or thrown away, against autograd."""

from __future__ import annotations

import copy
import functools
import gc
import math
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attn_monitor import AttentionProbe, AttentionStatistics, looks, passes
from tests.reference import assert_same

B, H, T, D = 5, 3, 7, 11
E = H * D
ALLOWED = torch.ones(T, T, dtype=torch.bool).tril()

Path = Literal["fused", "softmax"]


class Attention(nn.Module):
    """Causal attention, with or without an output projection behind it."""

    def __init__(self, path: Path, project: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E) if project else nn.Identity()
        self.path = path
        self.dropout = dropout
        self.kept: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.path == "fused":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            logits = (q @ k.mT / math.sqrt(D)).masked_fill(~ALLOWED, -1e4)
            probs = F.softmax(logits, dim=-1)
            if self.kept is not None:
                logits.retain_grad()
                probs.retain_grad()
                self.kept.append((logits, probs))
            out = F.dropout(probs, self.dropout) @ v
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result


class Net(nn.Module):
    """Four residual attentions, of one shared module or several, in checkpointed regions of one or two."""

    def __init__(self, path: Path, *, shared: bool = False, paired: bool = False, project: bool = True) -> None:
        super().__init__()
        blocks = [Attention(path, project) for _ in range(1 if shared else 4)]
        self.blocks = nn.ModuleList(blocks)
        self.shared, self.paired = shared, paired
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        blocks = [self.blocks[0]] * 4 if self.shared else list(self.blocks)
        regions = [blocks[:2], blocks[2:]] if self.paired else [[block] for block in blocks]
        for region in regions:
            run = nn.Sequential(*region)
            x = x + (run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant))
        return x


def measured(net: nn.Module, x: Tensor, **options: Any) -> Mapping[str, AttentionStatistics]:
    with AttentionProbe(net, **options) as probe:
        net(x.clone().requires_grad_()).square().mean().backward()
    assert not probe.skipped
    assert not probe.notes
    return probe.compute()


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


def forward_alone(net: nn.Module, x: Tensor) -> Mapping[str, AttentionStatistics]:
    with AttentionProbe(net, gradients=False) as probe:
        net(x)
    return probe.compute()


def test_one_look_in_the_backward_pass_gives_the_numbers_of_two() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    found, wanted = measured(net, x), forward_alone(net, x)
    assert list(found) == list(wanted) == [f"blocks.{index}" for index in range(4)]
    for name, stats in wanted.items():
        for statistic, value in stats.measured().items():
            torch.testing.assert_close(getattr(found[name], statistic), value, rtol=1e-6, atol=1e-7, msg=statistic)
        assert (found[name].calls, found[name].keys) == (1, T)


def test_numbers_asked_for_before_the_backward_pass_are_there_and_counted_once() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    with AttentionProbe(net) as probe:
        loss = net(x).square().mean()
        early = probe.compute()
        loss.backward()
    late, wanted = probe.compute(), measured(net, x)
    for name, stats in wanted.items():
        assert early[name].calls == late[name].calls == 1
        assert early[name].grad_logits_norm is None
        torch.testing.assert_close(early[name].entropy, stats.entropy)
        assert_same(late[name], stats, relative=1e-6)


def test_a_graph_that_is_dropped_leaves_its_forward_statistics() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    with AttentionProbe(net) as probe:
        net(x)  # its output, and so its graph, is gone at once
        out = net(x)
        net(x).sum().backward()
    del out
    stats, wanted = probe.compute(), forward_alone(net, x)
    for name, alone in wanted.items():
        assert stats[name].calls == 3
        torch.testing.assert_close(stats[name].entropy, alone.entropy)
        assert stats[name].grad_logits_norm is not None


def test_a_second_backward_pass_through_a_graph_adds_gradients_alone() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    with AttentionProbe(net) as probe:
        loss = net(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    stats = probe.compute()["blocks.0"]
    once = measured(net, x)["blocks.0"]
    assert (stats.calls, stats.rows.tolist()) == (1, once.rows.tolist())
    assert stats.grad_logits_norm is not None
    assert once.grad_logits_norm is not None
    torch.testing.assert_close(stats.grad_logits_norm, once.grad_logits_norm * math.sqrt(2))


class Fused(nn.Module):
    """A kernel on its own arguments."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


def made(*shape: int) -> Tensor:
    """Return a tensor that is a result, as queries and keys are."""
    return torch.mul(torch.randn(*shape).requires_grad_(), 1.0)


@pytest.mark.parametrize("what", ["cache", "weight", "mask"])
@pytest.mark.parametrize("backward", [False, True])
def test_what_may_legally_change_after_the_call_does_not_wait(what: str, backward: bool) -> None:
    net, query = Fused(), made(B, H, T, D)
    cache, mask = torch.randn(B, H, T + 2, D), torch.ones(T, T, dtype=torch.bool).tril()
    weight = nn.Parameter(torch.randn(B, H, T, D))
    arguments = {"cache": (query, cache[:, :, :T]), "weight": (weight, query), "mask": (query, query, mask)}[what]
    with AttentionProbe(net, gradients=False) as probe:
        net(*arguments)
    wanted = probe.compute()["Fused"]
    with AttentionProbe(net) as probe:
        out = net(*arguments)
        if what == "cache" and not backward:
            cache.mul_(3)  # a backward pass would need it as it was
        if what == "weight":
            weight.data = weight.data.clone() if backward else weight.data.mul_(100)
        if what == "mask":
            mask.fill_(True)
        if backward:
            out.sum().backward()
    assert dict(probe.skipped) == {}
    found = probe.compute()["Fused"]
    assert (found.grad_logits_norm is None) == (not backward or what == "mask")
    if what == "mask" and backward:
        assert "gradients not measured: query, key, value or mask was changed" in probe.notes["Fused"]
    for name, value in wanted.measured().items():
        torch.testing.assert_close(getattr(found, name), value, msg=name)


def test_a_result_changed_in_place_before_it_is_measured_is_no_number() -> None:
    net, query = Fused(), made(B, H, T, D)
    with AttentionProbe(net) as probe:
        out = net(query, query)
        query.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        del out
    assert dict(probe.compute()) == {}
    assert "changed in place after the call" in probe.skipped["Fused"]


def test_nothing_is_computed_where_a_graph_is_dropped() -> None:
    net, query = Fused(), made(B, H, T, D)

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with AttentionProbe(net) as probe:
        out = [net(query, query)]
        with Count() as count:
            out.clear()
        assert count.calls == 0
    assert probe.compute()["Fused"].calls == 1


def test_graphs_dropped_in_other_threads_lose_no_call() -> None:
    net, query = Fused(), made(B, H, T, D)
    with AttentionProbe(net) as probe:
        for _ in range(40):
            box = [net(query, query)]
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
    assert probe.compute()["Fused"].calls == 40


def test_a_graph_that_goes_during_a_measurement_does_not_disturb_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net, query, other = Fused(), made(B, H, T, D), made(B, H, T, D) * 7
    wanted = []
    for one in (query, other):
        with AttentionProbe(net) as probe:
            net(one, one).sum().backward(retain_graph=True)
        wanted.append(probe.compute()["Fused"])
    inner = passes._probabilities

    def collecting(*args: Any) -> None:
        gc.collect()
        inner(*args)

    with AttentionProbe(net) as probe:
        cycle: list[Any] = [net(other, other)]
        cycle.append(cycle)
        loss = net(query, query).sum()
        del cycle
        monkeypatch.setattr(passes, "_probabilities", collecting)
        loss.backward()
    found = probe.compute()["Fused"]
    assert found.calls == 2
    assert found.grad_logits_norm is not None
    torch.testing.assert_close(found.grad_logits_norm, wanted[0].grad_logits_norm)
    assert found.entropy is not None
    assert wanted[0].entropy is not None
    assert wanted[1].entropy is not None
    torch.testing.assert_close(found.entropy, (wanted[0].entropy + wanted[1].entropy) / 2)


def test_an_interrupt_at_the_last_measurement_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    net, query = Fused(), made(B, H, T, D)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    probe = AttentionProbe(net)
    with monkeypatch.context() as patch:
        patch.setattr(looks, "attention_rows", interrupted)
        with pytest.raises(KeyboardInterrupt), probe:
            out = net(query, query)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    out.sum().backward()  # no hook of ours is left on the graph
    assert dict(probe.compute()) == {}


def test_after_detaching_nothing_of_the_model_is_kept() -> None:
    net, x = Net("fused"), torch.randn(B, T, E)
    kept: list[weakref.ref[Tensor]] = []

    def hook(module: nn.Module, inputs: Any, out: Tensor) -> None:
        kept.append(weakref.ref(out))

    for block in net.blocks:
        block.qkv.register_forward_hook(hook)  # type: ignore[union-attr] # a Linear
    with AttentionProbe(net) as probe:
        loss = net(x).mean()
    del loss
    gc.collect()
    assert len(kept) == 4
    assert [reference() for reference in kept] == [None] * 4
    assert probe.compute()["blocks.0"].calls == 1


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

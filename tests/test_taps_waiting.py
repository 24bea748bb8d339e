"""The forward pass waits for the backward pass: one look at both, and graphs that never get there."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_monitor import AttentionProbe, AttentionStatistics, looks, passes
from tests.reference import assert_same
from tests.tapped import B, D, E, H, Net, T, measured


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

"""The probe disturbs no training: not its numbers, not its modes, not by an error of its own, not when compiled."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_monitor import AttentionProbe
from attn_monitor import looks as looks_module
from tests.probing import Net, sdpa, softmax
from tests.reference import assert_same
from tests.spellings import SPELLINGS, Attention, B, D, E, H, T

# -- it disturbs nothing ----------------------------------------------------------------------------------------------


def train(net: nn.Module, steps: int = 5) -> list[Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(B, T, E)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [parameter.grad for parameter in net.parameters()]
    return [*losses, *grads, *net.state_dict().values(), torch.get_rng_state()]


def test_training_is_bit_identical() -> None:
    net = Net()
    watched = copy.deepcopy(net)
    torch.manual_seed(1)
    alone = train(net)
    torch.manual_seed(1)
    with AttentionProbe(watched) as probe:
        together = train(watched)
    assert probe.compute()["layers.0"].calls == 5
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_bit_identical_with_dropout(need_weights: bool) -> None:
    attention = nn.MultiheadAttention(E, H, dropout=0.3, batch_first=True)
    x = torch.randn(B, T, E)

    def run() -> list[Tensor]:
        torch.manual_seed(2)
        out, weights = attention(x, x, x, need_weights=need_weights)
        return [out, torch.get_rng_state(), *([weights] if need_weights else [])]

    alone = run()
    with AttentionProbe(attention):
        together = run()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_in_place_operations_behind_the_attention_work() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attn(query=x, key=x, value=x, need_weights=False)[0]
            y += x
            return F.relu_(y)

    model, x = Block(), torch.randn(B, T, E)
    with AttentionProbe(model) as probe:
        model(x).sum().backward()
    assert probe.compute()["attn"].grad_logits_norm is not None


class Synchronised(AssertionError):
    """Something read a tensor on the host."""


class NoSync(TorchDispatchMode):
    """Fails where a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten.equal,
        }:
            raise Synchronised(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("visible_operations")
@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda attend: attend.__name__)
def test_nothing_waits_for_the_device_while_the_model_runs(attend: Any) -> None:
    attention = Attention(attend)
    with AttentionProbe(attention) as probe, NoSync():  # type: ignore[no-untyped-call] # torch has no hints for it
        attention(torch.randn(B, T, E)).square().sum().backward()
    if attend.__name__ != "indexed_fill":  # its own fill waits
        assert not probe.skipped
        assert probe.compute()["Attention"].grad_logits_norm is not None


def test_modes_of_the_users_do_not_see_our_functions() -> None:
    calls: list[str] = []

    class Count(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    attention, x = Attention(softmax), torch.randn(B, T, E)
    with Count():
        attention(x).sum().backward()
    alone = list(calls)
    calls.clear()
    with Count(), AttentionProbe(attention):
        attention(x).sum().backward()
    assert calls == alone


# -- errors of our own ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["forward", "backward"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Break a statistic, in the forward or in the backward pass."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    if request.param == "forward":
        monkeypatch.setattr(looks_module, "attention_rows", fail)
        monkeypatch.setattr(looks_module, "softmax_rows", fail)
    else:
        monkeypatch.setattr(looks_module, "attention_rows", fail)
        monkeypatch.setattr(looks_module, "attention_gradient_rows", fail)
        monkeypatch.setattr(looks_module, "softmax_gradient_sums", fail)
    return request.param


def test_a_statistic_that_raises_does_not_reach_the_training(broken: str) -> None:
    net = Net()
    watched = copy.deepcopy(net)
    torch.manual_seed(1)
    alone = train(net, steps=2)
    torch.manual_seed(1)
    with AttentionProbe(watched) as probe:
        together = train(watched, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert dict(probe.compute()) == {}
    assert probe.skipped == dict.fromkeys(["layers.0", "layers.1"], "ZeroDivisionError: ours")


def test_after_a_reset_a_failed_layer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net(), torch.randn(B, T, E)
    probe = AttentionProbe(net)
    with monkeypatch.context() as patch:
        patch.setattr(looks_module, "attention_rows", lambda *_, **__: 1 / 0)
        patch.setattr(looks_module, "softmax_rows", lambda *_, **__: 1 / 0)
        with probe:
            net(x)
    assert len(probe.skipped) == 2
    probe.reset()
    with probe:
        net(x)
    assert (len(probe.skipped), len(probe.compute())) == (0, 2)


def test_errors_of_the_model_stay_its_own() -> None:
    attention = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k[..., :-1], v))
    with pytest.raises(RuntimeError), AttentionProbe(attention) as probe:
        attention(torch.randn(B, T, E))
    assert probe.skipped == {}


def test_non_finite_logits_are_counted_and_the_rest_is_measured() -> None:
    attention = Attention(softmax)
    x = torch.randn(B, T, E)
    clean = AttentionProbe(attention)
    with clean:
        attention(x[1:])
    poisoned = x.clone()
    poisoned[0, T - 1] = math.nan
    with AttentionProbe(attention) as probe:
        attention(poisoned)
    stats = probe.compute()["Attention"]
    assert stats.nonfinite.tolist() == [T] * H  # the last query of the first item, with every key it sees
    assert stats.rows.tolist() == [B * T] * H
    for value in stats.measured().values():
        assert bool(value.isfinite().all())


@pytest.mark.parametrize("attend", [sdpa, softmax], ids=["fused", "softmax"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_query_that_overflowed_is_not_taken_for_a_mask(attend: Any, bad: float) -> None:
    def overflowing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        poison = torch.zeros(T, 1).index_fill(0, torch.tensor(T - 1), bad)
        out: Tensor = attend(q + poison, k, v)
        return out

    attention = Attention(overflowing)
    with AttentionProbe(attention) as probe:
        attention(torch.randn(B, T, E))
    assert probe.compute()["Attention"].nonfinite.tolist() == [B * T] * H


# -- compiled models --------------------------------------------------------------------------------------------------


# Dynamo looks at .grad of every tensor that enters a graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("part", ["whole", "block"])
def test_compiled_models_are_seen_and_not_compiled_again(fullgraph: bool, part: str) -> None:
    torch._dynamo.reset()
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compilations.append(1)
        return graph.forward

    net = Net().eval()
    if part == "whole":
        model: Any = torch.compile(net, backend=backend, fullgraph=fullgraph)
    else:
        model = net
        for layer in net.layers:
            layer.compile(backend=backend, fullgraph=fullgraph)
    x = torch.randn(B, T, E)
    model(x)
    before = len(compilations)
    assert before >= 1
    probe = AttentionProbe(model)
    for _ in range(2):
        with probe:
            model(x).sum().backward()
        model(x)
    assert len(compilations) == before
    found = probe.compute()
    assert {name: stats.calls for name, stats in found.items()} == {"layers.0": 2, "layers.1": 2}
    with AttentionProbe(net) as eager, torch.compiler.set_stance("force_eager"):
        net(x).sum().backward()
        net(x).sum().backward()
    for name, stats in eager.compute().items():
        assert_same(found[name], stats)


def test_a_stance_of_the_users_survives() -> None:
    net, x = Net(), torch.randn(B, T, E)
    with torch.compiler.set_stance("fail_on_recompile"):
        with AttentionProbe(net):
            net(x)
        assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_head_dim_is_the_width_of_query_and_key_not_of_the_value() -> None:
    attention = Attention(lambda q, k, v: F.pad(F.scaled_dot_product_attention(q, k, v[..., :5]), (0, D - 5)))
    with AttentionProbe(attention) as probe:
        attention(torch.randn(B, T, E)).sum().backward()
    stats = probe.compute()["Attention"]
    assert stats.head_dim == D
    assert stats.grad_logits_norm is not None

"""The probe itself: what it accepts, that it disturbs nothing, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
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
from tests.reference import assert_same
from tests.spellings import SPELLINGS, Attention, B, D, E, H, T

sdpa, softmax = SPELLINGS[0], SPELLINGS[5]


def hooks(model: nn.Module) -> int:
    """Count every hook on every module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def modes() -> int:
    depth: int = torch._C._len_torch_function_stack()
    return depth


class Net(nn.Module):
    """Two residual attentions, fused and by hand, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(sdpa), Attention(softmax)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x


# -- what it accepts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"statistics": ["entropy", "nope"]}, ValueError, r"Unknown statistics \['nope'\]. Choose from \['logit_mean'"),
        ({"statistics": "entropy"}, TypeError, r"list of names, got 'entropy'"),
        ({"statistics": []}, ValueError, "empty"),
        ({"max_queries": 0}, ValueError, "positive integer or None, got 0"),
        ({"max_queries": 2.5}, TypeError, "positive integer or None, got 2.5"),
        ({"max_queries": True}, TypeError, "positive integer"),
        ({"grad_scale": 0.0}, ValueError, "positive finite number, got 0.0"),
        ({"grad_scale": math.nan}, ValueError, "positive finite number, got nan"),
        ({"grad_scale": "1"}, TypeError, "number or a callable"),
        ({"gradients": "yes"}, TypeError, "`gradients` expects True or False, got 'yes'"),
        ({"per_call": 1}, TypeError, "`per_call` expects True or False, got 1"),
        ({"modules": 3}, TypeError, "name or glob, a module type, a predicate"),
        ({"modules": dict}, TypeError, "not a torch.nn.Module"),
        ({"modules": []}, ValueError, "selects nothing"),
        ({"modules": nn.Linear(1, 1)}, TypeError, "a module itself"),
    ],
)
def test_bad_arguments_fail_at_construction(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttentionProbe(Net(), **options)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"expects a torch.nn.Module, got function"):
        AttentionProbe(lambda x: x)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_lists_the_modules_and_attaches_nothing() -> None:
    net = Net()
    probe = AttentionProbe(net, modules="encoder.*")
    with pytest.raises(ValueError, match=r"'encoder.\*' matches no module.*layers.0, layers.0.qkv"):
        probe.attach()
    assert hooks(net) == 0
    with pytest.raises(ValueError, match="matches no module"):
        probe.check_modules()


@pytest.mark.parametrize(("wrong", "first"), [("*.self_atn", "0.self_attn"), ("40.self_attn.*", "40.self_attn")])
def test_a_pattern_that_matches_nothing_in_a_large_model_lists_what_is_most_like_it(wrong: str, first: str) -> None:
    layers = [nn.ModuleDict({"mlp": nn.Linear(1, 1), "self_attn": nn.Linear(1, 1)}) for _ in range(50)]
    with pytest.raises(ValueError, match="matches no module") as caught:
        AttentionProbe(nn.Sequential(*layers), modules=wrong).attach()
    listed = str(caught.value).partition("at least one of: ")[2].split(", ")
    assert listed[0] == first
    assert len(listed) == 21
    assert listed[20] == "... and 130 more."


@pytest.mark.parametrize("modules", [("layers.1" for _ in range(1)), {"layers.1"}, map(str, ["layers.1"])], ids=type)
def test_a_choice_that_can_be_read_once_holds_for_every_attachment(modules: Any) -> None:
    net, x = Net(), torch.randn(B, T, E)
    probe = AttentionProbe(net, modules=modules)
    for _ in range(2):
        with probe:
            net(x)
        assert list(probe.compute()) == ["layers.1"]


def test_a_generator_that_yields_nothing_selects_nothing() -> None:
    nothing: Any = iter(())
    with pytest.raises(ValueError, match="selects nothing"):
        AttentionProbe(Net(), modules=nothing)


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        (None, ["layers.0", "layers.1"]),
        ("layers.1", ["layers.1"]),
        ("layers", ["layers.0", "layers.1"]),
        ("*.0", ["layers.0"]),
        (Attention, ["layers.0", "layers.1"]),
        (lambda name, module: name.endswith("1"), ["layers.1"]),
        (["layers.0", lambda name, module: name == "layers.1"], ["layers.0", "layers.1"]),
        ("layers.0.qkv", []),
    ],
)
def test_modules_select_the_attention_inside_them(modules: Any, found: list[str]) -> None:
    net = Net()
    with AttentionProbe(net, modules=modules) as probe:
        net(torch.randn(B, T, E))
    assert list(probe.compute()) == found


def test_statistics_that_are_not_chosen_are_none() -> None:
    net = Net()
    with AttentionProbe(net, statistics=["logit_std", "q_rms"]) as probe:
        net(torch.randn(B, T, E)).sum().backward()
    for stats in probe.compute().values():
        assert stats.measured().keys() == {
            *("logit_std", "q_rms", "scale", "scale_ratio", "rows", "masked_rows", "nonfinite")
        }


def test_sampled_rows_leave_the_extrema_out_and_say_so() -> None:
    net, x = Net(), torch.randn(B, T, E)
    state = torch.get_rng_state()
    with AttentionProbe(net.eval(), max_queries=3) as probe:
        net(x)
    assert torch.equal(torch.get_rng_state(), state)
    stats = probe.compute()["layers.0"]
    assert stats.rows.tolist() == [B * 3] * H
    assert stats.logit_max is None
    assert "logit_std" in stats.approximate


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_root_is_shown_by_its_class_and_found_by_its_empty_name() -> None:
    attention = Attention(sdpa)
    with AttentionProbe(attention) as probe:
        attention(torch.randn(B, T, E))
    found = probe.compute()
    assert list(found) == ["Attention"]
    assert found[""] is found["Attention"]
    assert "" in found
    assert pickle.loads(pickle.dumps(found))[""].heads == H
    with pytest.raises(KeyError, match=r"no attention was measured in 'layers.7'; measured: Attention"):
        found["layers.7"]


class Wrapper(nn.Module):
    """What FSDP and activation checkpointing do: the wrapped module under another name."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inner)

    def forward(self, *args: Any) -> Any:
        return getattr(self, self.name)(*args)


class DistributedDataParallel(Wrapper):
    """Named as the real one, which needs a process group."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__("module", inner)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: torch.compile(net, backend="eager"),
        DistributedDataParallel,
        lambda net: Wrapper("_fsdp_wrapped_module", net),
        lambda net: Wrapper("_forward_module", net),  # Fabric
        lambda net: DistributedDataParallel(torch.compile(net, backend="eager")),  # type: ignore[arg-type]
        lambda net: torch.compile(DistributedDataParallel(net), backend="eager"),
    ],
)
def test_wrappers_do_not_show_in_names(wrap: Callable[[nn.Module], Any]) -> None:
    net = Net()
    net.layers[0] = Wrapper("_checkpoint_wrapped_module", net.layers[0])
    model = wrap(net)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    assert list(probe.compute()) == ["layers.0", "layers.1"]


def test_a_module_of_the_users_called_module_keeps_its_name() -> None:
    model = Wrapper("module", Net())
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    assert list(probe.compute()) == ["module.layers.0", "module.layers.1"]


def test_adapters_of_peft_do_not_show_in_names() -> None:
    class LoraModel(Wrapper):
        __module__ = "peft.tuners.lora.model"

    class PeftModel(Wrapper):
        pass

    net = Net()
    net.layers[0] = Wrapper("base_layer", net.layers[0])
    model = PeftModel("base_model", LoraModel("model", net))
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    assert list(probe.compute()) == ["layers.0", "layers.1"]


def test_each_call_of_a_shared_module_can_have_a_record() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attention(sdpa)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.block(x)
            return x

    model, x = Shared(), torch.randn(B, T, E)
    with AttentionProbe(model) as pooled:
        model(x)
    with AttentionProbe(model, per_call=True) as split:
        for _ in range(2):
            model(x)
    assert {name: stats.calls for name, stats in pooled.compute().items()} == {"block": 3}
    assert {name: stats.calls for name, stats in split.compute().items()} == {"block@0": 2, "block@1": 2, "block@2": 2}


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
    with AttentionProbe(attention) as probe, NoSync():  # type: ignore[no-untyped-call]
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


# -- it leaves nothing behind -----------------------------------------------------------------------------------------


def test_hooks_and_modes_are_gone_after_the_block() -> None:
    net = Net()
    handle = net.layers[0].register_forward_hook(lambda *_: None)
    with AttentionProbe(net) as probe:
        assert hooks(net) > 1
        net(torch.randn(B, T, E)).sum().backward()
        assert modes() == 0  # between calls too
    assert (hooks(net), modes()) == (1, 0)
    handle.remove()
    assert probe.compute()["layers.0"].calls == 1  # what was collected stays


class Interrupted(nn.Module):
    """Raises in the middle of its forward, behind an attention."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.attention = Attention(sdpa)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.attention(x)
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit()])
def test_nothing_is_left_after_an_exception(error: BaseException) -> None:
    model = nn.Sequential(Interrupted(error))
    probe = AttentionProbe(model)
    with pytest.raises(type(error)), probe:
        model(torch.randn(B, T, E))
    assert (hooks(model), modes()) == (0, 0)


def test_a_mode_of_the_users_survives_ours() -> None:
    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    other = Other()

    class Enters(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            other.__enter__()  # type: ignore[no-untyped-call]
            raise KeyboardInterrupt

    model = Enters()
    with pytest.raises(KeyboardInterrupt), AttentionProbe(model):
        model(torch.randn(1))
    assert modes() == 1
    assert torch._C._get_function_stack_at(0) is other
    other.__exit__(None, None, None)


def test_no_tensor_of_the_run_is_kept_alive() -> None:
    net = Net()
    x = torch.randn(B, T, E)
    alive = [weakref.ref(x)]

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        alive.append(weakref.ref(out))

    handles = [module.register_forward_hook(keep) for module in net.modules()]
    with AttentionProbe(net) as probe:
        loss = net(x).square().mean()
        loss.backward()
    del x, loss
    for handle in handles:
        handle.remove()
    gc.collect()
    assert len(alive) > 5
    assert [ref for ref in alive if ref() is not None] == []
    assert not any(value.requires_grad for s in probe.compute().values() for value in s.measured().values())


def test_hooks_on_the_graph_are_gone_too() -> None:
    net = Net()
    with AttentionProbe(net) as probe:
        loss = net(torch.randn(B, T, E)).square().mean()
    loss.backward()  # outside: not measured
    assert all(stats.grad_logits_norm is None for stats in probe.compute().values())


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    net, x = Net(), torch.randn(B, T, E)
    with AttentionProbe(net) as probe:
        copied = copy.deepcopy(net)
        buffer = io.BytesIO()
        torch.save(net.layers[0].qkv, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        copied(x)
        loaded(x)
        assert dict(probe.compute()) == {}
        net(x)
    assert list(probe.compute()) == ["layers.0", "layers.1"]


def test_only_owners_are_hooked_the_second_time_and_new_places_are_found() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.late = Attention(sdpa), nn.Linear(E, E), Attention(sdpa)
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            x = self.second(self.first(x))
            return self.late(x) if self.step >= 3 else x

    model, x = Late(), torch.randn(B, T, E)
    probe = AttentionProbe(model)
    found, hooked = [], []
    for _ in range(4):
        with probe:
            hooked.append({n for n, m in model.named_modules() if m._forward_hooks})
            model(x)
        found.append(list(probe.compute()))
        probe.reset()
    assert found == [["first"], ["first"], ["first", "late"], ["first", "late"]]
    assert "second" in hooked[0]
    assert hooked[1] == {"", "first", "late", "late.qkv", "late.out"}  # what was not called yet stays in discovery
    assert hooked[3] == {"", "first", "late"}


def test_attention_that_appears_in_a_known_module_is_found_at_the_next_attachment() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.other = Attention(sdpa), Attention(lambda q, k, v: v)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.other(self.block(x))
            return out

    model, x = Switch(), torch.randn(B, T, E)
    probe = AttentionProbe(model)
    found = []
    for step in range(3):
        if step == 1:
            model.other.attend = sdpa
        with probe:
            model(x)
        found.append(list(probe.compute()))
        probe.reset()
    assert found == [["block"], ["block"], ["block", "other"]]


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


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_probes_leave_in_any_order(first_out: int) -> None:
    net, x = Net(), torch.randn(B, T, E)
    probes = [AttentionProbe(net), AttentionProbe(net)]
    for probe in probes:
        probe.attach(methods=("forward",))
    net(x)
    probes[first_out].detach()
    net(x)
    probes[1 - first_out].detach()
    assert (hooks(net), modes()) == (0, 0)
    assert "forward" not in vars(net)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    calls = [probe.compute()["layers.0"].calls for probe in probes]
    assert calls[first_out] == 1
    assert calls[1 - first_out] == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_teacher_in_eval_mode_keeps_its_fast_path(frozen: bool) -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 13, batch_first=True)
            self.teacher = nn.TransformerEncoder(layer, 2).eval().requires_grad_(not frozen)
            self.student = Attention(sdpa)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(x[..., :32], src_key_padding_mask=padding)
            return (self.student(x)[..., :32] - wanted).square().mean()

    model, x = Distilled(), torch.randn(B, T, E)
    model.teacher.eval()
    padding = torch.arange(T) >= torch.tensor([[T], [T - 3], [T], [T - 1], [T]])
    alone = model(x, padding)
    probe = AttentionProbe(model)
    for _ in range(2):
        with probe:
            watched = model(x, padding)
        assert torch.equal(watched, alone)
    assert list(probe.compute()) == ["student"]
    assert "fast path" in probe.skipped["teacher"]
    assert (hooks(model), "forward" in vars(model.teacher), modes()) == (0, False, 0)


def test_each_entry_of_a_choice_must_match() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"'layers\.9' in `modules` matches no module.*layers\.0"):
        AttentionProbe(net, modules=["layers.0", "layers.9"]).attach()
    with AttentionProbe(net, modules=["layers.0", "layers.1"]) as probe:
        net(torch.randn(B, T, E))
    assert list(probe.compute()) == ["layers.0", "layers.1"]

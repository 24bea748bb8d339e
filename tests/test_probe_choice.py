"""What the probe accepts, which modules it chooses, and under which names it finds them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from tests.probing import Net, hooks, sdpa
from tests.spellings import Attention, B, E, H, T

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
        AttentionProbe(lambda x: x)  # type: ignore[arg-type] # the mistake


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
        lambda net: DistributedDataParallel(torch.compile(net, backend="eager")),  # type: ignore[arg-type] # it stays a module
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


# -- compiled models --------------------------------------------------------------------------------------------------


def test_each_entry_of_a_choice_must_match() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"'layers\.9' in `modules` matches no module.*layers\.0"):
        AttentionProbe(net, modules=["layers.0", "layers.9"]).attach()
    with AttentionProbe(net, modules=["layers.0", "layers.1"]) as probe:
        net(torch.randn(B, T, E))
    assert list(probe.compute()) == ["layers.0", "layers.1"]

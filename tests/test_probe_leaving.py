"""The probe leaves nothing behind, whatever ends a run, and two of them leave in any order."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_monitor import AttentionProbe
from tests.probing import Net, hooks, modes, sdpa
from tests.spellings import Attention, B, E, T

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
            other.__enter__()  # type: ignore[no-untyped-call] # torch has no hints for it
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


# -- compiled models --------------------------------------------------------------------------------------------------


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

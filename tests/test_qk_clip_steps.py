"""QK-Clip over the steps: when it looks for weights, over processes, compiled, recomputed; and its settings."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attn_monitor.clip_records import Clipped
from attn_monitor.qk_clip import QKClip
from tests.clipping import ABOVE, Block, Clipping, hidden, pretend
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE


# -- over the steps -------------------------------------------------------------------------------------------------


def test_the_weights_are_looked_for_in_the_observed_step_after_the_first_head_above_tau() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for heads, expected in (({}, ()), ({1: ABOVE}, ("Block",)), ({}, ()), ({2: ABOVE}, ())):
        clipped = clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Block", heads))
        assert clipped.waiting == expected
    assert [head.head for head in clipped.heads] == [2]


def test_nothing_is_left_on_the_model_and_copies_are_clean() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Block", {1: ABOVE}))
    with clipping.probe:
        clipping.clipper.begin(clipping.model)
        twin = copy.deepcopy(clipping.model)
        with pytest.raises(RuntimeError):
            clipping.model(torch.zeros(2, 3))
    twin(**clipping.inputs)
    assert not clipping.clipper._finder._outputs or twin.c_attn not in clipping.clipper._finder._outputs
    clipping.clipper.end()
    clipping.clipper.end()
    for module in clipping.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert clipping.clipper._finder._outputs == {}


def test_weights_that_are_put_back_are_noticed() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    weights = copy.deepcopy(clipping.model.state_dict())
    told = []
    for _ in range(9):
        clipped = clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Block", {1: ABOVE}))
        told.append((len(clipped.heads), clipped.notes.get("Block", "")))
        clipping.model.load_state_dict(weights)  # as an optimizer does that keeps its own copy
    assert [count for count, _ in told] == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [bool(text) for _, text in told] == [False] * 4 + [True] * 5
    assert "head 1 was rescaled several times, and each time its logits were soon as large again" in told[-1][1]


def test_processes_do_alike() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    asked: list[bool] = []

    def only_here(known: bool) -> bool:
        asked.append(known)
        return len(asked) < 3  # all processes are well; then one of them knows nothing of the weights

    for _ in range(2):
        statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
        clipped = clipping.clipper.apply(clipping.model, statistics, agree=only_here)
    assert clipped.refused == {"Block": "head 1: its weights were not found alike on every process"}
    assert asked == [True] * 4  # twice whether it goes on, then whether queries, and keys, of the head are known


def test_processes_stop_alike() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for agreed in (True, False):
        statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
        clipped = clipping.clipper.apply(clipping.model, statistics, agree=[lambda _: False, lambda _: True][agreed])
    assert clipped == Clipped(refused={"Block": "QK-Clip failed on another process"})


def test_heads_that_are_spread_over_processes_are_left_alone() -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    for _ in range(2):
        own = pretend(clipping.observe(), "Block", {1: ABOVE})["Block"]
        both = replace(own, logit_max=torch.tensor([1.0, ABOVE, 1, 1, 1, 1]), rows=own.rows.repeat(2), q_rms=None)
        clipped = clipping.clipper.apply(clipping.model, {"Block": both})
    assert "other heads than the statistics tell of" in clipped.refused["Block"]


def test_one_of_several_processes_does_nothing_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_monitor.qk_clip._processes", lambda: 2)
    clipping = Clipping(Block(), {"x": hidden(21)})
    clipped = clipping.clip("Block", {1: ABOVE})
    reason = "several processes train this model, and nothing makes sure that they rescale alike"
    assert clipped == Clipped(refused={"Block": reason})


@pytest.mark.usefixtures("visible_operations")
def test_looking_for_the_weights_waits_for_nothing_in_the_forward_pass() -> None:
    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "equal"}, func
            return func(*args, **(kwargs or {}))

    clipping = Clipping(Block(flash=False), {"x": hidden(21)})
    statistics = pretend(clipping.observe(), "Block", {1: ABOVE})
    assert clipping.clipper.apply(clipping.model, statistics).waiting == ("Block",)
    with clipping.probe:
        clipping.clipper.begin(clipping.model)
        with NoSync():  # type: ignore[no-untyped-call] # torch has no hints for it
            clipping.model(**clipping.inputs)
    assert [head.head for head in clipping.clipper.apply(clipping.model, statistics).heads] == [1]


def test_calls_of_one_module_are_one_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    clipping = Clipping(Twice(), {"x": hidden(21)}, per_call=True)
    for _ in range(2):
        statistics = pretend(clipping.observe(), "block@1", {1: ABOVE})
        assert list(statistics) == ["block@0", "block@1"]
        clipped = clipping.clipper.apply(clipping.model, statistics)
    assert [(head.layer, head.head, head.logit_max) for head in clipped.heads] == [("block", 1, ABOVE)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_found(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return out

    clipping = Clipping(Saving(), {"x": hidden(21).requires_grad_()})
    assert [head.head for head in clipping.clip("block", {1: ABOVE}).heads] == [1]


def test_autocast_is_told_apart() -> None:
    class Autocast(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    clipping = Clipping(Autocast(), {"x": hidden(21)})
    [head] = clipping.clip("Autocast", {1: ABOVE}).heads
    assert not head.queries_alone


def test_a_compiled_model_is_clipped_in_its_eager_steps() -> None:
    clipping = Clipping(torch.compile(Block(), backend="eager"), {"x": hidden(21)})
    [head] = clipping.clip("Block", {1: ABOVE}).heads
    assert (head.head, head.queries_alone) == (1, "")


def test_an_error_of_ours_ends_the_clipping_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clipping = Clipping(Block(), {"x": hidden(21)})
    before = copy.deepcopy(clipping.model.state_dict())
    clipping.clip("Block", {})

    def broken(*_: Any) -> None:
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(clipping.clipper._finder, "begin", broken)
    clipped = clipping.clip("Block", {1: ABOVE})
    assert clipped.refused == {"Block": "QK-Clip failed and is off from now on: RuntimeError: no hooks today"}
    assert all(torch.equal(value, before[key]) for key, value in clipping.model.state_dict().items())


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tau": 0}, ValueError, "`tau` expects a positive finite number, got 0"),
        ({"tau": math.inf}, ValueError, "`tau` expects a positive finite number, got inf"),
        ({"tau": "100"}, TypeError, "`tau` expects a number, got '100' of type str"),
        ({"alpha": True}, TypeError, "`alpha` expects a number, got True of type bool"),
        ({"alpha": 1.5}, ValueError, r"`alpha` expects a share in \[0, 1\], got 1.5"),
        ({"alpha": math.nan}, ValueError, "`alpha` expects a share"),
    ],
)
def test_wrong_settings_fail_at_once(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QKClip(**settings)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_two_factors_make_gamma(alpha: float) -> None:
    query, key = QKClip(tau=100.0, alpha=alpha).factors(250.0)
    assert query * key == pytest.approx(0.4)
    assert math.log(query) == pytest.approx(alpha * math.log(0.4))


def test_what_is_needed_and_how_it_is_shown() -> None:
    assert QKClip().requires == {"logit_max"}
    assert repr(QKClip(alpha=0.25)) == "QKClip(tau=100.0, alpha=0.25)"

"""QK-Clip where queries or keys also serve outside of attention, which the gradients tell, and where logits are nan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_monitor.clip_records import Clipped
from attn_monitor.head_weights import USED
from attn_monitor.records import AttentionStatistics
from tests.clipping import ABOVE, Block, Clipping, hidden
from tests.models import LIGHTNING_ADVICE
from tests.test_qk_clip_weights import CASES

pytestmark = LIGHTNING_ADVICE
HEADS, DEPTH = 3, 7


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, DEPTH)).transpose(1, 2)


class Plain(nn.Module):
    """Attention with a projection each."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        width, narrow = HEADS * DEPTH, key_heads * DEPTH
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, narrow), nn.Linear(width, narrow)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), enable_gqa=k.shape != q.shape)
        return self.finish(q, k, out.transpose(1, 2).flatten(2))

    def finish(self, q: Tensor, k: Tensor, out: Tensor) -> Tensor:
        return self.out(out)


class SetAttention(Plain):
    """As in the Set Transformer, where the projected queries are also the residual."""

    def finish(self, q: Tensor, k: Tensor, out: Tensor) -> Tensor:
        out = q + out
        return out + self.out(out).relu()


class Gated(Plain):
    def finish(self, q: Tensor, k: Tensor, out: Tensor) -> Tensor:
        return self.out(out * q.sigmoid())


class KeysInTheOutput(Plain):
    def finish(self, q: Tensor, k: Tensor, out: Tensor) -> Tensor:
        return self.out(out) + k.repeat_interleave(q.shape[-1] // k.shape[-1], dim=-1)


class FusedGate(Block):
    """A gate of the queries, which come out of one layer with keys and values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * q.tanh()


class Learning(Clipping):
    """With a backward pass in each observed step."""

    def observe(self) -> Mapping[str, AttentionStatistics]:
        for parameter in self.model.parameters():
            parameter.grad = None
        forward = type(self.model).forward

        def both(module: nn.Module, **inputs: Any) -> Any:
            output = forward(module, **inputs)
            tensor = output if isinstance(output, Tensor) else output[0]
            tensor.float().square().mean().backward()
            return output

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.model), "forward", both)
            return super().observe()


@pytest.mark.parametrize(
    "make",
    [SetAttention, Gated, KeysInTheOutput, FusedGate, lambda: SetAttention(1), lambda: KeysInTheOutput(1)],
    ids=["residual", "gate", "keys", "fused gate", "grouped residual", "grouped keys"],
)
def test_queries_and_keys_that_serve_outside_of_attention_are_left_alone(make: Callable[[], nn.Module]) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = make()
        name = type(model).__name__
        clipping = Learning(model, {"x": hidden(21)})
        before = {key: value.clone() for key, value in model.state_dict().items()}
        clipped = clipping.clip(name, {1: ABOVE})
        assert clipped == Clipped(refused={name: f"head 1: {USED}"})
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_ordinary_attention_do_not_stop_the_clip(name: str) -> None:
    model, inputs, layer, _, factor = CASES[name]()
    clipped = Learning(model, inputs).clip(layer, {1: ABOVE})
    assert not clipped.refused
    assert [(head.head, head.factors[0]) for head in clipped.heads] == [(1, factor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", [1.0, 20.0])
def test_rounding_is_no_other_use(dtype: torch.dtype, gain: float) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = Plain().to(dtype)
        with torch.no_grad():
            model.query.weight *= gain
        clipped = Learning(model, {"x": hidden(21).to(dtype)}).clip("Plain", {1: ABOVE})
        assert not clipped.refused
        assert len(clipped.heads) == 1


def test_a_further_use_is_seen_through_a_checkpoint() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Gated()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    clipped = Learning(Outer(), {"x": hidden(21).requires_grad_()}).clip("inner", {1: ABOVE})
    assert clipped.refused == {"inner": f"head 1: {USED}"}


class Refined(Plain):
    """Two looks at the same keys."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = heads(self.key(x)), heads(self.value(x))
        for _ in range(2):
            x = self.out(F.scaled_dot_product_attention(heads(self.query(x)), k, v).transpose(1, 2).flatten(2))
        return x


def test_keys_of_several_calls_are_not_taken_for_another_use() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        clipped = Learning(Refined(), {"x": hidden(21)}).clip("Refined", {1: ABOVE})
        assert [(head.head, head.factors) for head in clipped.heads] == [(1, (0.5, 0.5))]


def test_without_a_backward_pass_a_further_use_is_not_seen() -> None:
    assert len(Clipping(Gated(), {"x": hidden(21)}).clip("Gated", {1: ABOVE}).heads) == 1


def test_of_nan_logits_nothing_is_said_and_a_later_refusal_is() -> None:
    inputs = {"x": hidden(21)}
    clipping = Clipping(Block(), {"x": inputs["x"] * math.nan})
    statistics = clipping.observe()
    assert statistics["Block"].logit_max is None
    assert clipping.clipper.apply(clipping.model, statistics) == Clipped()
    clipping.model.c_attn.requires_grad_(False)
    clipping.inputs = inputs
    assert "frozen" in clipping.clip("Block", {1: ABOVE}).refused["Block"]

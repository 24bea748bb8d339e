"""What is not attention, and attention that cannot be seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from tests.spellings import SCALE, SPELLINGS, Attention, B, E, Spelling, T
from tests.watched import Free, in_heads, only, watched

# -- what is not attention ------------------------------------------------------------------------------------------


def linear_router(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(q, model.matrix.T).softmax(-1) @ F.linear(k, model.matrix.T).mT


def parameter_router(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ model.matrix).softmax(-1)


def cosine_classifier(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.normalize(q, dim=-1) @ F.normalize(model.matrix, dim=0) * 5.0).softmax(-1)


def mixture_of_experts(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = torch.einsum("bte,ex->btx", q, model.matrix).softmax(-1)
    experts = torch.stack([k] * 13, dim=2)
    return torch.einsum("btx,btxe->bte", gates, experts)


def layer_mix(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return model.mixing.softmax(-1)[0, 0] * q


def contrastive(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:, 0] @ k[:, 0].T / 0.07).softmax(-1)


def pooling(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(q, model.matrix.T[:1]).softmax(1) * v


@pytest.mark.parametrize(
    "function",
    [linear_router, parameter_router, cosine_classifier, mixture_of_experts, layer_mix, contrastive, pooling],
    ids=lambda function: function.__name__,
)
def test_routers_and_classifiers_are_not_attention(function: Callable[..., Tensor]) -> None:
    model = Free(function)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E)).sum().backward()
    assert dict(probe.compute()) == {}
    assert probe.skipped == {}


def test_a_learned_query_is_attention_over_the_tokens() -> None:
    def pooled(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ model.matrix).softmax(1).mT @ v

    stats = only(watched(Free(pooled), torch.randn(B, T, E)))
    assert (stats.keys, stats.rows.tolist(), stats.head_dim) == (T, [B * 13], E)


# -- blind spots ----------------------------------------------------------------------------------------------------


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * SCALE) @ v


def exp_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(q @ k.mT * SCALE)
    return weights / weights.sum(-1, keepdim=True) @ v


def exp_of_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(q @ k.mT * SCALE, dim=-1).exp() @ v


@pytest.mark.parametrize("attend", [sigmoid, exp_and_sum, exp_of_log_softmax], ids=lambda attend: attend.__name__)
def test_attention_without_a_softmax_is_skipped_with_its_reason(attend: Spelling) -> None:
    model = Attention(attend)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E)).sum().backward()
    assert dict(probe.compute()) == {}
    assert "observe_logits" in probe.skipped["Attention"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_modules_are_skipped_and_the_rest_is_measured() -> None:
    class Plus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    scripted = torch.jit.script(Plus())
    model = nn.Sequential(scripted, Attention(SPELLINGS[0]))
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    assert list(probe.compute()) == ["1"]
    assert "torch.jit" in probe.skipped["0"]
    torch.jit.script(Plus())


@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        lambda s: F.relu(s) ** 2,
        lambda s: F.elu(s) + 1,
        lambda s: s**2,
    ],
)
def test_scores_that_another_function_normalises_are_told_each_time(function: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(Attention(lambda q, k, v: function(q @ k.mT * SCALE) @ v), Attention(SPELLINGS[0]))
    probe = AttentionProbe(model)
    for _ in range(3):  # also when only what was found is hooked
        with probe:
            model(torch.randn(B, T, E))
        assert list(probe.skipped) == ["0"]
        assert "observe_logits" in probe.skipped["0"]
        assert list(probe.compute()) == ["1"]
        probe.reset()


def test_linear_attention_of_keys_and_values_is_no_attention() -> None:
    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.elu(q) @ (F.elu(k).mT @ v)

    model = Attention(linear)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    assert dict(probe.compute()) == {}
    assert "linear" in probe.skipped["Attention"]  # for its name, and nothing more


def test_a_class_called_attention_is_no_helper_even_with_softmax_in_its_name() -> None:
    class SoftmaxAttention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT * SCALE).softmax(-1) @ v

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.project = SoftmaxAttention(), nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.core(*in_heads(*self.project(x).chunk(3, -1)))
            return out

    assert list(watched(Block(), torch.randn(B, T, E))) == ["core"]

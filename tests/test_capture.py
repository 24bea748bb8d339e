"""What is seen as attention, by every spelling, and what is not."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.reference import assert_matches, assert_same, attention_reference, gradient_reference
from tests.spellings import ALLOWED, SCALE, SPELLINGS, Attention, B, D, E, H, Spelling, T


def watched(model: nn.Module, *inputs: Tensor, **options: Any) -> dict[str, AttentionStatistics]:
    """Run forward and backward under a probe that must not skip anything."""
    with AttentionProbe(model, **options) as probe:
        out = model(*inputs)
        out.square().sum().backward()
    assert not probe.skipped
    return dict(probe.compute())


def only(found: dict[str, AttentionStatistics]) -> AttentionStatistics:
    (stats,) = found.values()
    return stats


def expected(model: Attention, x: Tensor) -> dict[str, Tensor]:
    """Every statistic of a causal attention, in float64 by the reference, gradients of out.square().sum()."""
    model = model.double()
    q, k, v = model.heads(x.double())
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).detach().requires_grad_()
    model.out(out.transpose(1, 2).reshape(len(x), -1, E)).square().sum().backward()
    assert out.grad is not None
    q, k, v = (part.detach() for part in (q, k, v))
    gradients = gradient_reference(q, k, v, out.grad, is_causal=True)
    return {
        **attention_reference(q, k, is_causal=True),
        **{name: gradients[name] for name in ("grad_logits_norm", "grad_probs_norm", "gradient_gain")},
        "scale": torch.full((H,), SCALE, dtype=torch.float64),
        "scale_ratio": torch.ones(H, dtype=torch.float64),
    }


@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda attend: attend.__name__)
def test_every_spelling_gives_the_numbers_of_the_reference(attend: Spelling) -> None:
    model = Attention(attend)
    x = 2 * torch.randn(B, T, E)
    stats = only(watched(model, x))
    assert_matches(stats, expected(model, x))
    assert (stats.head_dim, stats.keys, stats.calls, stats.approximate) == (D, T, 1, frozenset())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention_equals_the_hand_written_one(need_weights: bool, batch_first: bool) -> None:
    own = Attention(SPELLINGS[0])
    torchs = nn.MultiheadAttention(E, H, batch_first=batch_first)
    torchs.in_proj_weight.data.copy_(own.qkv.weight)
    torchs.in_proj_bias.data.copy_(own.qkv.bias)
    torchs.out_proj.load_state_dict(own.out.state_dict())
    x = 2 * torch.randn(B, T, E)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torchs

        def forward(self, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            out: Tensor = self.attn(x, x, x, attn_mask=~ALLOWED, need_weights=need_weights)[0]
            return out

    stats = watched(Block(), x)["attn"]
    assert_matches(stats, expected(own, x))


def test_multi_head_attention_of_one_batch_item_and_unbatched() -> None:
    attention = nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(1, T, E)
    found = []
    for inputs in (x, x[0]):
        with AttentionProbe(attention) as probe:
            attention(inputs, inputs, inputs, need_weights=True)
        found.append(only(dict(probe.compute())))
    assert found[0].heads == found[1].heads == H
    assert found[0].logit_std is not None
    torch.testing.assert_close(found[0].logit_std, found[1].logit_std)


def test_cross_attention_with_other_widths_and_extra_keys() -> None:
    attention = nn.MultiheadAttention(16, 4, kdim=24, vdim=12, add_bias_kv=True, add_zero_attn=True)
    inputs = torch.randn(5, 2, 16), torch.randn(9, 2, 24), torch.randn(9, 2, 12)
    found = []
    for need_weights in (True, False):
        with AttentionProbe(attention) as probe:
            attention(*inputs, need_weights=need_weights)[0].sum().backward()
        found.append(only(dict(probe.compute())))
    assert [stats.keys for stats in found] == [11, 11]
    assert found[0].rows.tolist() == [10] * 4
    assert_same(found[0], found[1])


def test_encoder_and_decoder_layers_are_found_by_their_names() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 13, batch_first=True), 2, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 13, batch_first=True), 1)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = encoder, decoder

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
            out: Tensor = self.decoder(y, self.encoder(x), tgt_mask=mask, tgt_is_causal=True)
            return out

    found = watched(Both(), torch.randn(B, T, E), torch.randn(B, 2, E))
    assert list(found) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    # Two causal queries: only the second of each item has two allowed keys.
    assert found["decoder.layers.0.self_attn"].rows.tolist() == [2 * B] * H
    assert found["decoder.layers.0.multihead_attn"].keys == T


# -- shapes and axes ------------------------------------------------------------------------------------------------


class Free(nn.Module):
    """Applies a function to projected query, key and value [B, T, E], and a few parameters."""

    def __init__(self, function: Callable[[Free, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.packs = False
        self.qkv = nn.Linear(E, 3 * E)
        self.matrix = nn.Parameter(torch.randn(E, 13))
        self.mixing = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, *self.qkv(x).chunk(3, -1))


def in_heads(*parts: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (H, D)).transpose(1, 2) for part in parts]


def test_grouped_queries_in_five_dimensions_are_counted_as_heads() -> None:
    groups, width = 3, 2

    def grouped(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[..., : groups * width * 5].view(B, T, groups, width, 5).permute(0, 2, 3, 1, 4)
        k, v = (part[..., : groups * 5].view(B, T, groups, 1, 5).permute(0, 2, 3, 1, 4) for part in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    def fused(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[..., : groups * width * 5].view(B, T, groups * width, 5).transpose(1, 2)
        k, v = (part[..., : groups * 5].view(B, T, groups, 5).transpose(1, 2) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)

    model, x = Free(grouped), torch.randn(B, T, E)
    found = only(watched(model, x))
    model.function = fused
    wanted = only(watched(model, x))
    assert found.heads == wanted.heads == groups * width
    assert_same(found, wanted)


def test_windows_are_batch() -> None:
    def windowed(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.view(B, T, 1, H, D).expand(B, T, 2, H, D).transpose(2, 3) for part in (q, k, v))
        return (q @ k.mT / math.sqrt(D) + torch.zeros(B, T, 1, 2, 2)).softmax(-1) @ v

    stats = only(watched(Free(windowed), torch.randn(B, T, E)))
    assert stats.rows.tolist() == [B * T * 2] * H


def test_heads_that_nothing_tells_apart_are_pooled_with_a_note() -> None:
    def opaque(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (F.layer_norm(part.reshape(B * H, T, D), (D,)) for part in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)

    model = Free(opaque)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    stats = probe.compute()["Free"]
    assert (stats.heads, stats.rows.tolist(), stats.head_dim) == (1, [B * H * T], D)
    assert "could not be told apart" in probe.notes["Free"]


def test_a_loop_over_query_chunks_is_one_site() -> None:
    def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for start in range(0, T, 3):
            rows = slice(start, start + 3)
            scores = (q[:, :, rows] @ k.mT * SCALE).masked_fill(~ALLOWED[rows], -1e4)
            parts.append(scores.softmax(-1) @ v)
        return torch.cat(parts, dim=2)

    model, x = Attention(chunked), torch.randn(B, T, E)
    stats = only(watched(model, x))
    assert stats.calls == 3
    wanted = expected(model, x)
    # Each call sees its own keys only, so that the early keys are pooled more often.
    assert_matches(stats, {name: value for name, value in wanted.items() if name not in ("k_rms", "alignment")})


def test_two_attentions_in_one_forward_are_two_records() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, v)
        return first + F.scaled_dot_product_attention(q, k[:, :, :2], v[:, :, :2])

    found = watched(Attention(twice), torch.randn(B, T, E))
    assert {name: stats.keys for name, stats in found.items()} == {"Attention": T, "Attention#1": 2}


def test_one_helper_function_called_from_two_lines_is_two_sites() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        return out + attend(q, k[:, :, :2], v[:, :, :2])

    found = watched(Attention(twice), torch.randn(B, T, E))
    assert [stats.keys for stats in found.values()] == [T, 2]


def test_softcap_and_bias_are_in_the_logits_and_not_in_the_factors() -> None:
    cap, bias = 0.7, torch.randn(H, T, T)

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT * 0.4 / cap) * cap
        return ((scores + bias).masked_fill(~ALLOWED, -1e4)).softmax(-1) @ v

    model, x = Attention(capped), torch.randn(B, T, E)
    stats = only(watched(model, x))
    q, k, _ = (part.detach() for part in model.heads(x))
    wanted = attention_reference(q, k, masks=(bias,), is_causal=True, scale=0.4, softcap=cap)
    assert_matches(stats, wanted)
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale, torch.full((H,), 0.4, dtype=torch.float64))


def test_a_per_head_temperature_is_the_scale() -> None:
    temperature = nn.Parameter(torch.tensor([2.0, 3.0, 5.0]))

    def cosine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (scores * temperature.view(H, 1, 1)).softmax(-1) @ v

    stats = only(watched(Attention(cosine), torch.randn(B, T, E)))
    assert stats.scale is not None
    assert stats.q_rms is not None
    torch.testing.assert_close(stats.scale, torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64))
    torch.testing.assert_close(stats.q_rms, torch.full((H,), D**-0.5, dtype=torch.float64))


def test_a_normaliser_undoes_the_scale_before_it() -> None:
    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 100.0
        q = q / q.square().sum(-1, keepdim=True).sqrt()
        return (q @ k.mT * 0.3).softmax(-1) @ v

    stats = only(watched(Attention(normalised), torch.randn(B, T, E)))
    assert stats.scale is not None
    torch.testing.assert_close(stats.scale, torch.full((H,), 0.3, dtype=torch.float64))


def test_raw_parameter_projections_beside_a_raw_parameter_router() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, E, H, D) / 6)
            self.router = nn.Parameter(torch.randn(E, 5))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("bte,ehd->bthd", x, w) for w in self.w)
            probs = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(SCALE).softmax(-1)
            gate = (x @ self.router).softmax(-1)
            out: Tensor = torch.einsum("bhqk,bkhd->bqhd", probs, v).flatten(2) * gate.amax(-1, keepdim=True)
            return out

    stats = only(watched(Block(), torch.randn(B, T, E)))
    assert (stats.heads, stats.keys, stats.head_dim) == (H, T, D)


def test_one_unbatched_head_in_two_dimensions() -> None:
    def plain(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q[0], k[0], v[0]
        return torch.softmax(q @ k.T / math.sqrt(E), dim=-1) @ v

    model, x = Free(plain), torch.randn(B, T, E)
    stats = only(watched(model, x))
    q, k, _ = (part[0].detach() for part in model.qkv(x).chunk(3, -1))
    assert_matches(stats, attention_reference(q[None, None], k[None, None]))
    assert stats.grad_logits_norm is not None


def test_talking_heads_keep_logits_and_lose_query_and_key() -> None:
    def talking(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = in_heads(q, k, v)
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT * SCALE, model.mixing)
        probs = torch.einsum("bgqk,gh->bhqk", scores.softmax(-1), model.mixing)
        return probs @ v

    stats = only(watched(Free(talking), torch.randn(B, T, E)))
    assert (stats.heads, stats.head_dim, stats.rows.tolist()) == (H, D, [B * T] * H)
    assert stats.q_rms is None
    assert stats.logit_std is not None


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


def test_heads_packed_into_a_single_query_are_heads() -> None:
    groups, width = 2, 3

    def packed(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[:, -1:, : groups * width * 5].unflatten(-1, (groups * width, 5)).transpose(1, 2)
        k, v = (part[..., : groups * 5].unflatten(-1, (groups, 5)).transpose(1, 2) for part in (k, v))
        mask = torch.zeros(B, 1, 1, T)
        if model.packs:
            return F.scaled_dot_product_attention(q.reshape(B, groups, width, 5), k, v, mask)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    model, x = Free(packed), torch.randn(B, T, E)
    found = []
    for packs in (False, True):
        model.packs = packs
        found.append(only(watched(model, x)))
    assert found[1].heads == groups * width
    assert_same(found[1], found[0])


def test_two_dimensional_probabilities_are_counted_once_and_not_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def twice(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probs = torch.softmax(q[0] @ k[0].T / math.sqrt(E), dim=-1)
        similarities = torch.softmax(q[0] @ k[0].T, dim=-1)
        kept.extend([weakref.ref(probs), weakref.ref(similarities)])
        return probs @ v[0] + probs @ (2 * v[0]) + similarities.diagonal().sum()

    model = Free(twice)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E)).square().sum().backward()
        assert [reference() for reference in kept] == [None, None]
    stats = only(dict(probe.compute()))
    assert (stats.calls, stats.rows.tolist()) == (1, [T])


def test_a_blocked_column_beside_the_scores_is_no_sink() -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.pad((q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4), (0, 1), value=-math.inf)
        return scores.softmax(-1)[..., :-1] @ v

    model, x = Attention(padded), torch.randn(B, T, E)
    stats = only(watched(model, x))
    q, k, _ = (part.detach() for part in model.heads(x))
    assert_matches(stats, attention_reference(q, k, is_causal=True), names=["entropy", "jacobian_trace", "logit_std"])


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("replace", [_wrapped, functools.partial])
def test_a_replaced_multi_head_attention_runs_and_is_told(
    replace: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "multi_head_attention_forward", replace(F.multi_head_attention_forward))
    layer = nn.TransformerEncoderLayer(E, H, 13, batch_first=True)
    with AttentionProbe(layer) as probe:
        layer(torch.randn(B, T, E)).sum().backward()
    assert "has been replaced" in probe.skipped["self_attn"]


def test_a_mask_beside_a_learned_bias_is_still_a_mask() -> None:
    bias = nn.Parameter(torch.randn(H, T, T))

    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * SCALE + (bias + ~ALLOWED * -1e4)).softmax(-1) @ v

    model, x = Attention(biased), torch.randn(B, T, E)
    stats = only(watched(model, x))
    q, k, _ = (part.detach() for part in model.heads(x))
    assert_matches(stats, attention_reference(q, k, masks=(bias.detach(),), is_causal=True))


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

"""What is seen as attention, by every spelling and in every module of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe
from tests.reference import assert_matches, assert_same, attention_reference, gradient_reference
from tests.spellings import ALLOWED, SCALE, SPELLINGS, Attention, B, D, E, H, Spelling, T
from tests.watched import only, watched


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


# -- blind spots ----------------------------------------------------------------------------------------------------


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

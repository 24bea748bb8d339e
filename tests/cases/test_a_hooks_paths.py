"""A: attention that is called in a way that hooks do not see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionMonitor
from tests.cases.hooked import Blocks, PlusOne
from tests.cases.support import SelfAttention, Trained, close, collect, entropy, fit, normal, only, serve, value
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference

pytestmark = LIGHTNING_ADVICE


def projected(mha: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key [B, H, T, D] of a self-attention, from its parameters."""
    q, k, _ = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).detach().chunk(3, -1)
    return tuple(part.unflatten(-1, (mha.num_heads, -1)).transpose(1, 2) for part in (q, k))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a01_the_encoder_fast_path_hides_nothing(context: Callable[[], Any]) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x = normal(2, 6, 32)

    def run() -> Tensor:
        with context():
            return encoder(x)

    before, during = run(), []
    found = collect(encoder, lambda: during.append(run()))
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [stats.calls for stats in found.values()] == [1, 1]
    first: Any = encoder.layers[0]
    assert_matches(found["layers.0.self_attn"], attention_reference(*projected(first.self_attn, x)))
    torch.testing.assert_close(during[0], before)
    assert torch.equal(run(), before)


def test_a02_need_weights_changes_no_number() -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True)
    x = normal(2, 5, 16)
    without = only(collect(mha, lambda: mha(x, x, x, need_weights=False)[0].sum().backward()))
    having = only(collect(mha, lambda: mha(x, x, x, need_weights=True)[0].sum().backward()))
    close(without, having)
    assert_matches(without, attention_reference(*projected(mha, x)))


def test_a03_statistics_are_of_single_heads_not_of_their_average() -> None:
    heads, keys = 4, 6
    mha = nn.MultiheadAttention(heads * keys, heads, batch_first=True)
    token = torch.eye(keys, heads * keys)[None]  # token j is the j-th unit vector, and so is its key in every head
    with torch.no_grad():
        mha.in_proj_weight.zero_()
        for head in range(heads):
            mha.in_proj_weight[heads * keys + head * keys : heads * keys + (head + 1) * keys, :keys] = torch.eye(keys)
            mha.in_proj_bias[head * keys + head] = 60 * math.sqrt(keys)  # every query of head h asks for key h
    _, averaged = mha(token, token, token)
    assert entropy(averaged).mean().item() == pytest.approx(math.log(4), abs=1e-3)  # the trap

    stats = only(collect(mha, lambda: mha(token, token, token)))
    assert value(stats, "entropy").max() < 1e-3
    assert value(stats, "max_probability").min() > 0.999


def test_a04_attention_is_found_although_out_proj_is_never_called() -> None:
    mha = nn.MultiheadAttention(8, 2, batch_first=True)
    calls: list[int] = []
    mha.out_proj.register_forward_hook(lambda *_: calls.append(1))
    x = normal(3, 5, 8)
    stats = only(collect(mha, lambda: mha(x, x, x)))
    assert calls == []  # the trap
    assert stats.calls == 1

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x)[0]

    _, (said,) = fit(Trained(Block()), AttentionMonitor(modules="net.attn.out_proj"), serve(normal(2, 5, 8)))
    assert "no attention was seen in modules='net.attn.out_proj'" in said
    assert "modules with attention: net.attn)" in said


class TimmLike(nn.Module):
    """Attention as in timm: qkv, optional norms of q and k, and a flag that chooses the fused kernel."""

    def __init__(self, dim: int, heads: int, norm: bool) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(dim // heads) if norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // heads) if norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.fused_attn = True

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if self.fused_attn:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            out = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj(out.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("norm", [False, True])
def test_a05_a_fused_attention_flag_changes_no_number(norm: bool) -> None:
    model = nn.ModuleDict({"attn": TimmLike(21, 3, norm)})
    attn: Any = model["attn"]
    x = normal(2, 5, 21)
    records = []
    for fused in (True, False):
        attn.fused_attn = fused
        records.append(collect(model, lambda: attn(x).square().sum().backward())["attn"])
    assert [stats.calls for stats in records] == [1, 1]
    close(*records)
    q, k, _ = (part.detach() for part in attn.heads(x))
    assert_matches(records[0], attention_reference(q, k))


def test_a12_attention_below_another_entry_method_is_seen() -> None:
    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = SelfAttention(12, 2)
            self.unused = SelfAttention(12, 2)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.attn(x)

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("nobody calls this")

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = Vit()

        def forward(self, x: Tensor) -> Tensor:
            return self.vit.forward_features(x)

    model = Parent()
    found = collect(model, lambda: model(normal(2, 5, 12)))
    assert {name: stats.calls for name, stats in found.items()} == {"vit.attn": 1}


def test_a13_a_forward_called_directly_is_measured_as_if_it_had_hooks() -> None:
    class Block(nn.Module):
        def __init__(self, direct: bool) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 2, batch_first=True)
            self.direct = direct

        def forward(self, x: Tensor) -> Tensor:
            return (self.attn.forward if self.direct else self.attn)(x, x, x)[0]

    right = Block(direct=False)
    bad = Block(direct=True)
    bad.load_state_dict(right.state_dict())
    x = normal(2, 5, 12)
    wanted = collect(right, lambda: right(x).sum().backward())
    found = collect(bad, lambda: bad(x).sum().backward())
    assert list(wanted) == list(found) == ["attn"]
    close(found["attn"], wanted["attn"])

    for modules in (None, "net.attn"):
        monitor = AttentionMonitor(modules=modules)
        _, said = fit(Trained(bad), monitor, serve(normal(3, 5, 12)))
        assert said == []
        assert [(list(record), record["net.attn"].calls) for _, record in monitor.history] == [(["net.attn"], 1)] * 3


def test_a14_inputs_may_come_by_keyword() -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True)
    x = normal(2, 5, 16)
    records = [
        only(collect(mha, call))
        for call in (lambda: mha(x, x, x), lambda: mha(query=x, key=x, value=x), lambda: mha(x, key=x, value=x))
    ]
    close(records[0], records[1], relative=0, absolute=0)
    close(records[0], records[2], relative=0, absolute=0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = SelfAttention(12, 2)

        def forward(self, *, hidden_states: Tensor) -> Tensor:
            return self.attn(x=hidden_states)

    block = Block()
    found = collect(block, lambda: block(hidden_states=normal(2, 5, 12)))
    assert list(found) == ["attn"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a18_scripted_modules_are_skipped_with_a_note_and_the_rest_is_measured() -> None:
    scripted = torch.jit.script(PlusOne())
    with pytest.raises(RuntimeError, match="not supported on ScriptModules"):
        scripted.register_forward_hook(lambda *_: None)  # the trap

    net = nn.Sequential(scripted, Blocks(), PlusOne())
    monitor = AttentionMonitor()
    _, (said,) = fit(Trained(net), monitor, serve(normal(3, 5, 12)))
    assert "seen, but not measured: net.0 (compiled by torch.jit" in said
    assert [list(record) for _, record in monitor.history] == [["net.1.blocks.0", "net.1.blocks.1"]] * 3
    rescripted = torch.jit.script(net[2])
    assert torch.equal(rescripted(torch.ones(3)), torch.full((3,), 2.0))

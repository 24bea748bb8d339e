"""What people do with models: adapters, tied modules, functional calls, copies, frozen layers, generating."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from attn_monitor.catalog import GRADIENTS
from tests.models import DIM, HEADS, HandWritten, Net, split_heads
from tests.reference import assert_matches, assert_same, attention_reference, gradient_reference

BATCH, LENGTH = 3, 5


class Block(nn.Module):
    """Projections with names of their own, as adapters want them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))

    def heads(self, x: Tensor) -> list[Tensor]:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two blocks and what transformers' models have for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def measure(model: nn.Module, x: Tensor, **options: Any) -> Mapping[str, AttentionStatistics]:
    """Watch one forward and backward pass."""
    with AttentionProbe(model, **options) as probe:
        model(x).square().sum().backward()
    assert not probe.skipped
    return probe.compute()


def expected(heads: list[Tensor], gradient: Tensor) -> dict[str, Tensor]:
    """Return what the reference says of [B, H, Q, D] heads and of the gradient of their output."""
    q, k, v = (part.detach() for part in heads)
    norms = gradient_reference(q, k, v, gradient)
    return {**attention_reference(q, k), **{name: norms[name] for name in ("grad_logits_norm", "grad_probs_norm")}}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, DIM)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own call
def test_prompts_before_a_model_leave_its_names_alone() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    prompted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with AttentionProbe(prompted) as probe:
        prompted(input_ids=torch.arange(5)[None]).logits.sum().backward()
    stats = probe.compute()
    assert list(stats) == ["model.layers.0.self_attn"]
    assert stats["model.layers.0.self_attn"].keys == 3 + 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lora_adapters_have_the_names_and_the_numbers_of_what_they_adapt(x: Tensor) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(Model(), config)
    found = measure(adapted, x)
    merged = copy.deepcopy(adapted).merge_and_unload().requires_grad_()
    wanted = measure(merged, x)
    assert list(found) == list(wanted) == ["layers.0", "layers.1"]
    for name, stats in wanted.items():
        assert_same(found[name], stats, relative=1e-4)
    plain = measure(Model(), x)
    mean, other = (stats["layers.0"].measured()["logit_mean"] for stats in (found, plain))
    assert not torch.allclose(mean, other)
    assert list(measure(adapted, x, modules="layers.1")) == ["layers.1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_lora_adapter_of_multi_head_attention_has_the_numbers_of_its_merged_weights(x: Tensor) -> None:
    peft = pytest.importorskip("peft")

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x)[0]

    config = peft.LoraConfig(r=2, target_modules=["attn"], init_lora_weights=False)
    adapted = peft.get_peft_model(SelfAttention(), config)
    found = measure(adapted, x)
    merged = copy.deepcopy(adapted).merge_and_unload()
    projected = F.linear(x, merged.attn.in_proj_weight, merged.attn.in_proj_bias).chunk(3, -1)
    q, k, _ = (part.detach().unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected)
    assert list(found) == ["attn"]
    assert_matches(found["attn"], attention_reference(q, k))
    assert_same(found["attn"], measure(merged.requires_grad_(), x)["attn"], relative=1e-4)


def test_a_shared_module_is_pooled_and_tied_weights_are_not(x: Tensor) -> None:
    shared = Model()
    shared.layers[1] = shared.layers[0]
    tied = copy.deepcopy(shared)
    tied.layers[1] = copy.deepcopy(tied.layers[0])
    for name, parameter in tied.layers[0].named_parameters():
        tied.layers[1].get_submodule(name.partition(".")[0])._parameters[name.partition(".")[2]] = parameter
    pooled, apart = measure(shared, x), measure(tied, x)
    assert list(pooled) == ["layers.0"]
    assert list(apart) == ["layers.0", "layers.1"]
    assert (pooled["layers.0"].calls, apart["layers.1"].calls) == (2, 1)
    norms = [stats.grad_logits_norm for stats in apart.values()]
    assert norms[0] is not None
    assert norms[1] is not None
    torch.testing.assert_close(pooled["layers.0"].grad_logits_norm, torch.hypot(norms[0], norms[1]))
    for name, stats in measure(shared, x, per_call=True).items():
        assert_same(stats, apart[f"layers.{name.partition('@')[2]}"])


def test_functional_call_shows_the_weights_it_is_given(x: Tensor) -> None:
    block = Block()
    weights = {name: (3 * value.detach()).requires_grad_() for name, value in block.named_parameters()}
    with AttentionProbe(block) as probe:
        out: Tensor = torch.func.functional_call(block, weights, (x,))
        out.square().sum().backward()
    other = Block()
    other.load_state_dict(weights)
    gradient = 2 * out.detach().unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert_matches(probe.compute()["Block"], expected(other.heads(x), gradient))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transform_of_functions_is_skipped_with_the_reason(x: Tensor) -> None:
    block = Block()
    with AttentionProbe(block) as probe:
        torch.func.vmap(block)(x[:, None])
    assert dict(probe.compute()) == {}
    assert "torch.func transform" in probe.skipped["Block"]


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_while_watched_is_not_watched(x: Tensor, copying: Any) -> None:
    model = Model()
    average: Any = None
    with AttentionProbe(model) as probe:
        model(x)
        average = copying(model)
        for _ in range(3):
            average(x)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged(x)
    assert {stats.calls for stats in probe.compute().values()} == {1}
    assert not probe.skipped
    alone = measure(model, x)
    for copied in (average, averaged.module):
        for name, stats in measure(copied, x).items():
            assert_same(stats, alone[name])


@pytest.mark.parametrize("kind", ["hand", "sdpa"])
def test_a_frozen_layer_has_statistics_and_no_gradients_unless_some_flow_through(x: Tensor, kind: Any) -> None:
    net = Net((kind, kind, kind))
    net.blocks[0].requires_grad_(False)
    net.blocks[2].requires_grad_(False)
    stats = measure(net, x)
    trained = measure(copy.deepcopy(net).requires_grad_(), x)
    for name, wanted in trained.items():
        values = {key: value for key, value in wanted.measured().items() if key not in GRADIENTS}
        assert_matches(stats[name], {key: value.double() for key, value in values.items()})
    assert stats["blocks.0"].grad_logits_norm is None  # nothing before it wants a gradient
    for name in ("blocks.1", "blocks.2"):  # the gradients for the second block pass through the third
        torch.testing.assert_close(stats[name].grad_logits_norm, trained[name].grad_logits_norm)


def test_forward_called_by_its_name_belongs_to_its_module(x: Tensor) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = HandWritten()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner.forward(x)
            return out

    model = Outer()
    stats = measure(model, x)
    assert list(stats) == ["inner"]
    q, k, v = split_heads(model.inner.qkv(x))
    gradient = 2 * model(x).detach().unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert_matches(stats["inner"], expected([q, k, v], gradient))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_generating_with_a_cache_is_pooled_over_its_steps(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=DIM,
        n_head=HEADS,
        vocab_size=11,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=None,
        attn_implementation=implementation,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with AttentionProbe(model) as probe:
        out = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0)
    stats = probe.compute()["transformer.h.0.attn"]
    assert (stats.calls, stats.keys, stats.rows.tolist()) == (3, 6, [6] * HEADS)
    assert stats.grad_logits_norm is None
    # The rows of a cached generation are those of one pass over what was generated.
    with AttentionProbe(model) as whole, torch.no_grad():
        model(out[:, :-1])
    wanted = whole.compute()["transformer.h.0.attn"]
    for name in ("logit_std", "logit_row_std", "entropy", "logit_max", "jacobian_trace", "q_rms"):
        torch.testing.assert_close(getattr(stats, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)

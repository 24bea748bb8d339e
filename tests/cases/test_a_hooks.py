"""A: hooks that do not fire, fire twice, or see nothing."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch has no hints for it
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

from attn_monitor import AttentionMonitor, AttentionProbe
from attn_monitor import looks as looks_module
from tests.cases.support import SelfAttention, Trained, close, collect, entropy, fit, hooks, normal, only, serve, value
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference

pytestmark = LIGHTNING_ADVICE


def projected(mha: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key [B, H, T, D] of a self-attention, from its parameters."""
    q, k, _ = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).detach().chunk(3, -1)
    return tuple(part.unflatten(-1, (mha.num_heads, -1)).transpose(1, 2) for part in (q, k))


class PlusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 31,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


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


def test_a06_nothing_depends_on_output_attentions() -> None:
    model = tiny_llama()
    ids = torch.arange(10).reshape(2, 5)
    assert not model(ids, output_attentions=True).attentions  # the trap: the default kernel has none
    fused = collect(model, lambda: model(ids).logits.square().sum().backward())
    assert list(fused) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    model.set_attn_implementation("eager")
    eager = collect(model, lambda: model(ids).logits.square().sum().backward())
    assert list(eager) == list(fused)
    for layer, stats in fused.items():
        close(stats, eager[layer], relative=1e-4)


LONG_SEQUENCE = """
import resource
import torch
from attn_monitor.functional import attention_statistics
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)
query, key = (torch.randn(1, 2, 8192, 64, generator=generator) for _ in range(2))
attention_statistics(query[:, :, :64], key[:, :, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stats = attention_statistics(query, key, statistics=["logit_std", "logit_max", "entropy"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
rows = torch.randperm(8192, generator=generator)[:256]
logits = (query[:, :, rows].double() @ key.double().mT / 8).transpose(0, 1).flatten(1, 2)
probs = logits.softmax(-1)
print(float((logits.flatten(1).std(1) / stats.logit_std - 1).abs().max()))
print(float((-(probs * probs.log()).sum(-1).mean(1) / stats.entropy - 1).abs().max()))
print(bool((stats.logit_max >= logits.amax((1, 2)) * (1 - 1e-6)).all()))
"""


def test_a07_a_long_sequence_needs_no_matrix_of_all_logits() -> None:
    run = subprocess.run([sys.executable, "-c", LONG_SEQUENCE], capture_output=True, text=True, check=True)
    grown, std, entropies, largest = run.stdout.split()
    assert int(grown) * 1024 < 128 << 20  # the matrix would be 512 MiB
    assert float(std) < 0.01  # 256 of 8192 rows are a sample
    assert float(entropies) < 0.01
    assert largest == "True"


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a08_hooks_join_and_leave_a_compiled_model_at_any_time(compiled_first: bool) -> None:
    net = SelfAttention(12, 2)
    compiled: Any = torch.compile(net, backend="eager")
    x = normal(2, 5, 12)
    if compiled_first:
        compiled(x)
    probe = AttentionProbe(compiled)
    probe.attach()
    during = compiled(x)
    probe.detach()
    stats = probe.compute()["SelfAttention"]
    assert torch.equal(compiled(x), during)
    assert (stats.calls, probe.compute()["SelfAttention"].calls) == (1, 1)
    assert hooks(net) == 0
    assert_matches(stats, attention_reference(*net.heads_of(x)[:2]))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a09_a_full_graph_is_observed_where_a_hook_would_break_it() -> None:
    hooked = nn.Sequential(PlusOne())
    hooked[0].register_forward_hook(torch.compiler.disable(lambda *_: None))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(hooked, backend="eager", fullgraph=True)(normal(3))  # the trap

    net: Any = torch.compile(SelfAttention(12, 2), backend="eager", fullgraph=True)
    monitor = AttentionMonitor(every_n_steps=2)
    _, said = fit(Trained(net), monitor, serve(normal(5, 6, 12)))
    assert said == []
    assert [(step, list(record)) for step, record in monitor.history] == [(step, ["net"]) for step in (0, 1, 3)]
    assert all(math.isfinite(std) for _, record in monitor.history for std in value(record["net"], "logit_std"))


class Static(nn.Module):
    """Writes query, key and output into the same buffers in every call, as a replayed CUDA graph does."""

    query: Tensor
    key: Tensor
    out: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("query", torch.zeros(1, 2, 5, 7))
        self.register_buffer("key", torch.zeros(1, 2, 6, 7))
        self.register_buffer("out", torch.zeros(1, 2, 5, 7))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.query.copy_(query)
        self.key.copy_(key)
        self.out.copy_(F.scaled_dot_product_attention(self.query, self.key, self.key))
        return self.out


def test_a10_numbers_survive_buffers_that_are_overwritten() -> None:
    model = Static()
    first, second = (
        (normal(1, 2, 5, 7, seed=1), normal(1, 2, 6, 7, seed=2)),
        (normal(1, 2, 5, 7) * 9, normal(1, 2, 6, 7)),
    )
    with AttentionProbe(model) as probe:
        model(*first)
    model(*second)
    assert_matches(probe.compute()["Static"], attention_reference(*first))
    with AttentionProbe(model) as pooled:
        model(*first)
        early = pooled.compute()["Static"]
        model(*second)
    assert_matches(early, attention_reference(*first))
    both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    assert_matches(pooled.compute()["Static"], attention_reference(*both))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a10_numbers_survive_the_replay_of_a_cuda_graph() -> None:
    net = SelfAttention(16, 2).cuda()
    compiled: Any = torch.compile(net, mode="reduce-overhead")
    inputs = [normal(2, 5, 16, seed=seed).cuda() for seed in range(6)]
    with torch.no_grad():
        for x in inputs[:3]:
            compiled(x)
        with AttentionProbe(compiled) as probe:
            compiled(inputs[3])
        for x in inputs[4:]:
            compiled(x)
    q, k, _ = (part.cpu() for part in net.heads_of(inputs[3]))
    assert_matches(only(probe.compute()), attention_reference(q, k), relative=1e-3, absolute=1e-4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 8, batch_first=True, dropout=0.0), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


@pytest.fixture
def _one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def in_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: nn.Module) -> nn.Module:
    encoder: Any = model.get_submodule("encoder")
    encoder.layers[1] = checkpoint_wrapper(encoder.layers[1])
    return checkpoint_wrapper(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "parallel": in_parallel,
    "checkpointed": checkpointed,
    "parallel, compiled": lambda model: in_parallel(compiled(model)),
    "compiled, parallel": lambda model: compiled(in_parallel(model)),
    "all": lambda model: compiled(in_parallel(checkpointed(model))),
}


@pytest.mark.usefixtures("_fresh_dynamo", "_one_process")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a11_wrappers_change_no_name(wrapper: str) -> None:
    plain, x = Encoder(), normal(2, 5, 12)
    names = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert list(collect(plain, lambda: plain(x))) == names
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain))
    assert list(collect(wrapped, lambda: wrapped(x).sum().backward())) == names
    assert list(collect(wrapped, lambda: wrapped(x), modules="encoder.layers.1.*")) == names[1:]


def test_a11_two_layers_never_share_a_name_and_a_users_module_keeps_its_own() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = SelfAttention(12, 2)
            self._orig_mod = nn.ModuleDict({"attn": SelfAttention(12, 3)})
            self.module = SelfAttention(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(self._orig_mod["attn"](self.attn(x)))

    model = Odd()
    found = collect(model, lambda: model(normal(2, 5, 12)))
    assert [stats.heads for stats in found.values()] == [2, 3, 4]
    assert found["attn"].heads == 2
    assert found["module"].heads == 4


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


def reachable(root: object) -> list[object]:
    """Return what an object holds, through containers and instances; not through code, classes and modules."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            seen[id(thing)] = thing
            waiting.extend(gc.get_referents(thing))
    return list(seen.values())


@pytest.mark.parametrize("every", [1000, 1])
def test_a15_no_graph_stays_alive(every: int) -> None:
    counts: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (5, 49):
                gc.collect()
                counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    monitor = AttentionMonitor(every_n_steps=every, history_size=0, flight_recorder=0)
    model = Trained(nn.Sequential(SelfAttention(12, 2), SelfAttention(12, 3)))
    reference = weakref.ref(model)
    trainer, _ = fit(model, [monitor, Count()], serve(normal(50, 5, 12)))
    assert counts[1] <= counts[0]
    assert not any(isinstance(thing, Tensor) and thing.requires_grad for thing in reachable(monitor))
    del model, trainer
    gc.collect()
    assert reference() is None


def test_a16_residuals_in_place_work_and_have_their_gradients() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attn(x, x, x, need_weights=False)[0]
            y += x
            return F.relu_(y)

    alone = Block()
    watched = copy.deepcopy(alone)
    x = normal(2, 5, 12)
    trapped = copy.deepcopy(alone)
    trapped.attn.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        trapped(x).sum().backward()  # the trap

    alone(x).sum().backward()
    stats = collect(watched, lambda: watched(x).sum().backward())["attn"]
    assert value(stats, "grad_logits_norm").min() > 0
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SelfAttention(12, 2), SelfAttention(12, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a17_a_frozen_layer_has_statistics_and_no_gradient() -> None:
    model = Trained(Blocks())
    model.net.get_submodule("blocks.0").requires_grad_(False)
    monitor = AttentionMonitor()
    trainer, said = fit(model, monitor, serve(normal(3, 5, 12)))
    keys = trainer.callback_metrics
    assert "attn_logit_std/net.blocks.0" in keys
    assert "attn_grad_logits_norm/net.blocks.0" not in keys
    assert keys["attn_grad_logits_norm/net.blocks.1"] > 0
    assert monitor.history[0][1]["net.blocks.0"].grad_logits_norm is None
    assert said == []

    def without_gradients() -> None:
        with torch.no_grad():
            model.net(normal(1, 5, 12))

    found = collect(model.net, without_gradients)
    assert all(stats.grad_logits_norm is None for stats in found.values())
    assert all(value(stats, "logit_std").min() > 0 for stats in found.values())


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


def test_a19_a_watched_model_and_its_monitor_can_be_pickled(tmp_path: Path) -> None:
    model, x = Blocks(), normal(2, 5, 12)
    probe = AttentionProbe(model)
    probe.attach()
    out = model(x)
    copied = pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for twin in (copied, loaded, copy.deepcopy(model)):
        assert torch.equal(twin(x), out)
    probe.detach()
    assert probe.compute()["blocks.0"].calls == 1

    monitor = AttentionMonitor(modules="net.blocks.1")
    fit(Trained(model), monitor, serve(normal(2, 5, 12)))
    twin = pickle.loads(pickle.dumps(monitor))
    assert [list(record) for _, record in twin.history] == [["net.blocks.1"]] * 2
    fit(Trained(model), twin, serve(normal(2, 5, 12)))
    assert len(twin.history) == 4


def test_a20_grouped_queries_and_a_free_head_dimension() -> None:
    model = tiny_llama(num_hidden_layers=1)
    ids = torch.arange(14).reshape(2, 7)
    stats = collect(model, lambda: model(ids).logits.square().mean().backward())["model.layers.0.self_attn"]
    assert (stats.heads, stats.head_dim, stats.keys) == (4, 32, 7)
    assert value(stats, "scale").tolist() == pytest.approx([32**-0.5] * 4)
    assert value(stats, "scale_ratio").tolist() == pytest.approx([1.0] * 4)
    assert value(stats, "grad_logits_norm").min() > 0

    taken: list[tuple[Tensor, Tensor]] = []

    def spy(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        taken.append((query.detach(), key.detach()))
        return original(query, key, *args, **kwargs)

    original = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        model(ids)
    ((query, key),) = taken
    assert_matches(stats, attention_reference(query, key, is_causal=True))


@pytest.mark.parametrize("layout", ["sequence first", "batch first", "unbatched"])
def test_a21_cross_attention_of_other_lengths_and_widths(layout: str) -> None:
    mha = nn.MultiheadAttention(
        16, 4, kdim=24, vdim=12, batch_first=layout == "batch first", add_zero_attn=True, add_bias_kv=True
    )
    query, key, val = normal(2, 5, 16), normal(2, 9, 24), normal(2, 9, 12)
    if layout == "unbatched":
        query, key, val = query[:1], key[:1], val[:1]
        given = (query[0], key[0], val[0])
    elif layout == "sequence first":
        given = (query.transpose(0, 1), key.transpose(0, 1), val.transpose(0, 1))
    else:
        given = (query, key, val)
    stats = only(collect(mha, lambda: mha(*given)[0].square().sum().backward()))
    assert (stats.keys, stats.heads, stats.head_dim) == (11, 4, 4)

    assert mha.q_proj_weight is not None
    assert mha.k_proj_weight is not None
    assert mha.bias_k is not None
    biases = mha.in_proj_bias.chunk(3)
    keys = F.linear(key, mha.k_proj_weight, biases[1])
    extra = [mha.bias_k.expand(len(keys), 1, 16), torch.zeros(len(keys), 1, 16)]
    q, k = F.linear(query, mha.q_proj_weight, biases[0]), torch.cat([keys, *extra], dim=1)
    q, k = (part.detach().unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k))
    assert_matches(stats, attention_reference(q, k))
    assert value(stats, "grad_logits_norm").min() > 0


class Generating(Trained):
    """Generates text, with a cache, in every validation step."""

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0], labels=batch[0]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        model: Any = self.net
        out = model.generate(batch[0], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
        assert out.shape == (1, 10)


def test_a22_generation_in_validation_stays_out_of_the_training_numbers() -> None:
    torch.manual_seed(4)
    ids = torch.randint(1, 31, (3, 7))
    twins = [tiny_llama(num_hidden_layers=1)]
    twins.append(copy.deepcopy(twins[0]))
    plain, validated = AttentionMonitor(), AttentionMonitor()
    fit(Generating(twins[0]), plain, serve(ids))
    trainer, _ = fit(Generating(twins[1]), validated, serve(ids), serve(ids[:2]), val_check_interval=1)
    for (_, one), (_, other) in zip(plain.history, validated.history, strict=True):
        close(one["net.model.layers.0.self_attn"], other["net.model.layers.0.self_attn"], relative=0, absolute=0)
    assert not any("attn" in key for key in trainer.callback_metrics if key.startswith("val_"))
    assert validated.evaluations == {}


def test_a22_steps_with_a_cache_are_pooled_row_by_row_where_one_asks_for_validation() -> None:
    torch.manual_seed(4)
    ids = torch.randint(1, 31, (1, 7))
    model = tiny_llama(num_hidden_layers=1, num_key_value_heads=4)
    monitor = AttentionMonitor(stages=("validate",))
    fit(Generating(model), monitor, serve(ids), serve(ids))
    stats = monitor.evaluations["validate"]["net.model.layers.0.self_attn"]
    assert (stats.calls, stats.keys) == (3, 9)  # 7 queries, then one over 8 and one over 9 keys
    assert stats.rows.tolist() == [9] * 4

    # Pooled by rows it is one causal pass over the text as generated, for that is what a cache computes.
    written: Any = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    again = collect(model, lambda: model(written[:, :-1]), gradients=False)["model.layers.0.self_attn"]
    for name in ("logit_std", "logit_row_std", "entropy_normalized", "jacobian_trace", "logit_max"):
        torch.testing.assert_close(value(stats, name), value(again, name), rtol=1e-5, atol=1e-6)


def test_a23_an_error_or_a_value_of_ours_never_reaches_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    alone = Trained(Blocks())
    watched = copy.deepcopy(alone)
    data = normal(4, 5, 12)
    fit(alone, [], serve(data))

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("the statistic is broken")

    monkeypatch.setattr(looks_module, "attention_rows", broken)
    monkeypatch.setattr(looks_module, "softmax_rows", broken)
    trainer, (said,) = fit(watched, AttentionMonitor(), serve(data))
    assert trainer.global_step == 4
    assert said.startswith("seen, but not measured: net.blocks.0 (ZeroDivisionError: the statistic is")
    assert all(torch.equal(one, other) for one, other in zip(alone.parameters(), watched.parameters(), strict=True))

    monkeypatch.undo()
    monkeypatch.setattr(looks_module, "attention_rows", broken)
    monkeypatch.setattr(looks_module, "attention_gradient_rows", broken)
    net = copy.deepcopy(alone.net)
    x = data[:2]
    with AttentionProbe(net) as probe:
        out = net(x)
        out.square().sum().backward()
    alone.zero_grad()
    wanted = alone.net(x)
    wanted.square().sum().backward()
    assert torch.equal(out, wanted)
    for one, other in zip(alone.net.parameters(), net.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert set(probe.skipped) == {"blocks.0", "blocks.1"}

"""A: models that are compiled, wrapped or replayed as a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch has no hints for it
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from attn_monitor import AttentionMonitor, AttentionProbe
from attn_monitor.catalog import ALL
from tests.cases.hooked import PlusOne
from tests.cases.support import SelfAttention, Trained, collect, fit, hooks, normal, only, serve
from tests.models import LIGHTNING_ADVICE
from tests.reference import assert_matches, attention_reference, gradient_reference

pytestmark = LIGHTNING_ADVICE


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
    twin: Any = copy.deepcopy(net._orig_mod)
    monitor = AttentionMonitor(every_n_steps=2, statistics=sorted(ALL))
    _, said = fit(Trained(net, lr=LR), monitor, serve(normal(5, 6, 12)))
    assert said == []
    assert [(step, list(record)) for step, record in monitor.history] == [(step, ["net"]) for step in (0, 1, 3)]
    batches = normal(5, 6, 12).split(1)
    untrained = attention_reference(*twin.heads_of(batches[3])[:2])
    wanted = list(by_hand(twin, batches))
    assert not torch.allclose(wanted[3]["logit_std"], untrained["logit_std"], rtol=1e-3)
    for step, record in monitor.history:
        assert_matches(record["net"], wanted[step], relative=1e-4)


LR = 1.0


def by_hand(net: SelfAttention, batches: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Train with steps of plain arithmetic, unwatched, and yield what the reference says of each."""
    for x in batches:
        q, k, v = net.split(x)
        out = F.scaled_dot_product_attention(q, k, v)
        out.retain_grad()
        net.zero_grad()
        net.out(out.transpose(1, 2).flatten(2)).square().mean().backward()
        assert out.grad is not None
        norms = gradient_reference(q.detach(), k.detach(), v.detach(), out.grad)
        names = ("grad_logits_norm", "grad_probs_norm", "gradient_gain")
        yield {**attention_reference(q.detach(), k.detach()), **{name: norms[name] for name in names}}
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(LR * parameter.grad)


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

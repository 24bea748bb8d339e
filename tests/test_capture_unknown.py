"""What is no attention, what cannot be followed and is told, and what must not be disturbed."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from attn_monitor.capture.mode import NOISE, UNKNOWN_ORIGIN
from attn_monitor.capture.naming import canonical_names
from tests.reference import assert_matches, attention_reference, softmax_reference
from tests.spellings import ALLOWED, SCALE, SPELLINGS, Attention, B, D, E, H, T

EXPERTS = 5

Function = Callable[[Tensor], Tensor]


def watched(model: nn.Module, *inputs: Tensor) -> AttentionStatistics:
    with AttentionProbe(model) as probe:
        model(*inputs).square().sum().backward()
    assert not probe.skipped
    (stats,) = probe.compute().values()
    return stats


def assert_nothing(model: nn.Module, *inputs: Tensor) -> None:
    """Neither attention nor a reason, when all is hooked and when only what was found is."""
    probe = AttentionProbe(model)
    for _ in range(2):
        with probe:
            model(*inputs).square().sum().backward()
        assert dict(probe.compute()) == {}
        assert probe.skipped == {}


# -- scores that are moved to other places --------------------------------------------------------------------------


def masked_scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(~ALLOWED, -1e4)


def largest_scattered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    values, indices = masked_scores(q, k).topk(3)
    return torch.full((B, H, T, T), -math.inf).scatter(-1, indices, values).softmax(-1) @ v


def largest_scattered_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    values, indices = masked_scores(q, k).topk(3, dim=-1)
    return torch.full((B, H, T, T), -1e4).scatter_(3, indices, values).softmax(-1) @ v


def largest_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    values, indices = masked_scores(q, k).sort(dim=-1, descending=True)
    values, indices = values[..., :3], indices[..., :3]
    rows = v[:, :, None].expand(-1, -1, T, -1, -1).gather(3, indices[..., None].expand(*indices.shape, D))
    return (values.softmax(-1)[..., None, :] @ rows)[..., 0, :]


def others_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = masked_scores(q, k)
    indices = scores.argsort(dim=-1)[..., : T - 3]
    return scores.scatter(-1, indices, -1e4).softmax(-1) @ v


@pytest.mark.parametrize(
    "attend",
    [largest_scattered, largest_scattered_in_place, largest_alone, others_filled],
    ids=lambda attend: attend.__name__,
)
def test_sparse_attention_to_the_largest_scores(attend: Callable[..., Tensor]) -> None:
    model, x = Attention(attend), torch.randn(B, T, E)
    stats = watched(model, x)
    q, k, _ = (part.detach() for part in model.heads(x))
    scores = masked_scores(q, k)
    kept = torch.zeros(B, H, T, T, dtype=torch.bool).scatter(-1, scores.topk(3).indices, True) & ALLOWED
    wanted = softmax_reference(scores, kept)
    names = [name for name in wanted if name != "sink_mass" or attend is not largest_alone]
    assert_matches(stats, wanted, names=names)
    assert stats.head_dim == D
    assert stats.grad_logits_norm is not None
    if attend is not others_filled:
        assert stats.q_rms is None


def test_whole_columns_that_are_filled_are_masked() -> None:
    columns = torch.tensor([1, 4])

    def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * SCALE).index_fill(-1, columns, -1e4).softmax(-1) @ v

    model, x = Attention(filled), torch.randn(B, T, E)
    stats = watched(model, x)
    q, k, _ = (part.detach() for part in model.heads(x))
    allowed = torch.ones(T, T, dtype=torch.bool).index_fill(1, columns, False)
    assert_matches(stats, attention_reference(q, k, masks=(allowed,)))


def test_a_clamp_from_zero_on_is_told_as_a_relu() -> None:
    model = Attention(lambda q, k, v: (q @ k.mT).clamp(min=0) @ v)
    with AttentionProbe(model) as probe:
        model(torch.randn(B, T, E))
    assert "without a softmax that can be seen" in probe.skipped["Attention"]


def test_the_noise_of_gumbel_softmax_is_part_of_the_logits_and_told() -> None:
    model, x = Attention(lambda q, k, v: F.gumbel_softmax(q @ k.mT * SCALE, tau=0.5) @ v), torch.randn(B, T, E)
    torch.manual_seed(1)
    alone = model(x)
    torch.manual_seed(1)
    with AttentionProbe(model) as probe:
        assert torch.equal(model(x), alone)
    stats = probe.compute()["Attention"]
    torch.manual_seed(1)
    noise = -torch.empty(B, H, T, T).exponential_().log()
    q, k, _ = (part.detach() for part in model.heads(x))
    assert_matches(stats, attention_reference(q, k, masks=(noise / 0.5,), scale=SCALE / 0.5))
    assert probe.notes["Attention"] == NOISE


# -- softmaxes of unknown origin ------------------------------------------------------------------------------------


def _softcap(scores: Tensor) -> Tensor:
    return torch.tanh(scores / 2.0) * 2.0


@pytest.fixture(scope="module")
def opaque() -> Function:
    """Stands for whatever is compiled: its result is seen, what happens in it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Function = torch.jit.script(_softcap)
    return scripted


class Free(nn.Module):
    """Applies a function to projected query, key and value [B, T, E]."""

    def __init__(self, function: Callable[[Free, Tensor, Tensor, Tensor], Tensor], opaque: Function) -> None:
        super().__init__()
        self.function, self.opaque = function, opaque
        self.qkv, self.route, self.filters = nn.Linear(E, 3 * E), nn.Linear(E, EXPERTS), nn.Conv1d(E, EXPERTS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, *self.qkv(x).chunk(3, -1))


def folded_softmax(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2).reshape(B * H, T, D) for part in (q, k, v))
    return torch.bmm(model.opaque(torch.bmm(q, k.mT)).softmax(-1), v)


def folded_einsum(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bqk,bkd->bqd", model.opaque(q @ k.mT).softmax(-1), v)


@pytest.mark.parametrize("function", [folded_softmax, folded_einsum])
def test_a_softmax_of_unknown_origin_in_three_dimensions_is_told(
    function: Callable[..., Tensor], opaque: Function
) -> None:
    with AttentionProbe(model := Free(function, opaque)) as probe:
        model(torch.randn(B, T, E))
    assert dict(probe.compute()) == {}
    assert probe.skipped == {"Free": UNKNOWN_ORIGIN}


def mixture(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = model.opaque(model.route(q)).softmax(-1)
    return torch.einsum("btx,btxe->bte", gates, torch.stack([k] * EXPERTS, dim=2))


def mixture_by_hand(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = model.opaque(model.route(q)).softmax(-1)
    return (gates[..., None] * torch.stack([k] * EXPERTS, dim=2)).sum(2)


def dispatch(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = (model.route(q) + torch.rand(EXPERTS)).float().softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), EXPERTS).float() * gates
    inputs = torch.einsum("btx,bte->bxe", chosen, k)
    return torch.einsum("btx,bxe->bte", chosen, torch.tanh(inputs))


def clusters(model: Free, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(model.filters(q.mT).softmax(1), v)


@pytest.mark.parametrize("function", [mixture, mixture_by_hand, dispatch, clusters])
def test_routers_are_not_told(function: Callable[..., Tensor], opaque: Function) -> None:
    assert_nothing(Free(function, opaque), torch.randn(B, T, E))


# -- weights that are no parameters ---------------------------------------------------------------------------------


class Router(nn.Module):
    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.first = nn.Linear(E, E)
        if buffer:
            self.register_buffer("weight", torch.randn(E, EXPERTS))
        else:
            self.weight = nn.Parameter(torch.randn(E, EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gates = (x @ self.weight).softmax(-1)
        return torch.einsum("btx,xe->bte", gates, self.weight.mT) + x


class Functional(nn.Module):
    """Runs a module with tensors in the place of its parameters, as meta-learning does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        adapted = {name: 2 * weight for name, weight in self.inner.named_parameters()}
        out: Tensor = torch.func.functional_call(self.inner, adapted, (x,))
        return out


def test_a_router_whose_weight_is_a_buffer_is_none() -> None:
    assert_nothing(Router(buffer=True), torch.randn(B, T, E))


def test_a_router_with_tensors_in_place_of_its_parameters_is_none() -> None:
    router, x = Router(buffer=False), torch.randn(B, T, E)
    assert_nothing(Functional(router), x)
    plain = {name: weight.detach().clone() for name, weight in router.named_parameters()}

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(router, plain, (x,))
            return out

    with AttentionProbe(router) as probe:
        Outside()(x)
    assert dict(probe.compute()) == {}
    assert probe.skipped == {}


def test_attention_with_tensors_in_place_of_its_parameters_is_measured() -> None:
    model, x = Attention(SPELLINGS[5]), torch.randn(B, T, E)
    wanted = watched(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2)
    stats = watched(Functional(model), x)
    assert wanted.logit_std is not None
    assert stats.logit_std is not None
    torch.testing.assert_close(stats.logit_std, wanted.logit_std)


class Cached(nn.Module):
    """Attention over keys that were written into a buffer."""

    keys: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, B, T, E))
        self.project, self.write = nn.Linear(E, E), write

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        with torch.no_grad():
            self.write(self.keys, x)
        return (x @ self.keys[1].mT).softmax(-1) @ x


def copied(keys: Tensor, x: Tensor) -> None:
    keys[1].copy_(x)


def assigned(keys: Tensor, x: Tensor) -> None:
    keys[1, :, :T] = x


def assigned_to_a_view(keys: Tensor, x: Tensor) -> None:
    keys[1][:, :T] = x


@pytest.mark.parametrize(
    "write", [copied, assigned, assigned_to_a_view, lambda keys, x: keys.index_copy_(0, torch.tensor([1]), x[None])]
)
def test_keys_in_a_buffer_are_keys_once_they_were_written(write: Callable[[Tensor, Tensor], object]) -> None:
    assert watched(Cached(write), torch.randn(B, T, E)).keys == T


# -- names ----------------------------------------------------------------------------------------------------------


def test_only_what_runs_data_in_parallel_loses_its_part_of_a_name() -> None:
    class DDPM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Attention(SPELLINGS[0])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.diffusion = DDPM()
            self.parallel = nn.DataParallel(Attention(SPELLINGS[0]))

    names = set(canonical_names(Model()).values())
    assert {"diffusion.module", "diffusion.module.qkv", "parallel", "parallel.qkv"} <= names


# -- what must not be disturbed -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore:Using len:torch.jit.TracerWarning")
def test_a_trace_taken_while_watched_is_the_same_as_without() -> None:
    model, x = Attention(SPELLINGS[5]).eval(), torch.randn(B, T, E)
    alone = torch.jit.trace(model, x)
    with AttentionProbe(model) as probe:
        traced = torch.jit.trace(model, x)
    assert [node.kind() for node in traced.graph.nodes()] == [node.kind() for node in alone.graph.nodes()]
    assert torch.equal(traced(x), model(x))
    with probe:
        model(x)
    assert "Attention" in probe.compute()
    assert not probe.skipped


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore:Using len:torch.jit.TracerWarning")
def test_a_forward_that_is_only_traced_is_told() -> None:
    model = Attention(SPELLINGS[0])
    with AttentionProbe(model) as probe:
        torch.jit.trace(model, torch.randn(B, T, E), check_trace=False)
    assert dict(probe.compute()) == {}
    assert "torch.jit.trace" in probe.skipped["Attention"]


def test_a_copy_made_while_watched_holds_nothing_of_the_monitors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Attention(SPELLINGS[5])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

        def training_step(self, x: Tensor) -> Tensor:
            if not copies:
                copies.append(copy.deepcopy(self))
            return self(x).square().sum()

    copies: list[Model] = []
    model = Model()
    probe = AttentionProbe(model)
    probe.attach(("training_step",))
    model.training_step(torch.randn(B, T, E)).backward()
    copies.append(copy.deepcopy(model))
    probe.detach()
    gone = weakref.ref(probe), weakref.ref(probe._mode), weakref.ref(probe._tracker), weakref.ref(model)
    del probe, model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    for copied_model in copies:
        copied_model.training_step(torch.randn(B, T, E)).backward()


def test_an_exported_program_is_measured_as_the_model_it_was_made_of() -> None:
    model, x = Attention(SPELLINGS[5]), torch.randn(B, T, E)
    wanted = watched(model, x)
    program = torch.export.export(model, (x,))
    for exported in (program, program.run_decompositions()):
        stats = watched(exported.module(), x)
        assert_matches(stats, {name: value.double() for name, value in wanted.measured().items()})

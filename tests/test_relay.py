"""Functions of other packages are watched while a probe is attached, and are theirs again afterwards."""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_monitor import AttentionProbe, observe_attention
from attn_monitor.arguments import attention_call
from attn_monitor.capture.kernels import KernelCall, register_kernel
from attn_monitor.capture.kernels.registry import KERNELS
from tests.reference import assert_matches, attention_reference, gradient_reference
from tests.test_kernels import GRADIENTS, B, Calls, D, G, H, K, Q, V, packed_reference, sequences, watched

LOG_E = math.log2(math.e)


def opaque(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Attention [B, H, Q, D] that no one recognises: its softmax is spelled out."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q * (q.shape[-1] ** -0.5 if scale is None else scale), k)
    powers = torch.exp2(LOG_E * (scores if bias is None else scores + bias))
    return (powers @ v) / powers.sum(-1, keepdim=True)


# -- a kernel of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the function of an extension for which an adapter is registered."""
    calls: list[int] = []

    def fast_attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float = 0.3, *, causal: bool = False) -> Tensor:
        """It has a closure, defaults and keywords."""
        calls.append(1)
        mask = torch.ones(q.shape[2], k.shape[2]).tril().log() if causal else None
        return opaque(q, k, v, mask, softmax_scale)

    module = types.ModuleType("my_kernels")
    vars(module)["fast_attention"] = fast_attention
    monkeypatch.setitem(sys.modules, "my_kernels", module)

    @register_kernel("my_kernels:fast_attention")
    def read(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float = 0.3, causal: bool = False) -> KernelCall:
        return KernelCall(lambda: attention_call(q, k, v, scale=softmax_scale, is_causal=causal, enable_gqa=True))

    yield fast_attention
    del KERNELS["my_kernels:fast_attention"]


def test_a_registered_kernel_equals_the_reference(kernel: Any) -> None:
    q, k, v = (torch.randn(B, n, m, d, requires_grad=True) for n, m, d in ((H, Q, D), (G, K, D), (G, K, V)))
    bare = kernel(q, k, v, causal=True)
    stats, out = watched(lambda *qkv: kernel(*qkv, causal=True), q, k, v)
    assert torch.equal(bare, out)
    gradients = gradient_reference(q.detach(), k.detach(), v.detach(), 2 * out.detach(), is_causal=True, scale=0.3)
    expected = attention_reference(q.detach(), k.detach(), is_causal=True, scale=0.3)
    assert_matches(stats, {**expected, **{name: gradients[name] for name in GRADIENTS}})
    assert (stats.calls, stats.approximate) == (1, frozenset())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_registered_kernel_under_checkpointing(kernel: Any, reentrant: bool) -> None:
    x = torch.randn(B, H, Q, D, requires_grad=True)
    wanted, _ = watched(lambda x: kernel(x, x, x).tanh(), x)
    inner = Calls(lambda x: kernel(x, x, x).tanh())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    with AttentionProbe(model := Checkpointed()) as probe:
        model(x).square().sum().backward()
    found = probe.compute()["inner"]
    assert found.calls == 1
    assert found.grad_logits_norm is not None
    torch.testing.assert_close(found.grad_logits_norm, wanted.grad_logits_norm)


def test_the_function_is_itself_again(kernel: Any) -> None:
    code, told, attributes = kernel.__code__, inspect.signature(kernel), dict(vars(kernel))
    x = torch.randn(B, H, Q, D)
    model = Calls(kernel)
    first, second = AttentionProbe(model), AttentionProbe(model)
    with first, second:
        assert kernel.__code__ is not code
        assert inspect.signature(kernel) == told
        model(x, x, x)
    assert kernel.__code__ is code
    assert vars(kernel) == attributes
    assert first.compute()["Calls"].calls == second.compute()["Calls"].calls == 1
    with pytest.raises(ZeroDivisionError), AttentionProbe(model):
        raise ZeroDivisionError
    assert kernel.__code__ is code


def test_outside_of_a_watched_model_nothing_is_reported(kernel: Any) -> None:
    x = torch.randn(B, H, Q, D)
    with AttentionProbe(nn.Identity()) as probe:
        assert torch.equal(kernel(x, x, x), opaque(x, x, x, scale=0.3))
    assert not probe.compute()


def test_wrong_arguments_raise_what_the_kernel_raises(kernel: Any) -> None:
    model = Calls(kernel)
    with AttentionProbe(model) as probe, pytest.raises(TypeError, match=r"fast_attention\(\) got an unexpected"):
        model(1, 2, 3, wrong=4)
    assert not probe.skipped


def test_an_output_of_another_shape_loses_the_gradients_only(kernel: Any) -> None:
    @register_kernel("my_kernels:fast_attention")
    def read(q: Tensor, k: Tensor, v: Tensor) -> KernelCall:
        return KernelCall(lambda: attention_call(q, k, v), canonical=lambda out: out.flatten(2))

    x = torch.randn(B, H, Q, D, requires_grad=True)
    with AttentionProbe(model := Calls(kernel)) as probe:
        model(x, x, x).sum().backward()
    stats = probe.compute()["Calls"]
    assert_matches(stats, attention_reference(x.detach(), x.detach()))
    assert stats.grad_logits_norm is None
    assert "another shape" in probe.notes["Calls"]


def test_a_path_without_a_function_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expects 'package.module:function', got 'my_kernels'"):
        register_kernel("my_kernels")


# -- xformers ----------------------------------------------------------------------------------------------------------


class LowerTriangularMask:
    """As in xformers: a mask that is no tensor."""


class LocalMask:
    """A mask that only knows how to become a tensor."""

    def materialize(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        near = (torch.arange(shape[-1]) - torch.arange(shape[-2])[:, None]).abs() <= 2
        return torch.where(near, 0.0, -math.inf).expand(shape)


class SeqLenInfo:
    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.seqstart = torch.tensor([0, *lengths]).cumsum(0).int()
        self.max_seqlen = max(lengths)


class BlockDiagonalCausalMask:
    """Packed sequences."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.q_seqinfo = self.k_seqinfo = SeqLenInfo(lengths)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    q, k, v = (t.transpose(1, 2) if t.dim() == 4 else t.flatten(2, 3).transpose(1, 2) for t in (query, key, value))
    return (
        opaque(q, k, v, attn_bias if isinstance(attn_bias, Tensor) else None, scale)
        .transpose(1, 2)
        .reshape(query.shape)
    )


@pytest.fixture
def xformers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    module = types.ModuleType("xformers.ops")
    copied = types.FunctionType(memory_efficient_attention.__code__, globals(), "memory_efficient_attention")
    copied.__defaults__ = memory_efficient_attention.__defaults__
    copied.__kwdefaults__ = memory_efficient_attention.__kwdefaults__
    vars(module)["memory_efficient_attention"] = copied
    monkeypatch.setitem(sys.modules, "xformers.ops", module)
    return copied


NEAR = (torch.arange(Q) - torch.arange(Q)[:, None]).abs() <= 2
BIAS = torch.linspace(-1, 1, B * H * Q * Q).view(B, H, Q, Q)


@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (None, {}),
        (LowerTriangularMask(), {"is_causal": True}),
        (LocalMask(), {"masks": [NEAR]}),
        (BIAS, {"masks": [BIAS]}),
    ],
    ids=["none", "causal", "local", "tensor"],
)
def test_xformers(bias: Any, options: dict[str, Any], xformers: Callable[..., Tensor]) -> None:
    q, k, v = (torch.randn(B, Q, H, D, requires_grad=True) for _ in range(3))
    stats, out = watched(lambda *qkv: xformers(*qkv, attn_bias=bias, scale=0.6), q, k, v)
    q, k, v = (tensor.detach().transpose(1, 2) for tensor in (q, k, v))
    gradients = gradient_reference(q, k, v, 2 * out.detach().transpose(1, 2), scale=0.6, **options)
    expected = attention_reference(q, k, scale=0.6, **options)
    assert_matches(stats, {**expected, **{name: gradients[name] for name in GRADIENTS}})


def test_xformers_with_groups_of_heads(xformers: Callable[..., Tensor]) -> None:
    q, k = torch.randn(B, Q, 2, 3, D), torch.randn(B, Q, 2, 3, D)
    stats, _ = watched(xformers, q, k, k)
    assert_matches(stats, attention_reference(*(tensor.flatten(2, 3).transpose(1, 2) for tensor in (q, k))))


def test_xformers_with_packed_sequences(xformers: Callable[..., Tensor]) -> None:
    lengths = (4, 1, 6)
    qs, ks = sequences(H, lengths), sequences(H, lengths)
    q, k = (torch.cat(parts, 1).transpose(0, 1)[None] for parts in (qs, ks))
    stats, _ = watched(lambda *qkv: xformers(*qkv, attn_bias=BlockDiagonalCausalMask(lengths)), q, k, k)
    masks = [torch.ones(n, n).tril() > 0 for n in lengths]
    assert_matches(stats, packed_reference(qs, ks, masks))


# -- functions registered with transformers ----------------------------------------------------------------------------


def tiny_llama(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def registered() -> Iterator[Callable[[Callable[..., Any]], None]]:
    modeling = pytest.importorskip("transformers.modeling_utils")
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    yield lambda function: functions.register("mine", function)
    functions._global_mapping.pop("mine", None)


def blind(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any) -> Any:
    causal = torch.ones(query.shape[2], key.shape[2]).tril().log()
    return opaque(query, key, value, causal, scaling).transpose(1, 2), None


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_registered_function_that_nothing_sees_into(registered: Any, checkpointed: bool) -> None:
    registered(blind)
    ids = torch.arange(10).view(2, 5)

    def run(implementation: str) -> Any:
        model = tiny_llama(implementation).train()
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        with AttentionProbe(model) as probe:
            model(ids, labels=ids).loss.backward()
        assert not probe.skipped
        return probe.compute()

    found, wanted = run("mine"), run("eager")
    assert list(found) == list(wanted) == [f"model.layers.{n}.self_attn" for n in range(2)]
    for name, stats in wanted.items():
        for statistic, value in stats.measured().items():
            torch.testing.assert_close(getattr(found[name], statistic), value, rtol=1e-4, atol=1e-6)
        assert found[name].calls == 1


def test_a_registered_function_that_ends_in_sdpa_counts_once(registered: Any) -> None:
    def wrapped(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None

    def shows(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        observe_attention("shown", query, key, is_causal=True, enable_gqa=True)
        return blind(module, query, key, value, mask, **options)

    for function, names in ((wrapped, [f"model.layers.{n}.self_attn" for n in range(2)]), (shows, ["shown"])):
        registered(function)
        with AttentionProbe(model := tiny_llama("mine")) as probe:
            model(torch.arange(5)[None])
        assert list(probe.compute()) == names
        assert {stats.calls for stats in probe.compute().values()} == {3 - len(names)}


def test_the_table_of_transformers_is_itself_again(registered: Any) -> None:
    modeling = pytest.importorskip("transformers.modeling_utils")
    registered(blind)
    before = dict(vars(modeling.AttentionInterface))
    with AttentionProbe(nn.Identity()):
        assert modeling.ALL_ATTENTION_FUNCTIONS["mine"] is blind  # no watched model runs in this thread
        assert "__getitem__" in vars(modeling.AttentionInterface)
    assert dict(vars(modeling.AttentionInterface)) == before

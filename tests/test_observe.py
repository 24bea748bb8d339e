"""What the user shows: kernels no one can see into, and other softmaxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_monitor import AttentionProbe, observe_attention, observe_logits
from tests.reference import assert_matches, attention_reference, gradient_reference, softmax_reference

B, H, G, Q, K, D = 2, 6, 3, 7, 11, 5


class Kernel(nn.Module):
    """An attention by hand that shows itself."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        observe_attention("kernel", q, k, is_causal=True, scale=0.7, enable_gqa=True, softcap=3.0)
        return q.sum() + k.sum()


def test_a_shown_kernel_equals_the_reference() -> None:
    q, k = torch.randn(B, H, Q, D), torch.randn(B, G, K, D)
    model = Kernel()
    with AttentionProbe(model) as probe:
        model(q, k)
    stats = probe.compute()["kernel"]
    assert_matches(stats, attention_reference(q, k, is_causal=True, scale=0.7, softcap=3.0))
    assert stats.grad_logits_norm is None


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_shown_logits_have_their_gradient(reentrant: bool | None) -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(D, D), nn.Linear(D, D)
            self.logits: Tensor | None = None

        def score(self, x: Tensor) -> Tensor:
            logits = self.image(x) @ self.text(x).T
            observe_logits("contrastive", logits, head_dim=D)
            return F.cross_entropy(logits, torch.arange(len(x)))

        def forward(self, x: Tensor) -> Tensor:
            if reentrant is None:
                return self.score(x)
            loss: Tensor = checkpoint(self.score, x, use_reentrant=reentrant)
            return loss

    model, x = Contrastive(), torch.randn(Q, D)
    with AttentionProbe(model) as probe:
        model(x.requires_grad_()).backward()
    stats = probe.compute()["contrastive"]
    with torch.no_grad():
        logits = model.image(x) @ model.text(x).T
    assert_matches(stats, softmax_reference(logits[None, None], torch.ones(Q, Q, dtype=torch.bool)))
    gradient = (logits.double().softmax(-1) - torch.eye(Q)) / Q
    assert stats.grad_logits_norm is not None
    torch.testing.assert_close(stats.grad_logits_norm, gradient.norm()[None], rtol=1e-5, atol=0)
    assert (stats.calls, stats.head_dim, stats.scale) == (1, D, None)


@pytest.mark.parametrize("batched", [True, False])
def test_a_shown_output_gives_the_gradients(batched: bool) -> None:
    q, k, v = torch.randn(B, H, Q, D), torch.randn(B, G, K, D), torch.randn(B, G, K, D)
    if not batched:
        q, k, v = q[0], k[0], v[0]

    class Shown(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.no_grad():
                weights = (q @ k.repeat_interleave(H // G, -3).mT).softmax(-1)
            out = weights @ v.repeat_interleave(H // G, -3)
            observe_attention("kernel", q, k, v, scale=1.0, enable_gqa=True, output=out)
            return out

    model = Shown()
    with AttentionProbe(model, modules=lambda name, _: name == "") as probe:
        out = model(q, k, v.requires_grad_())
        out.square().sum().backward()
    stats = probe.compute()["kernel"]
    q, k, v, out = (x.detach() if batched else x.detach()[None] for x in (q, k, v, out))
    expected = gradient_reference(q, k, v, 2 * out, scale=1.0)
    assert_matches(stats, attention_reference(q, k, scale=1.0))
    assert_matches(stats, expected, names=("grad_logits_norm", "grad_probs_norm", "gradient_gain"))


def test_an_output_that_does_not_fit_is_skipped_with_the_shapes() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            observe_attention("transposed", x, x, x, output=x.transpose(1, 2))
            observe_attention("without value", x, x, output=x)
            return x

    with AttentionProbe(model := Wrong()) as probe:
        model(torch.zeros(B, H, Q, D))
    assert dict(probe.compute()) == {}
    assert "expects the shape [2, 6, 7, 5], got of shape [2, 7, 6, 5]" in probe.skipped["transposed"]
    assert "needs `value`" in probe.skipped["without value"]


def test_compiled_without_graph_breaks_and_recorded_when_watched() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.gate(x)
            observe_logits("router", logits)
            observe_attention("kernel", x[None], x[None], x[None], output=x[None])
            return logits.softmax(-1).square().sum()

    traced: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(1)
        return graph

    model, x = Router(), torch.randn(Q, D)
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    compiled(x).backward()
    with AttentionProbe(compiled) as probe:
        compiled(x).backward()
    stats = probe.compute()
    assert set(stats) == {"router", "kernel"}
    with torch.no_grad():
        logits = model.gate(x)
    assert_matches(stats["router"], softmax_reference(logits[None, None], torch.ones(Q, 3, dtype=torch.bool)))
    assert stats["router"].grad_logits_norm is not None
    compiled(x).backward()
    assert traced == [1]


@pytest.mark.slow
# Dynamo looks at .grad of every tensor that enters a graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_full_graph_gives_the_whole_record_gradients_included() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.gate = nn.Linear(D, 3 * D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(0, (1, H, Q)) for part in self.qkv(x).chunk(3, -1))
            weights = (q @ k.mT).exp()
            out = weights / weights.sum(-1, keepdim=True) @ v
            observe_attention("kernel", q, k, v, scale=1.0, output=out)
            logits = self.gate(out)
            observe_logits("router", logits)
            return logits.logsumexp(-1).sum() + out.square().sum()

    torch._dynamo.reset()
    model, x = Blind(), torch.randn(H * Q, D)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x).backward()
    alone = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with AttentionProbe(compiled, modules=lambda name, _: name == "") as probe:
        compiled(x).backward()
    for parameter, gradient in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    found = probe.compute()
    assert set(found) == {"kernel", "router"}

    q, k, v = (part.detach().unflatten(0, (1, H, Q)) for part in model.qkv(x).chunk(3, -1))
    out = ((q @ k.mT).softmax(-1) @ v).requires_grad_()
    logits = model.gate(out)
    (logits.logsumexp(-1).sum() + out.square().sum()).backward()
    assert out.grad is not None
    wanted = gradient_reference(q, k, v, out.grad, scale=1.0)
    assert_matches(found["kernel"], attention_reference(q, k, scale=1.0))
    assert_matches(found["kernel"], wanted, names=("grad_logits_norm", "grad_probs_norm", "gradient_gain"))
    shown = logits.detach()
    assert_matches(found["router"], softmax_reference(shown, torch.ones(Q, 3, dtype=torch.bool)))
    norm = shown.double().softmax(-1)[0].norm(dim=(1, 2))  # of the gradient of logsumexp
    torch.testing.assert_close(found["router"].grad_logits_norm, norm, rtol=1e-5, atol=0)


def test_nothing_happens_when_nothing_watches() -> None:
    observe_attention("kernel", torch.zeros(1), torch.zeros(2, 3))
    observe_logits("logits", torch.zeros(()))


def test_shapes_that_do_not_fit_are_skipped_with_the_shapes() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            observe_attention("kernel", torch.zeros(B, H, Q, D), torch.zeros(B, H, D, K))
            observe_logits("logits", torch.zeros(3, 4), dim=2)
            return x

    model = Wrong()
    with AttentionProbe(model) as probe:
        model(torch.zeros(1))
    assert dict(probe.compute()) == {}
    assert "[2, 6, 7, 5]" in probe.skipped["kernel"]
    assert "[2, 6, 5, 11]" in probe.skipped["kernel"]
    assert "got 2" in probe.skipped["logits"]


def test_two_probes_each_see_everything() -> None:
    q, k = torch.randn(B, H, Q, D), torch.randn(B, G, K, D)
    model = Kernel()
    with AttentionProbe(model) as first, AttentionProbe(model) as second:
        model(q, k)
    assert first.compute()["kernel"].calls == second.compute()["kernel"].calls == 1


def test_what_is_no_tensor_is_skipped_too() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            observe_logits("logits", [x])  # type: ignore[arg-type] # the mistake
            return x

    model = Wrong()
    with AttentionProbe(model) as probe:
        model(torch.zeros(1))
    assert "logits" in probe.skipped


def test_a_forgotten_name_is_told() -> None:
    class Forgetful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            observe_attention(x, x, x)  # type: ignore[arg-type] # the mistake
            observe_logits(x, "logits")  # type: ignore[arg-type] # the mistake
            return x

    model = Forgetful()
    with AttentionProbe(model) as probe:
        model(torch.randn(2, 3, 5, 7))
    assert dict(probe.compute()) == {}
    assert 'observe_attention("name", query, key)' in probe.skipped["observe_attention"]
    assert 'observe_logits("name", logits)' in probe.skipped["observe_logits"]

"""Attention that nobody can see is named: modules called attention that ran and in which nothing was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionProbe, observe_logits
from attn_monitor.capture.coverage import NOTHING_SEEN, unseen_attention
from tests.cases.support import Trained, fit, serve
from tests.models import DIM, LIGHTNING_ADVICE, Fused, HandWritten, split_heads

pytestmark = [*LIGHTNING_ADVICE, pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")]


class LinearAttention(nn.Module):
    """Weighs values without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.elu(part) + 1 for part in self.qkv(x).chunk(3, -1))
        return q @ (k.mT @ v)


class _BelowTorch(torch.autograd.Function):
    """Attends where torch sees nothing of it, as an extension does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.from_numpy(q.numpy() @ k.numpy().swapaxes(-1, -2) @ v.numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0], gradients[0]


class FlashAttention(nn.Module):
    """The kernel in the shape of a module, without a parameter of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _BelowTorch.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch gives it no hints
        return out


class Mixer(nn.Module):
    """A block whose name says nothing, around a kernel whose name does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(DIM, 3 * DIM), FlashAttention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(*split_heads(self.qkv(x))).transpose(1, 2).flatten(2)
        return out


class AdditiveAttention(nn.Module):
    """A softmax over what is no product of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.score = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.query(x)[:, :, None] + self.key(x)[:, None]))[..., 0]
        return scores.softmax(-1) @ x


class Named(nn.Module):
    """Only the attribute says that it is attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), Mixer()
        self.attn.inner = nn.Identity()  # type: ignore[assignment] # the attention is taken out
        self.attn.forward = lambda x: x.cumsum(1)  # type: ignore[method-assign] # and does something else

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(self.norm(x))
        return out


class Tower(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def watch(model: nn.Module, **options: Any) -> AttentionProbe:
    with AttentionProbe(model, **options) as probe:
        model(torch.randn(3, 5, DIM)).sum().backward()
    return probe


@pytest.mark.parametrize(
    ("blind", "name"),
    [
        (LinearAttention, "layers.1"),
        (Mixer, "layers.1.inner"),
        (Named, "layers.1.attn"),
        (lambda: nn.Sequential(LinearAttention()), "layers.1.0"),
    ],
)
def test_what_is_called_attention_and_shows_none_is_named_with_what_to_do(
    blind: Callable[[], nn.Module], name: str
) -> None:
    probe = watch(Tower(Fused(), blind(), HandWritten()))
    assert probe.skipped == {name: NOTHING_SEEN}
    assert "observe_attention" in NOTHING_SEEN
    assert list(probe.compute()) == ["layers.0", "layers.2"]


def test_additive_attention_is_named_whoever_names_it() -> None:
    probe = watch(Tower(Fused(), AdditiveAttention()))
    assert list(probe.skipped) == ["layers.1"]
    assert "call observe_" in probe.skipped["layers.1"]


def test_the_root_is_shown_by_its_class() -> None:
    assert watch(LinearAttention()).skipped == {"LinearAttention": NOTHING_SEEN}


@pytest.mark.parametrize(
    ("modules", "named"), [("layers.0", []), ("layers.1", ["layers.1"]), ([Fused, LinearAttention], ["layers.1"])]
)
def test_only_the_chosen_modules_are_named(modules: Any, named: list[str]) -> None:
    assert list(watch(Tower(Fused(), LinearAttention()), modules=modules).skipped) == named


def test_a_scripted_attention_is_named_once_and_as_a_whole() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).transpose(-2, -1)).softmax(-1) @ x

    for compiled in (torch.jit.script(Scripted()), torch.jit.trace(Scripted(), torch.randn(3, 5, DIM))):
        probe = watch(Tower(Fused(), compiled))
        assert list(probe.skipped) == ["layers.1"]
        assert "torch.jit" in probe.skipped["layers.1"]
        assert watch(Tower(Fused(), compiled), modules="layers.0").skipped == {}


def test_what_did_not_run_or_was_interrupted_is_not_named() -> None:
    class Half(Tower):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if self.broken:
                raise KeyboardInterrupt
            return x

    class Stopped(LinearAttention):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model, x = Half(LinearAttention(), LinearAttention()), torch.randn(3, 5, DIM)
    probe = AttentionProbe(model)
    with pytest.raises(KeyboardInterrupt), probe:
        model(x)
    assert probe.skipped == {}
    model.broken = False
    with probe:
        model(x)
    assert list(probe.skipped) == ["layers.0"]
    with pytest.raises(KeyboardInterrupt), AttentionProbe(stopped := Stopped()) as other:
        stopped(x)
    assert other.skipped == {}


def test_it_is_looked_at_again_only_when_something_new_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def count(*args: Any) -> dict[str, str]:
        looks.append(1)
        return unseen_attention(*args)

    monkeypatch.setattr("attn_monitor.placement.unseen_attention", count)

    class Growing(Tower):
        depth = 1

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[: self.depth]:
                x = layer(x)
            return x

    model, x = Growing(Fused(), LinearAttention()), torch.randn(3, 5, DIM)
    probe = AttentionProbe(model)
    seen = []
    for step in range(5):
        model.depth = 1 + (step >= 3)
        with probe:
            model(x)
        probe.reset()
        seen.append((len(looks), list(probe.skipped)))
    assert seen == [(1, []), (1, []), (1, []), (2, ["layers.1"]), (2, ["layers.1"])]


def test_an_attention_that_starts_to_be_seen_is_named_no_longer() -> None:
    class LateAttention(LinearAttention):
        linear = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.linear else F.scaled_dot_product_attention(x, x, x)

    late, x = LateAttention(), torch.randn(3, 5, DIM)
    model = Tower(Fused(), late)
    probe = AttentionProbe(model)
    named = []
    for step in range(3):
        late.linear = not step
        with probe:
            model(x)
        named.append((list(probe.skipped), list(probe.compute())))
        probe.reset()
    assert named[0] == (["layers.1"], ["layers.0"])
    assert named[2] == ([], ["layers.0", "layers.1"])


class Scores(nn.Module):
    """Called attention, and only a part of one."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class WholeAttention(nn.Module):
    """Leaves the scores to a part that is called attention too, two levels below."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"attention": Scores()})
        self.attn_norm, self.attn_out = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_norm(x)
        out: Tensor = self.attn_out(self.parts["attention"](x, x).softmax(-1) @ x)
        return out


def test_parts_of_an_attention_that_was_seen_are_not_named() -> None:
    probe = watch(Tower(WholeAttention()))
    assert probe.skipped == {}
    assert list(probe.compute()) == ["layers.0"]


def test_showing_something_speaks_for_where_it_is_shown_and_for_nothing_else() -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.shows = Tower(LinearAttention(), Fused()), False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.tower(x).mean(1)
            observe_logits("contrastive", out @ out.T)
            return out

    class Shown(LinearAttention):
        def forward(self, x: Tensor) -> Tensor:
            observe_logits("linear", x @ x.mT)
            return super().forward(x)

    probe = watch(Contrastive())
    assert list(probe.skipped) == ["tower.layers.0"]
    assert set(probe.compute()) == {"contrastive", "tower.layers.1"}
    assert watch(Tower(Shown())).skipped == {}


def test_a_fit_says_it_once() -> None:
    monitor = AttentionMonitor(every_n_steps=1)
    _, said = fit(Trained(Tower(Fused(), LinearAttention())), monitor, serve(torch.randn(3, 5, DIM)))
    (line,) = [text for text in said if "layers.1" in text]
    assert f"net.layers.1 ({NOTHING_SEEN})" in line
    assert len(monitor.history) > 1


# -- gradients that come too late -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Fused, HandWritten])
def test_a_backward_pass_after_the_block_is_told(kind: type[nn.Module]) -> None:
    model = Tower(kind(), kind())
    with AttentionProbe(model) as probe:
        loss = model(torch.randn(3, 5, DIM)).sum()
        assert probe.notes == {}  # it may still come
    loss.backward()
    assert list(probe.notes) == ["layers.0", "layers.1"]
    assert all("no backward pass reached it while the probe was attached" in note for note in probe.notes.values())
    assert all(stats.grad_logits_norm is None for stats in probe.compute().values())
    with probe:
        model(torch.randn(3, 5, DIM)).sum().backward()
    assert probe.notes == {}
    probe.reset()
    assert probe.notes == {}


def test_where_no_gradient_was_to_come_nothing_is_told() -> None:
    model, x = Tower(Fused(), HandWritten()), torch.randn(3, 5, DIM)
    with AttentionProbe(model) as probe, torch.no_grad():
        model(x)
    assert probe.notes == {}
    with AttentionProbe(model, gradients=False) as probe:
        model(x)
    assert probe.notes == {}
    model.requires_grad_(False)
    with AttentionProbe(model) as probe:
        model(x)
    assert probe.notes == {}


class Scaled(nn.Module):
    """Fused attention of its own, with weights of some size."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        with torch.no_grad():
            self.qkv.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class CallsForward(nn.Module):
    """Calls its blocks without their hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled(gain=5.0)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


def test_blocks_called_by_forward_are_told_apart() -> None:
    model, x = CallsForward(), torch.randn(2, 5, 12)
    alone, inner = [], x
    for block in model.blocks:
        with AttentionProbe(block, gradients=False) as single:
            inner = block(inner)
        alone.append(single.compute()["Scaled"])
    probe = AttentionProbe(model)
    for _ in range(3):  # the discovery, and later on
        with probe:
            model(x).sum().backward()
        stats = probe.compute()
        assert list(stats) == ["blocks.0", "blocks.1"]
        for name, one in zip(stats, alone, strict=True):
            torch.testing.assert_close(stats[name].logit_std, one.logit_std)
            assert stats[name].grad_logits_norm is not None
        probe.reset()
    with AttentionProbe(model, modules="blocks.1") as chosen:
        model(x)
    assert list(chosen.compute()) == ["blocks.1"]


def test_a_root_called_by_forward_is_told() -> None:
    model = Scaled()
    with AttentionProbe(model) as probe:
        model.forward(torch.randn(2, 5, 12))
    assert dict(probe.compute()) == {}
    assert "call the module itself, not its forward method" in probe.notes["Scaled"]
    with probe:
        model(torch.randn(2, 5, 12))
    assert "Scaled" not in probe.notes or "forward method" not in probe.notes["Scaled"]


def test_what_the_user_shows_is_not_called_unmeasured() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(12, 36)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT / 2
            observe_logits("shown", scores, head_dim=4)
            weights = scores.exp()
            return (weights / weights.sum(-1, keepdim=True)) @ v

    model = ByHand()
    with AttentionProbe(model) as probe:
        model(torch.randn(2, 5, 12)).sum().backward()
    assert list(probe.compute()) == ["shown"]
    assert dict(probe.skipped) == {}

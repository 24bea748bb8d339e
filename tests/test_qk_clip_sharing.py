"""QK-Clip where weights, queries or keys serve more than one head: what is not a head's alone stays as it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.clipping import ABOVE, Block, Clipping, Packed, hidden, part, pretend

HEADS, DEPTH, WIDTH = 3, 7, 21


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, DEPTH)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """One attention, whose parts another module may take."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return attend(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))


class Layers(nn.Module):
    """Two attentions side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Separate(), Separate()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.roll(1, -1))


class Differential(nn.Module):
    """Two softmaxes from two pairs of queries and keys, in a loop or in two places."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.loop = loop
        self.q1, self.k1, self.q2, self.k2, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        pairs = [(self.q1, self.k1), (self.q2, self.k2)]
        v = heads(self.v(x))
        if self.loop:
            first, second = [attend(heads(q(x)), heads(k(x)), v) for q, k in pairs]
            return first - 0.3 * second
        first = attend(heads(self.q1(x)), heads(self.k1(x)), v)
        second = attend(heads(self.q2(x)), heads(self.k2(x)), v)
        return first - 0.3 * second


class TwoKeySets(nn.Module):
    """One set of queries looks at two sets of keys, one after the other, in a loop or in two places."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.loop = loop
        self.q, self.k1, self.k2, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, v = heads(self.q(x)), heads(self.v(x))
        if self.loop:
            first, second = [attend(q, heads(k(x)), v) for k in (self.k1, self.k2)]
            return first + second
        first = attend(q, heads(self.k1(x)), v)
        second = attend(q, heads(self.k2(x)), v)
        return first + second


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, role: str, taken: Tensor) -> Tensor:
        parts = {"queries": heads(self.q(x)), "keys": heads(self.k(x)), "values": heads(self.v(x))}
        parts[role] = -2 * taken.flip(-1)  # the same up to a rotation and a constant
        return attend(*parts.values())


class Handing(nn.Module):
    """The second attention takes the queries or keys of the first, which it was handed."""

    def __init__(self, given: str, role: str) -> None:
        super().__init__()
        self.given, self.role = given, role
        self.own, self.later = Separate(), Later()

    def forward(self, x: Tensor) -> Tensor:
        outputs: dict[str, Tensor] = {}
        handles = [
            getattr(self.own, name).register_forward_hook(
                lambda module, args, out, name=name: outputs.update({name: out})
            )
            for name in ("q", "k")
        ]
        out = self.own(x)
        for handle in handles:
            handle.remove()
        return out + self.later(x, self.role, heads(outputs[self.given]))


def one_projection_for_two() -> nn.Module:
    model = Layers()
    model.b.q = model.a.q
    return model


def tied_view(overlap: bool) -> nn.Module:
    """The queries of the first layer lie in one stretch of memory with those of the second."""
    model = Layers()
    memory = torch.randn(2 * WIDTH, WIDTH) / math.sqrt(WIDTH)
    model.a.q.weight = nn.Parameter(memory[:WIDTH])
    start = WIDTH - DEPTH if overlap else WIDTH
    model.b.q.weight = nn.Parameter(memory[start : start + WIDTH])
    return model


def alias() -> nn.Module:
    model = Layers()
    model.a.register_buffer("past", model.a.q.weight.detach())
    return model


def per_head() -> nn.Module:
    class PerHead(Separate):
        """One small map, called for one head after the other."""

        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(WIDTH, DEPTH)

        def forward(self, x: Tensor) -> Tensor:
            q = torch.stack([self.small(x * (head + 1)) for head in range(HEADS)], 1)
            return attend(q, heads(self.k(x)), heads(self.v(x)))

    return PerHead()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, int, str]] = {
    "two pairs in a loop": (lambda: Differential(loop=True), "Differential", 1, "with queries from different weights"),
    "two key sets in a loop": (lambda: TwoKeySets(loop=True), "TwoKeySets", 1, "with keys from different weights"),
    "two key sets": (
        lambda: TwoKeySets(loop=False),
        "TwoKeySets",
        1,
        "its queries are the queries of other attention as well (TwoKeySets#1)",
    ),
    "two key sets, the second": (
        lambda: TwoKeySets(loop=False),
        "TwoKeySets#1",
        1,
        "its queries are the queries of other attention as well (TwoKeySets)",
    ),
    "one projection for two layers": (
        one_projection_for_two,
        "a",
        1,
        "the layer that makes its queries also ran without making those of this head",
    ),
    "memory of two parameters": (lambda: tied_view(overlap=True), "a", 2, "shares its memory with another tensor"),
    "memory of a buffer": (alias, "a", 1, "shares its memory with another tensor"),
    "a map called head by head": (per_head, "PerHead", HEADS - 1, "also ran without making those of this head"),
}


def unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_make_more_than_one_head_are_left_alone(name: str) -> None:
    torch.manual_seed(5)
    build, layer, head, reason = REFUSED[name]
    model = build()
    before = copy.deepcopy(model.state_dict())
    clipped = Clipping(model, {"x": hidden(WIDTH)}).clip(layer, {head: ABOVE})
    assert not clipped.heads
    assert reason in clipped.refused[layer]
    assert unchanged(model, before)


def test_of_two_pairs_in_two_places_the_right_one_is_rescaled() -> None:
    model = Differential(loop=False)
    before = copy.deepcopy(model.state_dict())
    clipping = Clipping(model, {"x": hidden(WIDTH)})
    logits = clipping.observe()["Differential"].logit_max
    [head] = clipping.clip("Differential#1", {1: ABOVE}).heads
    assert (head.layer, head.head, head.queries_alone) == ("Differential#1", 1, "")
    for name in ("q2", "k2"):
        for kind in ("weight", "bias"):
            before[f"{name}.{kind}"][part(0, 1, DEPTH)] *= 0.5
    assert unchanged(model, before)
    after = clipping.observe()["Differential"].logit_max
    assert logits is not None
    assert after is not None
    assert torch.equal(logits, after)


def test_keys_that_a_later_layer_takes_over_are_left_alone() -> None:
    model = Handing("k", "keys")
    before = copy.deepcopy(model.state_dict())
    clipping = Clipping(model, {"x": hidden(WIDTH)})
    logits = clipping.observe()["later"].logit_max
    [head] = clipping.clip("own", {1: ABOVE}).heads
    assert head.queries_alone == "its keys are the keys of other attention as well (later)"
    for kind in ("weight", "bias"):
        before[f"own.q.{kind}"][part(0, 1, DEPTH)] *= 0.25
    assert unchanged(model, before)
    after = clipping.observe()["later"].logit_max
    assert logits is not None
    assert after is not None
    assert torch.equal(logits, after)


@pytest.mark.parametrize("role", ["queries", "keys", "values"])
def test_queries_and_keys_are_recognised_in_any_role_elsewhere(role: str) -> None:
    torch.manual_seed(5)
    clipped = Clipping(Handing("q", role), {"x": hidden(WIDTH)}).clip("own", {2: ABOVE})
    assert clipped.refused == {"own": f"head 2: its queries are the {role} of other attention as well (later)"}
    [head] = Clipping(Handing("k", role), {"x": hidden(WIDTH)}).clip("own", {2: ABOVE}).heads
    assert head.queries_alone == f"its keys are the {role} of other attention as well (later)"


def test_memory_side_by_side_is_not_shared() -> None:
    model = tied_view(overlap=False)
    before = copy.deepcopy(model.state_dict())
    clipping = Clipping(model, {"x": hidden(WIDTH)})
    assert [head.head for head in clipping.clip("a", {2: ABOVE}).heads] == [2]
    for name in ("q", "k"):
        for kind in ("weight", "bias"):
            before[f"a.{name}.{kind}"][part(0, 2, DEPTH)] *= 0.5
    assert unchanged(model, before)


def test_attention_that_is_left_out_may_use_the_same_weights() -> None:
    clipping = Clipping(Handing("k", "keys"), {"x": hidden(WIDTH)}, modules="own")
    clipped = clipping.clip("own", {1: ABOVE})
    told = "its keys are the keys of other attention as well (attention that is not watched)"
    assert [head.queries_alone for head in clipped.heads] == [told] or "`modules` leaves out attention" in str(
        clipped.refused["own"]
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_is_not_taken_for_another_use(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            out.square().sum().backward()
            return out

    clipping = Clipping(Saving(), {"x": hidden(WIDTH).requires_grad_()})
    assert [head.head for head in clipping.clip("block", {1: ABOVE}).heads] == [1]


# -- what changes over the steps -------------------------------------------------------------------------------------


class ByHand(Block):
    """LoRA written into the attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, 3 * WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        whole = self.c_attn(x) + self.up(self.down(x))
        return tuple(whole.unflatten(-1, (3, HEADS, DEPTH)).permute(2, 0, 3, 1, 4).unbind(0))


def test_an_adapter_that_grows_later_ends_the_rescaling() -> None:
    torch.manual_seed(5)
    clipping = Clipping(ByHand(), {"x": hidden(WIDTH)})
    assert [head.head for head in clipping.clip("ByHand", {1: ABOVE}).heads] == [1]
    nn.init.normal_(clipping.model.up.weight, std=0.1)
    before = copy.deepcopy(clipping.model.state_dict())
    clipped = clipping.clip("ByHand", {2: ABOVE})
    assert not clipped.heads
    assert "no slice of a linear layer's output around it has the lengths of its queries" in clipped.refused["ByHand"]
    assert unchanged(clipping.model, before)


class UnitRows(nn.Linear):
    """A weight whose rows are normalised in every forward pass, and are as long as that to begin with."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        nn.init.normal_(self.weight)
        self.weight.data = F.normalize(self.weight.data, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


class Spherical(Block):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = UnitRows(WIDTH, 3 * WIDTH)


def test_weights_that_are_normalised_in_the_forward_pass_are_left_alone() -> None:
    clipping = Clipping(Spherical(), {"x": hidden(WIDTH)})
    before = copy.deepcopy(clipping.model.state_dict())
    clipped = clipping.clip("Spherical", {1: ABOVE})
    assert "not plainly input times weight" in clipped.refused["Spherical"]
    assert unchanged(clipping.model, before)


def test_where_no_graph_shows_it_the_next_step_does() -> None:
    clipping = Clipping(Spherical(), {"x": hidden(WIDTH)})
    with torch.no_grad():
        assert [head.head for head in clipping.clip("Spherical", {1: 110.0}).heads] == [1]
        before = copy.deepcopy(clipping.model.state_dict())
        clipped = clipping.clip("Spherical", {1: 110.0})  # a twentieth less of each of its rows
    assert "not plainly input times weight" in clipped.refused["Spherical"]
    assert unchanged(clipping.model, before)


class WholeNorm(Block):
    """The queries are divided by their mean length, so that each keeps its share."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().project(x)
        return q * 9 / q.norm(dim=-1, keepdim=True).mean((0, 2), keepdim=True), k, v


class WithBias(Block):
    """One logit is large by its bias."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.zeros(q.shape[-2], k.shape[-2])
        bias[3, 2] = ABOVE
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("kind", [WholeNorm, WithBias])
def test_logits_that_do_not_follow_are_rescaled_no_more(kind: type[Block]) -> None:
    clipping = Clipping(kind(), {"x": hidden(WIDTH)})
    name = kind.__name__

    done = [clipping.clipper.apply(clipping.model, pretend(clipping.observe(), name, {1: ABOVE})) for _ in range(5)]
    assert [len(clipped.heads) for clipped in done] == [0, 1, 0, 0, 0]
    assert "its largest logit did not go down as it should have" in done[2].refused[name]


def test_a_head_that_fails_after_another_was_refused_is_told() -> None:
    class Half(WithBias):
        def project(self, x: Tensor) -> tuple[Tensor, ...]:
            q, k, v = super().project(x)
            return torch.cat([F.normalize(q[:, :1], dim=-1), q[:, 1:]], 1), k, v

    clipping = Clipping(Half(), {"x": hidden(WIDTH)})
    done = [
        clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Half", {head: ABOVE}))
        for head in (0, 0, 1, 1)
    ]
    assert "normalised after the projection" in done[1].refused["Half"]
    assert [head.head for head in done[2].heads] == [1]
    assert "did not go down" in done[3].notes["Half head 1"]


def test_the_first_clip_is_told_once_in_a_line() -> None:
    clipping = Clipping(Block(), {"x": hidden(WIDTH)})
    done = []
    for step, above in enumerate(({1: 143.0}, {0: 120.0, 1: 143.0}, {2: 143.0}), start=119):
        statistics = pretend(clipping.observe(), "Block", above)
        done.append(clipping.clipper.apply(clipping.model, statistics, step=step))
    told = {"step 120: Block head 1": "largest logit 143 > 100, weights times 0.84; 1 more in this step"}
    assert [clipped.notes for clipped in done] == [{}, told, {}]
    assert [len(clipped.heads) for clipped in done] == [0, 2, 1]


def test_a_clip_of_queries_alone_is_told_as_that() -> None:
    clipping = Clipping(Handing("k", "keys"), {"x": hidden(WIDTH)})
    assert clipping.clip("own", {1: ABOVE}).notes == {"own head 1": "largest logit 400 > 100, W_q times 0.25"}


def test_a_layer_is_looked_at_no_longer_once_it_has_been_healthy_for_a_while() -> None:
    clipping = Clipping(Packed(), {"x": hidden(WIDTH)})
    clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Packed", {1: ABOVE}))
    for _ in range(33):
        assert "Packed" in clipping.clipper._watched or _ == 32
        clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Packed", {}))
    assert not clipping.clipper._watched
    clipped = clipping.clipper.apply(clipping.model, pretend(clipping.observe(), "Packed", {1: ABOVE}))
    assert clipped.waiting == ("Packed",)

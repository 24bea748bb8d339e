"""`F.scaled_dot_product_attention` with shapes that torch broadcasts, groups or folds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from attn_monitor.capture.adapters import POOLED_HEADS
from tests.reference import assert_matches, assert_same, attention_reference, gradient_reference
from tests.spellings import ALLOWED, SCALE, Attention, B, D, E, H, T

V = 5
GRADIENTS = ("grad_logits_norm", "grad_probs_norm", "gradient_gain")


class Kernel(nn.Module):
    """Calls the kernel with what it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def watched(model: nn.Module, *inputs: Tensor) -> tuple[AttentionStatistics, str, Tensor]:
    with AttentionProbe(model) as probe:
        out = model(*inputs)
        out.square().sum().backward()
    assert not probe.skipped
    ((name, stats),) = probe.compute().items()
    return stats, probe.notes.get(name, ""), out.detach()


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "one key for the batch": ((B, H, 4, D), (1, H, T, D), (1, H, T, V)),
    "one query for the batch": ((1, H, 4, D), (B, H, T, D), (B, H, T, V)),
    "one value for the batch": ((B, H, 4, D), (B, H, T, D), (1, H, T, V)),
    "one query head": ((B, 1, 4, D), (B, H, T, D), (B, H, T, V)),
    "one key head": ((B, H, 4, D), (B, 1, T, D), (B, H, T, V)),
    "one value head": ((B, H, 4, D), (B, H, T, D), (B, 1, T, V)),
    "one key and value head": ((B, H, 4, D), (B, 1, T, D), (B, 1, T, V)),
    "query without batch": ((H, 4, D), (B, H, T, D), (B, H, T, V)),
    "key without batch": ((B, H, 4, D), (H, T, D), (H, T, V)),
    "key without heads": ((B, H, 4, D), (T, D), (T, V)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_broadcast_inputs_are_measured_as_if_they_were_expanded(
    shapes: tuple[tuple[int, ...], ...], masked: bool
) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    mask = (torch.rand(4, T) > 0.3).index_fill(1, torch.tensor([0, 1]), True) if masked else None
    stats, note, out = watched(Kernel(attn_mask=mask), q, k, v)
    assert note == ""
    q, k, v = (part.detach().expand(B, H, *part.shape[-2:]) for part in (q, k, v))
    masks = () if mask is None else (mask,)
    assert_matches(stats, attention_reference(q, k, masks=masks))
    assert_matches(stats, gradient_reference(q, k, v, 2 * out, masks=masks), names=GRADIENTS)


@pytest.mark.parametrize(("keys", "values"), [(2, 3), (3, 2), (1, 6), (6, 1), (2, 1), (2, 2)])
def test_grouped_queries_with_other_numbers_of_key_and_value_heads(keys: int, values: int) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in ((B, 6, 4, D), (B, keys, T, D), (B, values, T, V)))
    stats, _, out = watched(Kernel(enable_gqa=True), q, k, v)
    k, v = (part.detach().repeat_interleave(6 // part.shape[1], dim=1) for part in (k, v))
    assert_matches(stats, attention_reference(q.detach(), k))
    assert_matches(stats, gradient_reference(q.detach(), k, v, 2 * out), names=GRADIENTS)


def test_grouped_queries_with_one_key_for_the_batch() -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in ((B, 6, 4, D), (1, 2, T, D), (1, 2, T, V)))
    stats, _, out = watched(Kernel(enable_gqa=True), q, k, v)
    k, v = (part.detach().expand(B, -1, -1, -1) for part in (k, v))
    assert_matches(stats, attention_reference(q.detach(), k))
    assert_matches(stats, gradient_reference(q.detach(), k, v, 2 * out), names=GRADIENTS)


@pytest.mark.parametrize("mask", [ALLOWED, ALLOWED.expand(B * H, T, T), torch.zeros(B * H, 1, T)])
def test_three_dimensions_with_masks_of_fewer(mask: Tensor) -> None:
    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask).view(-1, H, T, D)

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = mask.view(B, H, *mask.shape[1:]) if mask.dim() == 3 else mask
        return F.scaled_dot_product_attention(q, k, v, whole)

    model, x = Attention(folded), torch.randn(B, T, E)
    stats = watched(model, x)[0]
    model.attend = apart
    assert_same(stats, watched(model, x)[0])


def test_one_head_in_two_dimensions() -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in ((4, D), (T, D), (T, V)))
    stats, _, out = watched(Kernel(), q, k, v)
    q, k, v = (part.detach()[None, None] for part in (q, k, v))
    assert_matches(stats, attention_reference(q, k))
    assert_matches(stats, gradient_reference(q, k, v, 2 * out[None, None]), names=GRADIENTS)


# -- what is folded into the batch ----------------------------------------------------------------------------------

FRAMES = 4


class Frames(nn.Module):
    """Attention with a single head in each frame of a video, the frames folded into the batch."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(E, E), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.project(x).reshape(B * FRAMES, T, E)).view(B, FRAMES, T, E)


def by_hand(x: Tensor) -> Tensor:
    return (torch.bmm(x, x.mT) * SCALE).softmax(-1) @ x


def fused(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, scale=SCALE)


@pytest.mark.parametrize("attend", [by_hand, fused])
def test_frames_in_the_batch_are_no_heads(attend: Callable[[Tensor], Tensor]) -> None:
    model, x = Frames(attend), torch.randn(B, FRAMES, T, E)
    stats, note, _ = watched(model, x)
    assert (stats.heads, stats.rows.tolist(), note) == (1, [B * FRAMES * T], POOLED_HEADS)
    q = model.project(x).detach().view(B * FRAMES, 1, T, E)
    assert_matches(stats, attention_reference(q, q, scale=SCALE))


@pytest.mark.parametrize("normalise", [lambda x: F.layer_norm(x, (D,)), F.gelu, lambda x: x.cos()])
def test_heads_are_told_from_the_batch_through_a_function_of_each_entry(
    normalise: Callable[[Tensor], Tensor],
) -> None:
    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (normalise(part) for part in (q, k))
        q, k, v = (part.reshape(-1, T, D) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).view(-1, H, T, D)

    model, x = Attention(folded), torch.randn(B, T, E)
    stats, note, _ = watched(model, x)
    assert (stats.heads, note) == (H, "")
    q, k, _ = model.heads(x)
    assert_matches(stats, attention_reference(normalise(q.detach()), normalise(k.detach())))

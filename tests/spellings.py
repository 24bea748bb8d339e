"""One causal attention, with the same weights, in every way people write it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, T, D = 5, 3, 7, 11
E = H * D
SCALE = 1 / math.sqrt(D)
aten = torch.ops.aten
ALLOWED = torch.ones(T, T, dtype=torch.bool).tril()

Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, key and value [B, H, T, D] to the output [B, H, T, D]."""


class Attention(nn.Module):
    """Projects, attends in the given way, projects."""

    def __init__(self, attend: Spelling) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E)
        self.attend = attend

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.view(len(x), -1, H, D).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.attend(*self.heads(x)).transpose(1, 2).reshape(len(x), -1, E))
        return out


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_bool_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ALLOWED)


def sdpa_float_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, ~ALLOWED * torch.finfo(q.dtype).min)


def sdpa_prescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * SCALE, k, v, is_causal=True, scale=1.0)


def sdpa_folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.reshape(-1, T, D) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).view(-1, H, T, D)


def _filled(q: Tensor, k: Tensor, value: float) -> Tensor:
    return (q @ k.transpose(-2, -1) * SCALE).masked_fill(~ALLOWED, value)


def functional_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(_filled(q, k, -math.inf), dim=-1) @ v


def torch_softmax_to_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_filled(q, k, -1e9), -1, dtype=torch.float32) @ v


def method_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _filled(q, k, -1e4).softmax(dim=-1) @ v


def special_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.special.softmax(_filled(q, k, torch.finfo(q.dtype).min), 3) @ v


def module_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.Softmax(dim=-1)(_filled(q, k, -1e4)) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    scores *= SCALE
    scores.masked_fill_(~ALLOWED, -1e4)
    return torch.matmul(scores.softmax(-1), v)


def indexed_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    scores[..., ~ALLOWED] = -1e4
    return scores.softmax(-1) @ v


def where_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(ALLOWED, q @ k.mT * SCALE, -1e4).softmax(-1) @ v


def where_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).where(ALLOWED, torch.full([], -1e4)).softmax(-1) @ v


def added_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE + ~ALLOWED * -1e4).softmax(-1) @ v


def mask_comes_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (~ALLOWED * -1e9 + q @ k.mT / math.sqrt(D)).softmax(-1) @ v


def subtracted_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE - 1e4 * ~ALLOWED).softmax(-1) @ v


def multiplied_and_subtracted_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = ALLOWED.float()
    return (q @ k.mT * SCALE * keep - 1e4 * (1 - keep)).softmax(-1) @ v


def masked_before_scaling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + ~ALLOWED * -1e4) * SCALE).softmax(-1) @ v


def scale_on_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * SCALE @ k.mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def scale_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * D**-0.25 @ (k * D**-0.25).mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def scale_is_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.tensor([SCALE])).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def scale_per_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * torch.full((H, 1, 1), SCALE)).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def scale_per_head_on_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * torch.full((H, 1, 1), SCALE) @ k.mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cos, sin = torch.ones(T, D), torch.zeros(T, D)

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1) * sin

    return (rotate(q * SCALE) @ rotate(k).mT).masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def folded_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.reshape(-1, T, D) for part in (q, k, v))
    probs = F.softmax(torch.bmm(q, k.mT).mul(SCALE).masked_fill(~ALLOWED, -1e4), -1)
    return torch.bmm(probs, v).view(-1, H, T, D)


def folded_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 1).reshape(-1, T, D) for part in (q, k, v))
    probs = F.softmax((torch.bmm(q, k.mT) / math.sqrt(D)).masked_fill(~ALLOWED, -1e4), 2)
    return torch.bmm(probs, v).view(H, -1, T, D).transpose(0, 1)


def folded_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.reshape(-1, T, D) for part in (q, k, v))
    scores = torch.baddbmm(input=~ALLOWED * -1e4, batch1=q, batch2=k.mT, alpha=SCALE)
    return (scores.softmax(-1) @ v).view(-1, H, T, D)


def unfolded_for_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.reshape(-1, T, D) for part in (q, k, v))
    scores = torch.bmm(q, k.mT).view(-1, H, T, T) * SCALE + ~ALLOWED * -1e4
    return (scores.view(-1, T, T).softmax(-1) @ v).view(-1, H, T, D)


def einsum_heads_second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    probs = torch.einsum("bqhd,bkhd->bhqk", q * SCALE, k).masked_fill(~ALLOWED, -1e4).softmax(-1)
    return torch.einsum("bhqk,bkhd->bhqd", probs, v)


def einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.permute(2, 0, 1, 3) for part in (q, k, v))  # as XLNet: length, batch, heads, depth
    scores = torch.einsum("ibnd,jbnd->ijbn", q, k) * SCALE
    probs = scores.masked_fill(~ALLOWED[:, :, None, None], -1e4).softmax(dim=1)
    return torch.einsum("ijbn,jbnd->bnid", probs, v)


def einsum_keys_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...hid,...hjd->...ijh", [q, k]) * SCALE
    probs = scores.masked_fill(~ALLOWED[..., None], -1e4).softmax(dim=-2)
    return torch.einsum("bijh,bhjd->bhid", probs, v)


def keys_times_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((k @ q.mT * SCALE).masked_fill(~ALLOWED.T, -1e4), dim=-2).mT @ v


def sdpa_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = aten.scaled_dot_product_attention.default(q, k, v, is_causal=True)
    return out


def operators(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = aten.mul.Tensor(aten.matmul.default(q, aten.transpose.int(k, -2, -1)), SCALE)
    scores = aten.masked_fill.Scalar(scores, ~ALLOWED, -1e4)
    out: Tensor = aten.matmul.default(aten.softmax.int(scores, -1), v)
    return out


def operators_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (aten.reshape.default(part, (-1, T, D)) for part in (q, k, v))
    scores = aten.bmm.default(q, aten.permute.default(k, [0, 2, 1]))
    scores = aten.where.self(ALLOWED, aten.div.Tensor(scores, math.sqrt(D)), torch.tensor(-1e4))
    out: Tensor = aten.bmm(aten._softmax(scores, -1, False), v)
    return out.view(-1, H, T, D)


def softmin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmin((q @ k.mT * -SCALE).masked_fill(~ALLOWED, 1e4), dim=-1) @ v


def module_softmin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = nn.Softmin(dim=-1)(-_filled(q, k, -1e4)) @ v
    return out


def broadcast_and_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q[..., :, None, :] * k[..., None, :, :] * SCALE).sum(-1)
    probs = scores.masked_fill(~ALLOWED, -1e4).softmax(-1)
    return (probs[..., None] * v[..., None, :, :]).sum(-2)


def dots_of_vectors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.linalg.vecdot(q[..., :, None, :], k[..., None, :, :]) * SCALE
    return scores.masked_fill(~ALLOWED, -1e4).softmax(-1) @ v


def views_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = k * SCALE @ q.clone().transpose_(-1, -2)
    scores.transpose_(-1, -2).add_(~ALLOWED * -1e4).unsqueeze_(1)
    return scores.softmax(-1).squeeze(1) @ v


def added_with_a_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.add(~ALLOWED * -1e9, q @ k.mT, alpha=SCALE).softmax(-1) @ v


def mask_added_with_a_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.add(q @ k.mT * SCALE, (~ALLOWED).to(q.dtype), alpha=-6000)
    return torch.sub(scores, (~ALLOWED).to(q.dtype), alpha=6000).softmax(-1) @ v


def reversed_subtraction(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.rsub(q @ k.mT * -SCALE, ~ALLOWED * -1e4).softmax(-1) @ v


def product_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.addcmul(~ALLOWED * torch.full((), -1e4), q @ k.mT, torch.full((), D**-0.25), value=D**-0.25)
    return scores.softmax(-1) @ v


def quotient_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocked = (~ALLOWED).to(q.dtype)
    scores = torch.addcdiv(q @ k.mT * SCALE, blocked, torch.full((), 1e-4), value=-1)
    return torch.addcdiv(torch.zeros(()), scores, torch.full((), 2.0), value=2).softmax(-1) @ v


def interpolated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.lerp(~ALLOWED * torch.full((), -2e4), q @ k.mT, SCALE)
    return scores.softmax(-1) @ v


def masks_that_block_together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    half = ~ALLOWED * -5000.0
    return (q @ k.mT * SCALE + half + half).softmax(-1) @ v


def sdpa_masks_that_block_together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    half = ~ALLOWED * torch.full((), -5000.0, dtype=q.dtype)
    return F.scaled_dot_product_attention(q, k, v, half + half)


SPELLINGS: tuple[Spelling, ...] = (
    *(sdpa_causal, sdpa_bool_mask, sdpa_float_mask, sdpa_prescaled, sdpa_folded),
    *(functional_softmax, torch_softmax_to_float32, method_softmax, special_softmax, module_softmax),
    *(in_place, indexed_fill, where_number, where_tensor, added_mask, mask_comes_first, subtracted_mask),
    *(multiplied_and_subtracted_mask, masked_before_scaling),
    *(scale_on_query, scale_split, scale_is_a_tensor, scale_per_head, scale_per_head_on_query, rotary),
    *(folded_bmm, folded_heads_first, folded_baddbmm, unfolded_for_the_mask),
    *(einsum_heads_second, einsum_heads_last, einsum_keys_before_heads, keys_times_queries),
    *(sdpa_operator, operators, operators_below, softmin, module_softmin),
    *(broadcast_and_summed, dots_of_vectors, views_in_place),
    *(added_with_a_factor, mask_added_with_a_factor, reversed_subtraction),
    *(product_added, quotient_added, interpolated),
    *(masks_that_block_together, sdpa_masks_that_block_together),
)

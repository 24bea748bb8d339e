"""Which outputs of a layer are the queries of which head, told by lengths: a rotation or a reshaping keeps them.

Axes: N tokens, F output features, H heads, M blocks of features.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEWEST_TOKENS = 8
"""Below this, different vectors may have the same lengths by chance."""
_MOST_TOKENS = 64
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2}
_FULL_TOLERANCE = 1e-3
_TELL_APART = 4.0


def tolerance(dtype: torch.dtype) -> float:
    """Return how far lengths may be apart, relative to them: a rotation in half precision rounds each entry."""
    return _TOLERANCE.get(dtype, _FULL_TOLERANCE)


def sampled_tokens(tokens: int) -> slice:
    """Return which tokens to compare: all of a few, else some from everywhere."""
    return slice(None, None, max(1, -(-tokens // _MOST_TOKENS)))


def strides(features: int, depth: int) -> list[int]:
    """Return how far apart the features of one head may lie if heads of that depth fill the output evenly.

    1: one after the other, as after `chunk` or `unflatten(-1, (heads, depth))`, whatever the order of queries, keys and
    heads. More: `unflatten(-1, (depth, heads))` and its relatives.
    """
    if features % depth:
        return []
    blocks = features // depth
    return [stride for stride in range(1, blocks + 1) if blocks % stride == 0 and (depth > 1 or stride == 1)]


def block_features(features: int, depth: int, stride: int) -> list[slice]:
    """Return the features of each block, in the order of `block_norms`."""
    span = depth * stride
    starts = [outer + inner for outer in range(0, features, span) for inner in range(stride)]
    return [slice(start, start + span - stride + 1, stride) for start in starts]


def head_norms(tensor_BHTD: Tensor) -> Tensor:
    """Return the lengths of the vectors of some tokens, taken sample by sample, [N, H]."""
    batch, _, tokens, _ = tensor_BHTD.shape
    chosen = torch.arange(batch * tokens, device=tensor_BHTD.device)[sampled_tokens(batch * tokens)]
    vectors_NHD = tensor_BHTD.detach()[chosen // tokens, :, chosen % tokens].float()
    norms: Tensor = torch.linalg.vector_norm(vectors_NHD, dim=-1)
    return norms


def block_norms(out_NF: Tensor, depth: int, stride: int) -> Tensor:
    """Return the length of every block of every token, [N, M]."""
    norms: Tensor = torch.linalg.vector_norm(out_NF.unflatten(-1, (-1, depth, stride)), dim=-2)
    return norms.flatten(1)


def mismatch(norms_NH: Tensor, norms_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the lengths of each head are from a multiple of those of each block, and that multiple, [H, M].

    The largest difference over all tokens to the best multiple, relative to the mean length: 0 for a block times a
    constant, inf where nothing can be said.
    """
    with torch.autocast(norms_NH.device.type, enabled=False):  # the model's would round the product
        products = norms_NH.T @ norms_NM
    factors_HM = products / norms_NM.square().sum(0)
    difference = norms_NH[:, :, None] - factors_HM * norms_NM[:, None, :]
    errors = difference.abs().amax(0) / norms_NH.square().mean(0).sqrt()[:, None]
    return torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf), factors_HM


def variation(norms_NH: Tensor) -> Tensor:
    """Return how much the lengths of each head vary over the tokens, relative to the mean, [H]; 0 after normalising."""
    return (norms_NH.amax(0) - norms_NH.amin(0)) / norms_NH.mean(0)


def matches(errors: list[float], limit: float) -> list[int]:
    """Return the blocks a head may be: one if it is clear, several if they can't be told apart, none."""
    close = [block for block, error in enumerate(errors) if error < limit]
    best = min((errors[block] for block in close), default=0.0)
    return [block for block in close if errors[block] <= _TELL_APART * max(best, 1e-6)]

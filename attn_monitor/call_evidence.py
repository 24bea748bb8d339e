"""Compares what linear maps put out with the queries, keys and values of one attention call.

Axes: B batch, H heads, N tokens, D head dimension, M blocks of features. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_monitor.head_norms import (
    FEWEST_TOKENS,
    block_features,
    block_norms,
    head_norms,
    mismatch,
    strides,
    variation,
)
from attn_monitor.linear_outputs import Output
from attn_monitor.records import AttentionCall


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The lengths of the vectors of some tokens: what queries, keys and values are recognised by.

    Attributes:
        tokens: Of how many tokens they are a sample.
        norms: [N, H], tokens taken sample by sample.
    """

    tokens: int
    norms: Tensor


def call_lengths(call: AttentionCall) -> list[Lengths]:
    """Return the lengths of queries, keys and values, as far as they are known."""
    sides = [tensor for tensor in (call.query, call.key, call.value) if tensor is not None and tensor.numel()]
    return [Lengths(tensor.shape[0] * tensor.shape[2], head_norms(tensor)) for tensor in sides]


@dataclass(slots=True, eq=False)
class Evidence:
    """How well each block of each output fits the heads of one attention call. Tensors that nobody looked at yet.

    Attributes:
        blocks: The output and the features of each block.
        query: How far each block is from the queries of each head, [H, M].
        key: The same for the keys, [G, M].
        value: The same for the values, `None` where they are not known.
        gains: By what the lengths of each block are multiplied in queries and keys, [H, M] and [G, M].
        lengths: Of the queries and of the keys.
        depth: D.
        dtype: Of the queries.
    """

    blocks: list[tuple[Output, slice]]
    query: Tensor
    key: Tensor
    value: Tensor | None
    gains: tuple[Tensor, Tensor]
    lengths: tuple[Lengths, Lengths]
    depth: int
    dtype: torch.dtype

    @property
    def spread(self) -> tuple[Tensor, Tensor]:
        """How much the lengths of queries and keys vary over the tokens, [H] and [G]."""
        return variation(self.lengths[0].norms), variation(self.lengths[1].norms)


def evidence(outputs: Sequence[Output], call: AttentionCall) -> Evidence | str:
    """Compare the outputs of linear maps with an attention call; return why that is not possible."""
    query, key, value = call.query, call.key, call.value
    if query is None or key is None:
        return "its logits are known, but not its queries and keys"
    tokens = query.shape[0] * query.shape[2]
    if tokens < FEWEST_TOKENS:
        return f"only {tokens} tokens ran through it in the step in which its weights were looked for, too few to tell"
    depth = query.shape[-1]
    sides = [_Side(query), _Side(key), *([_Side(value)] if value is not None and value.shape[-1] == depth else [])]
    blocks: list[tuple[Output, slice]] = []
    errors: list[list[Tensor]] = [[] for _ in sides]
    gains: list[list[Tensor]] = [[] for _ in sides]
    for output in outputs:
        all_rows = [output.rows(side.tokens, side.shape) for side in sides]
        for features in sorted({rows.shape[1] for rows in all_rows if rows is not None}):
            in_turn = features != output.features  # the map runs over each head, or several of them, in turn
            if in_turn and output.features % depth:
                continue
            for stride in strides(features, depth)[: 1 if in_turn else None]:
                parts = block_features(features, depth, stride)
                blocks += [(output, part) for part in parts]
                for side, rows, off, times in zip(sides, all_rows, errors, gains, strict=True):
                    fits = rows is not None and rows.shape[1] == features
                    error, gain = side.compare(rows if fits else None, len(parts), stride)
                    off.append(error)
                    times.append(gain)
    if not blocks:
        return "no linear layer around it ran over its tokens before: they may be made by a parameter without a layer"
    query_errors, key_errors, *value_errors = [torch.cat(found, 1) for found in errors]
    return Evidence(
        blocks=blocks,
        query=query_errors,
        key=key_errors,
        value=value_errors[0] if value_errors else None,
        gains=(torch.cat(gains[0], 1), torch.cat(gains[1], 1)),
        lengths=(Lengths(sides[0].tokens, sides[0].norms[0]), Lengths(sides[1].tokens, sides[1].norms[0])),
        depth=depth,
        dtype=query.dtype,
    )


class _Side:
    """The queries, keys or values of a call.

    Args:
        tensor: [B, heads, tokens, D].
    """

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        batch, _, tokens, self.depth = tensor.shape
        self.tokens = batch * tokens
        # An output has its tokens by sample, or by position where the batch comes second.
        orders = [tensor, tensor.transpose(0, 2)] if min(batch, tokens) > 1 else [tensor]
        self.norms = [head_norms(order) for order in orders]

    def compare(self, rows: Tensor | None, blocks: int, stride: int) -> tuple[Tensor, Tensor]:
        """Return how far each block of an output is from each head, and by what it is multiplied, [heads, blocks]."""
        if rows is None:
            nothing = self.norms[0].new_full((self.shape[1], blocks), torch.inf)
            return nothing, nothing
        norms_NM = block_norms(rows.float(), self.depth, stride)
        errors, gains = mismatch(self.norms[0], norms_NM)
        for norms_NH in self.norms[1:]:
            other_errors, other_gains = mismatch(norms_NH, norms_NM)
            gains = torch.where(other_errors < errors, other_gains, gains)
            errors = torch.minimum(errors, other_errors)
        return errors, gains

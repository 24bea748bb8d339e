"""From the outputs of linear maps and an attention call to the weights of each head.

Where the lengths of a head's query vectors are, token by token, those of a slice of one map's output, that slice of the
weight makes them: rotary embeddings, reshaping and constant factors keep that, normalising does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_monitor.head_norms import (
    FEWEST_TOKENS,
    block_features,
    block_norms,
    matches,
    mismatch,
    sampled_tokens,
    strides,
    tolerance,
    variation,
)
from attn_monitor.linear_outputs import Output, Slice, is_adapter, is_norm
from attn_monitor.records import AttentionCall

NO_MATCH = (
    "no slice of a linear layer's output around it has the lengths of its {side}: they may be normalised, summed with "
    "something, or made by a parameter without a layer"
)
AMBIGUOUS = "several slices of the linear layers around it fit its {side} alike"
NORMALISED = "its {side} are normalised after the projection, so that rescaling the weights does nothing"
ADAPTED = "its {side} come out of a layer with an adapter (LoRA), which rescaling one weight does not scale as a whole"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of one query head.

    Attributes:
        query: What makes its queries, and nothing else.
        key: What makes its keys, and nothing else; `None` where there is no such part.
        why: Why there is none.
    """

    query: Slice
    key: Slice | None
    why: str = ""


@dataclass(slots=True, eq=False)
class Evidence:
    """How well each block of each output fits the heads of one attention call. Tensors that nobody looked at yet.

    Attributes:
        blocks: The output and the features of each block.
        query: How far each block is from the queries of each head, [H, blocks].
        key: The same for the keys, [G, blocks].
        value: The same for the values, `None` where they are not known.
        spread: How much the lengths of queries and keys vary over the tokens, [H] and [G].
        depth: D.
        dtype: Of the queries.
    """

    blocks: list[tuple[Output, slice]]
    query: Tensor
    key: Tensor
    value: Tensor | None
    spread: tuple[Tensor, Tensor]
    depth: int
    dtype: torch.dtype


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
    for output in outputs:
        for features in {rows.shape[1] for side in sides if (rows := side.rows(output.tensor)) is not None}:
            in_turn = features != output.features  # the map runs over each head, or several of them, in turn
            if in_turn and output.features % depth:
                continue
            for stride in strides(features, depth)[: 1 if in_turn else None]:
                parts = block_features(features, depth, stride)
                blocks += [(output, part) for part in parts]
                for side, found in zip(sides, errors, strict=True):
                    found.append(side.errors(output.tensor, features, stride))
    if not blocks:
        return "no linear layer around it ran over its tokens before: they may be made by a parameter without a layer"
    query_errors, key_errors, *value_errors = [torch.cat(found, 1) for found in errors]
    return Evidence(
        blocks=blocks,
        query=query_errors,
        key=key_errors,
        value=value_errors[0] if value_errors else None,
        spread=(variation(sides[0].norms[0]), variation(sides[1].norms[0])),
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
        lengths: Tensor = torch.linalg.vector_norm(tensor.detach().float(), dim=-1)
        chosen = sampled_tokens(self.tokens)
        # An output has its tokens by sample, or by position where the batch comes second.
        orders = ((0, 2, 1), (2, 0, 1)) if min(batch, tokens) > 1 else ((0, 2, 1),)
        self.norms = [lengths.permute(order).flatten(0, 1)[chosen] for order in orders]

    def rows(self, tensor: Tensor) -> Tensor | None:
        """Return an output as [tokens, features], `None` where it is not of these tokens."""
        if tuple(tensor.shape) == self.shape:  # heads were split and moved to the front already
            tensor = tensor.transpose(1, 2)
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.numel() % self.tokens:
            return None
        rows = tensor.reshape(self.tokens, -1)
        return rows if rows.shape[1] % tensor.shape[-1] == 0 else None

    def errors(self, tensor: Tensor, features: int, stride: int) -> Tensor:
        """Return how far each block of an output is from each head, [heads, blocks]."""
        rows = self.rows(tensor)
        if rows is None or rows.shape[1] != features:
            return self.norms[0].new_full((self.shape[1], features // self.depth), torch.inf)
        norms_NM = block_norms(rows[sampled_tokens(self.tokens)].float(), self.depth, stride)
        return torch.stack([mismatch(norms_NH, norms_NM) for norms_NH in self.norms]).amin(0)


def head_weights(found: Evidence, model: nn.Module) -> list[HeadWeights | str]:
    """Return the weights of each head, or why they are not known or must stay as they are.

    Args:
        found: The evidence; this waits for the device.
        model: All of it, to see who else uses a weight.
    """
    look = _Look(found, model)
    queries = look.side(found.query, found.spread[0], "queries")
    own_keys = look.side(found.key, found.spread[1], "keys")
    group = len(queries) // len(own_keys)
    keys = [own_keys[head // group] for head in range(len(queries))]
    uses = Counter(queries), Counter(keys)
    values = look.values(found.value, {part for part in (*queries, *keys) if isinstance(part, Slice)})
    heads: list[HeadWeights | str] = []
    for query, key in zip(queries, keys, strict=True):
        if isinstance(query, str):
            heads.append(query)
        elif uses[0][query] > 1:
            heads.append("one slice of a weight makes the queries of several heads")
        elif query == key or (values is not None and query in values):
            heads.append("one slice of a weight makes its queries and also its keys or values")
        elif isinstance(key, str):
            heads.append(HeadWeights(query, None, key))
        elif uses[1][key] > 1:
            heads.append(HeadWeights(query, None, "its keys serve other query heads, too"))
        elif values is None or key in values:
            heads.append(HeadWeights(query, None, "its keys may be its values, too"))
        else:
            heads.append(HeadWeights(query, key))
    return heads


def weight_refusal(part: Slice) -> str | None:
    """Return why a weight must not be rescaled as it is now."""
    end = part.features[1]
    for name, dim, last in ((part.weight, part.dim, end), (part.bias, 0, end + part.bias_offset)):
        if name is None:
            continue
        parameter = part.module._parameters.get(name)
        if not isinstance(parameter, nn.Parameter):
            return "its weight is no parameter but computed (weight norm, another parametrization) or held by a wrapper"
        kind = type(parameter.data)
        if kind is not Tensor:
            return f"its weight is a {kind.__name__}: sharded over processes, or quantised"
        if parameter.dim() <= dim or parameter.shape[dim] < last:
            return "its weight has another shape outside of the forward pass: it is sharded over processes"
        if not parameter.requires_grad:
            return "its weight is frozen (requires_grad=False)"
    return None


class _Look:
    """Reads the evidence.

    Args:
        found: The evidence.
        model: All of it.
    """

    def __init__(self, found: Evidence, model: nn.Module) -> None:
        self.found = found
        self.limit = tolerance(found.dtype)
        self.outputs = [output for output, _ in found.blocks]
        dims = {output: output.dim() for output in dict.fromkeys(self.outputs)}
        self.parts = [
            None if (dim := dims[output]) is None else output.slice(dim, features) for output, features in found.blocks
        ]
        self.features = sum(output.features for output, dim in dims.items() if dim is not None)
        self.adapted = {inner for module in model.modules() if is_adapter(module) for inner in module.modules()}
        own = (parameter for module in model.modules() for parameter in module._parameters.values())
        self.users = Counter(id(parameter) for parameter in own if parameter is not None)

    def side(self, errors: Tensor, spread: Tensor, name: str) -> list[Slice | str]:
        """Return what makes each head of one side, or why that is not known."""
        varies = spread.tolist()
        return [self._head(row, varies[head], name) for head, row in enumerate(errors.tolist())]

    def values(self, errors: Tensor | None, claimed: set[Slice]) -> set[Slice] | None:
        """Return what makes values, as far as it can also make queries or keys; `None` if it may be any of it."""
        if errors is not None:
            return set().union(*(self._fitting(row) for row in errors.tolist()))
        spare = self.features - len(claimed) * self.found.depth
        return set() if spare >= self.found.depth else None

    def _fitting(self, errors: list[float]) -> set[Slice]:
        plain = [error if part is not None else math.inf for error, part in zip(errors, self.parts, strict=True)]
        fitting = {part for block in matches(plain, self.limit) if (part := self.parts[block]) is not None}
        # A wrapper may show the weight of the layer in it as its own.
        return {part for part in fitting if part.weight in part.module._parameters} or fitting

    def _head(self, errors: list[float], varies: float, side: str) -> Slice | str:
        fitting = self._fitting(errors)
        if varies < self.limit:
            return NORMALISED.format(side=side)
        if len(fitting) > 1:
            return AMBIGUOUS.format(side=side)
        for part in fitting:
            return self._refusal(part, side) or part
        others = [self.outputs[block].module for block in matches(errors, self.limit)]
        if any(is_adapter(module) for module in others):
            return ADAPTED.format(side=side)
        if any(is_norm(module) for module in others):
            return NORMALISED.format(side=side)
        if others:
            return f"its {side} come out of a {type(others[0]).__name__}, which is no product with a plain weight"
        return NO_MATCH.format(side=side)

    def _refusal(self, part: Slice, side: str) -> str | None:
        if part.module in self.adapted:
            return ADAPTED.format(side=side)
        if reason := weight_refusal(part):
            return reason
        more = sorted({name for name, _ in part.module.named_parameters()} - {part.weight, part.bias})
        if more and not isinstance(part.module, nn.MultiheadAttention):
            return f"the layer that makes its {side} has further parameters ({', '.join(more)})"
        parameters = [part.module._parameters[name] for name in (part.weight, part.bias) if name is not None]
        if any(self.users[id(parameter)] > 1 for parameter in parameters):
            return f"the weight that makes its {side} is shared with another layer"
        return None

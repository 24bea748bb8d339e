"""From the outputs of linear maps and an attention call to the weights of each head.

Where the lengths of a head's query vectors are, token by token, those of a slice of one map's output, that slice of the
weight makes them: rotary embeddings, reshaping and constant factors keep that, normalising does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attn_monitor.call_evidence import Evidence
from attn_monitor.head_norms import matches, tolerance
from attn_monitor.linear_outputs import Slice, is_adapter, is_norm

NO_MATCH = (
    "no slice of a linear layer's output around it has the lengths of its {side}: they may be normalised, summed with "
    "something, or made by a parameter without a layer"
)
AMBIGUOUS = "several slices of the linear layers around it fit its {side} alike"
NORMALISED = "its {side} are normalised after the projection, so that rescaling the weights does nothing"
COMPUTED = "its {side} are not plainly input times weight: the weight may be normalised, or changed in the forward pass"
SHARED = "the weight that makes its {side} is shared with another layer, or shares its memory with another tensor"
USED = (
    "what its layer puts out as queries or keys is also used outside of attention, as in a residual connection or a "
    "gate: the gradient that came back is not that of the logits alone"
)
ADAPTED = "its {side} come out of a layer with an adapter (LoRA), which rescaling one weight does not scale as a whole"
_USED = 0.05
"""How far sums may be apart, relative to the root of the summed squares: half precision makes about 0.005."""
_TINY = 4.0
"""By how many of the smallest numbers a gradient may be off: without a scaled loss float16 has not many more."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of one query head.

    Attributes:
        query: What makes its queries, and nothing else.
        key: What makes its keys, and nothing else; `None` where there is no such part.
        why: Why there is none.
        gains: By what queries and keys are longer than what these weights put out.
        calls: Which calls of their modules made them.
        used: Whether more than the logits is made of the queries or keys of the layer, as far as gradients tell.
        sources: Which calls of which modules made queries and keys of any head of the layer.
    """

    query: Slice
    key: Slice | None
    why: str = ""
    gains: tuple[float, float] = field(default=(math.nan, math.nan), compare=False)
    calls: frozenset[tuple[nn.Module, int]] = field(default=frozenset(), compare=False)
    used: bool = field(default=False, compare=False)
    sources: frozenset[tuple[nn.Module, int]] = field(default=frozenset(), compare=False)


def head_weights(
    found: Evidence, model: nn.Module, is_shared: Callable[[nn.Parameter], bool]
) -> list[HeadWeights | str]:
    """Return the weights of each head, or why they are not known or must stay as they are.

    Args:
        found: The evidence of one call; this waits for the device.
        model: All of it, to see what is wrapped in an adapter.
        is_shared: Tells whether something else of the model has the memory of a parameter.
    """
    look = _Look(found, model, is_shared)
    query_spread, key_spread = found.spread
    queries = look.side(found.query, query_spread, "queries")
    own_keys = look.side(found.key, key_spread, "keys")
    group = len(queries) // len(own_keys)
    keys = [own_keys[head // group] for head in range(len(queries))]
    uses = Counter(queries), Counter(keys)
    values = look.values(found.value, {part for part in (*queries, *keys) if isinstance(part, Slice)})
    used = values is not None and any(
        look.is_used([query for query, other in zip(queries, keys, strict=True) if other == key], key)
        for key in uses[1]
        if isinstance(key, Slice) and key not in values
    )
    made = [part for part in (*uses[0], *uses[1]) if isinstance(part, Slice)]
    sources = frozenset((part.module, look.calls[part]) for part in made)
    gains = found.gains[0].tolist(), found.gains[1].tolist()
    heads: list[HeadWeights | str] = []
    for head, (query, key) in enumerate(zip(queries, keys, strict=True)):
        if isinstance(query, str):
            heads.append(query)
            continue
        if uses[0][query] > 1:
            heads.append("one slice of a weight makes the queries of several heads")
            continue
        if query == key or (values is not None and query in values):
            heads.append("one slice of a weight makes its queries and also its keys or values")
            continue
        why = key if isinstance(key, str) else ""
        if not why and uses[1][key] > 1:
            why = "its keys serve other query heads, too"
        if not why and (values is None or key in values):
            why = "its keys may be its values, too"
        own_key = key if isinstance(key, Slice) and not why else None
        parts = [query] if own_key is None else [query, own_key]
        heads.append(
            HeadWeights(
                query,
                own_key,
                why,
                gains=(
                    gains[0][head][look.block[query]],
                    math.nan if own_key is None else gains[1][head // group][look.block[own_key]],
                ),
                calls=frozenset((part.module, look.calls[part]) for part in parts),
                used=used,
                sources=sources,
            )
        )
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
        is_shared: Tells whether something else has the memory of a parameter.
    """

    def __init__(self, found: Evidence, model: nn.Module, is_shared: Callable[[nn.Parameter], bool]) -> None:
        self.found = found
        self.is_shared = is_shared
        self.limit = tolerance(found.dtype)
        self.outputs = [output for output, _ in found.blocks]
        dims = {output: output.dim() for output in dict.fromkeys(self.outputs)}
        self.parts = [
            None if (dim := dims[output]) is None else output.slice(dim, features) for output, features in found.blocks
        ]
        self.block = {part: number for number, part in enumerate(self.parts) if part is not None}
        self.calls = {part: self.outputs[number].call for part, number in self.block.items()}
        self.features = sum(output.features for output, dim in dims.items() if dim is not None)
        self.adapted = {inner for module in model.modules() if is_adapter(module) for inner in module.modules()}

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

    def is_used(self, queries: Sequence[Slice | str], key: Slice) -> bool:
        """Tell whether the gradients of a key head and of its query heads are not those of logits alone.

        Whatever becomes of products of queries and keys, the sum over tokens of query times its gradient is that of key
        times its gradient: to lengthen the ones is to lengthen the others. Any further use adds to one side.
        """
        flows = [self._flow(part) for part in (*queries, key)]
        known = [flow for flow in flows if flow is not None]
        if len(known) < len(flows):
            return False
        *of_queries, of_key = known
        total, square, tiny = (torch.stack(of_queries).sum(0) + of_key * of_key.new_tensor([-1, 1, 1])).tolist()
        return bool(abs(total) > _USED * math.sqrt(square) + _TINY * math.sqrt(tiny))

    def _flow(self, part: Slice | str) -> Tensor | None:
        if isinstance(part, str):
            return None
        output, features = self.found.blocks[self.block[part]]
        return output.flow_of(features)

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
        if any(self.is_shared(parameter) for parameter in part.parameters()):
            return SHARED.format(side=side)
        output, features = self.found.blocks[self.block[part]]
        if output.computed or not output.is_exact(part.dim, features):
            return COMPUTED.format(side=side)
        return None

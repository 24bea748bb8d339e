"""What a model itself says about its attention: the probabilities it reports or returns from its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Attentions: TypeAlias = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Reported by the model, returned by its attention modules, and all else that is a softmax."""
SEED = 7
"""The random state every run starts from: some models draw masks, noise or hashes."""


def reported_attentions(model: nn.Module, inputs: Mapping[str, Any]) -> Attentions:
    """Return the attentions in the output of a model, and those that only its attention modules return.

    Some models report one attention of several, such as the last of each stage. Each tensor is returned once. At last
    come the results of every other softmax, attention or not, to compare with what the model says nothing about.
    """
    returned: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple):
            returned.extend(item for item in output[1:] if isinstance(item, Tensor) and is_distribution(item))

    hooks = [
        module.register_forward_hook(keep) for module in model.modules() if "attention" in type(module).__name__.lower()
    ]
    original = F.multi_head_attention_forward
    F.multi_head_attention_forward = lambda *args, **kwargs: original(
        *args, **{**kwargs, "average_attn_weights": False}
    )
    torch.manual_seed(SEED)
    try:
        with torch.no_grad(), _Softmaxes() as seen:
            output = model(**inputs, output_attentions=True)
    finally:
        F.multi_head_attention_forward = original
        for hook in hooks:
            hook.remove()
    reported = {tensor.data_ptr(): tensor for tensor in _attentions(output, inside=False)}
    known = {tensor.data_ptr() for tensor in (*reported.values(), *returned)}
    others = [tensor for tensor in seen.found if tensor.dim() >= 4 and tensor.data_ptr() not in known]
    further = {tensor.data_ptr(): tensor for tensor in returned if tensor.data_ptr() not in reported}
    return list(reported.values()), list(further.values()), others


def _attentions(output: Any, *, inside: bool) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        if inside and output.dim() >= 3:
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if "attentions" in name or not isinstance(value, (tuple, list)):
                yield from _attentions(value, inside=inside or "attentions" in name)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _attentions(value, inside=inside)


def softmaxed(tensor: Tensor) -> Tensor:
    """Return probabilities also where a model reports the logits."""
    return tensor if is_distribution(tensor) else tensor.softmax(-1)


def with_sink(tensor: Tensor) -> Tensor:
    """Return probabilities with the sink's column, which a model leaves out of its report."""
    return torch.cat([tensor, 1 - tensor.sum(-1, keepdim=True)], dim=-1)


def heads_second(tensor: Tensor) -> Tensor:
    """Return probabilities [B, H, windows, Q, K] with the heads where they are expected."""
    return tensor.movedim(1, -3) if tensor.dim() > 4 else tensor


class _Softmaxes(TorchFunctionMode):
    """Records what every softmax returns, attention or not, and what a fused kernel's softmax would."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "softmax":
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            self.found.append(out.movedim(dim, -1))
        elif func is F.scaled_dot_product_attention:
            self.found.append(dense(*args, **kwargs))
        return out


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the probabilities of a fused attention."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if enable_gqa else key
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1)


def all_softmaxes(model: nn.Module, inputs: Mapping[str, Any]) -> Attentions:
    """Return the results of every softmax of four or more dimensions, for models that report nothing themselves."""
    torch.manual_seed(SEED)
    with torch.no_grad(), _Softmaxes() as seen:
        model(**inputs)
    return [tensor for tensor in seen.found if tensor.dim() >= 4], [], []


def heads_folded(heads: int) -> Callable[[Tensor], Tensor]:
    """Return what unfolds probabilities [B H, Q, K]."""
    return lambda tensor: tensor.unflatten(0, (-1, heads))


def is_distribution(tensor: Tensor) -> bool:
    """Tell whether the last axis of [..., H, Q, K] holds probabilities."""
    return (
        tensor.dim() >= 4
        and tensor.is_floating_point()
        and bool(((tensor.sum(-1) - 1).abs() < 1e-4).all() and (tensor >= 0).all())
    )


def entropy_per_head(probabilities: Tensor) -> Tensor:
    """Return the mean entropy of the rows of [..., H, Q, K], per head.

    Rows with one outcome do not count, nor those without any: masked everywhere, they come out uniform or zero.
    """
    p = probabilities.detach().double()
    p = p.flatten(0, -4)
    entropies = -torch.special.xlogy(p, p).sum(-1)
    uniform = p.amax(-1) - p.amin(-1) < 1e-7
    counted = ((p > 0).sum(-1) >= 2) & ~uniform
    return torch.where(counted, entropies, 0).sum((0, 2)) / counted.sum((0, 2))

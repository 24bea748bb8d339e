"""What a model itself says about its attention: the probabilities it reports or returns from its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SEED = 7
"""The random state every run starts from: some models draw masks, noise or hashes."""


def reported_attentions(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the attentions in the output of a model, and those that only its attention modules return.

    Some models report one attention of several, such as the last of each stage. Each tensor is returned once.
    """
    returned: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple):
            returned.extend(item for item in output[1:] if isinstance(item, Tensor) and is_distribution(item))

    hooks = [
        module.register_forward_hook(keep) for module in model.modules() if "attention" in type(module).__name__.lower()
    ]
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            output = model(**inputs, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    reported = {tensor.data_ptr(): tensor for tensor in _attentions(output, inside=False)}
    further = {tensor.data_ptr(): tensor for tensor in returned if tensor.data_ptr() not in reported}
    return list(reported.values()), list(further.values())


def _attentions(output: Any, *, inside: bool) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        if inside and output.dim() >= 4:
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if "attentions" in name or not isinstance(value, (tuple, list)):
                yield from _attentions(value, inside=inside or "attentions" in name)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _attentions(value, inside=inside)


def is_distribution(tensor: Tensor) -> bool:
    """Tell whether the last axis of [..., H, Q, K] holds probabilities."""
    return (
        tensor.dim() >= 4
        and tensor.is_floating_point()
        and bool(((tensor.sum(-1) - 1).abs() < 1e-4).all() and (tensor >= 0).all())
    )


def entropy_per_head(probabilities: Tensor, sink: Tensor | None = None) -> Tensor:
    """Return the mean entropy of the rows of [..., H, Q, K], per head.

    Rows with one outcome do not count, nor those without any: masked everywhere, they come out uniform or zero.
    """
    p = probabilities.detach().double()
    if sink is not None:
        p = torch.cat([p, sink.detach().double()], dim=-1)
    p = p.flatten(0, -4)
    entropies = -torch.special.xlogy(p, p).sum(-1)
    uniform = p.amax(-1) - p.amin(-1) < 1e-7
    counted = ((p > 0).sum(-1) >= 2) & ~uniform
    return torch.where(counted, entropies, 0).sum((0, 2)) / counted.sum((0, 2))

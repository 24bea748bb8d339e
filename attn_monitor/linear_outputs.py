"""What the linear maps of a model put out, and which part of a weight made it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor.head_norms import sampled_tokens

_LINEAR = 0.05
"""How far an output may be from weight times input, relative: half precision rounds; what is no product is off by 1."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a projection that makes one head.

    Attributes:
        module: Has the weight.
        weight: The name of the weight in the module.
        bias: The name of the bias, `None` without one.
        dim: Which dimension of the weight is that of the output.
        features: Start, stop and step of the output features, as indices into that dimension.
        bias_offset: What to add to these for the bias.
    """

    module: nn.Module
    weight: str
    bias: str | None
    dim: int
    features: tuple[int, int, int]
    bias_offset: int = 0

    def views(self) -> list[Tensor]:
        """Return the rows of the weight and the entries of the bias."""
        start, stop, step = self.features
        rows = (slice(None),) * self.dim + (slice(start, stop, step),)
        views = [self._parameter(self.weight)[rows]]
        if self.bias is not None:
            entries = slice(start + self.bias_offset, stop + self.bias_offset, step)
            views.append(self._parameter(self.bias)[entries])
        return views

    def _parameter(self, name: str) -> nn.Parameter:
        parameter = self.module._parameters[name]
        assert parameter is not None, "refused before"
        return parameter


@dataclass(slots=True, eq=False)
class Output:
    """What a module put out in the last forward pass.

    Attributes:
        module: The module.
        tensor: The output.
        weight: The name of its weight; `None` where it is no map by a matrix.
        bias: The name of the bias that was added.
        start: The first output feature, as an index into the weight.
        bias_start: The same for the bias.
        errors: How far the output is from weight times input, by the dimension of the weight that is that of the
            output: both may fit the shapes. Tensors, so that nothing waits for the device.
        features: How many output features there are.
    """

    module: nn.Module
    tensor: Tensor
    weight: str | None = None
    bias: str | None = None
    start: int = 0
    bias_start: int = 0
    errors: dict[int, Tensor] = field(default_factory=dict)
    features: int = field(init=False)

    def __post_init__(self) -> None:
        self.features = int(self.tensor.shape[-1])

    def forget(self) -> None:
        """Let go of what was put out."""
        self.tensor = self.tensor.new_empty(0)

    def dim(self) -> int | None:
        """Return which dimension of the weight is that of the output, `None` if this is no linear map."""
        errors = {dim: float(error) for dim, error in self.errors.items()}
        return next((dim for dim, error in errors.items() if error < _LINEAR), None)

    def slice(self, dim: int, features: slice) -> Slice:
        """Return the part of the weight that makes some features."""
        assert self.weight is not None, "only of linear maps"
        start = self.start + features.start % self.features  # one map may run over each head in turn
        where = (start, start + features.stop - features.start, features.step)
        return Slice(self.module, self.weight, self.bias, dim, where, self.bias_start - self.start)


def is_candidate(module: nn.Module) -> bool:
    """Tell whether a module may make queries and keys, or tell why they are not what a projection put out."""
    return has_matrix(module) or is_adapter(module) or is_norm(module)


def has_matrix(module: nn.Module) -> bool:
    """Tell whether a module may be a linear map."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalises; only the text of a refusal depends on it."""
    return "norm" in type(module).__name__.lower()


def is_adapter(module: nn.Module) -> bool:
    """Tell whether a module adds something to the output of a layer it wraps, as LoRA does."""
    return hasattr(module, "base_layer")


def own_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Output]:
    """Return what a module put out, and how far that is from its weight times its input."""
    tensor = (output[0] if isinstance(output, (tuple, list)) else output).detach()
    found = Output(module, tensor)
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if (
        is_adapter(module)
        or given is None
        or not isinstance(weight, Tensor)
        or weight.dim() != 2
        or not weight.is_floating_point()
    ):
        return [found]
    found.weight, found.bias = "weight", "bias" if isinstance(bias, Tensor) else None
    chosen = sampled_tokens(tensor.numel() // tensor.shape[-1])
    x, out = (part.detach().flatten(0, -2)[chosen].float() for part in (given, tensor))
    if isinstance(bias, Tensor):
        out = out - bias.detach().float()
    matrix = weight.detach().float()
    # nn.Linear multiplies by the transposed weight, transformers' Conv1D by the weight.
    with torch.autocast(out.device.type, enabled=False):
        for dim, side in {0: matrix.T, 1: matrix}.items():
            if side.shape == (x.shape[-1], out.shape[-1]):
                found.errors[dim] = (out - x @ side).norm() / out.norm()
    return [found]


def packed_outputs(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Output]:
    """Return what the projections of `nn.MultiheadAttention` make of its inputs; they are no modules of their own."""
    inputs = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    first = next(iter(inputs.values()))  # for a subclass that takes one input; whether it is right the numbers tell
    found = []
    for number, side in enumerate(("query", "key", "value")):
        start = number * module.embed_dim
        packed = module._parameters["in_proj_weight"] is not None
        name = "in_proj_weight" if packed else f"{side[0]}_proj_weight"
        rows = slice(start, start + module.embed_dim)
        weight = getattr(module, name)[rows] if packed else getattr(module, name)
        biases = module._parameters["in_proj_bias"]
        bias = None if biases is None else biases[rows]
        tensor = nn.functional.linear(inputs.get(side, first), weight, bias).detach()
        found.append(
            Output(
                module,
                tensor,
                weight=name,
                bias=None if bias is None else "in_proj_bias",
                start=start if packed else 0,
                bias_start=start,
                errors={0: tensor.new_zeros(())},
            )
        )
    return found

"""What the linear maps of a model put out, and which part of a weight made it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor.head_norms import sampled_tokens
from attn_monitor.sums import state_dtype
from attn_monitor.unseen import unseen

_LINEAR = 0.05
"""How far an output may be from weight times input, relative: half precision rounds; what is no product is off by 1."""
_FULL_LINEAR = 0.02
"""The same for the part of a single head in float32, where matrix products round to 10 bits at worst."""
_REACH = 8
"""How many operations lie between a weight and the output of its map at most."""
_PLAIN = (
    "Addmm",
    "Mm",
    "Bmm",
    "Linear",
    "MkldnnLinear",
    "Add",
    "T",
    "Transpose",
    "Permute",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Expand",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
)
"""What a weight may go through on its way into the product, as autograd names it."""


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

    def parameters(self) -> list[nn.Parameter]:
        """Return the weight and the bias."""
        return [self._parameter(name) for name in (self.weight, self.bias) if name is not None]

    def _parameter(self, name: str) -> nn.Parameter:
        parameter = self.module._parameters[name]
        assert parameter is not None, "refused before"
        return parameter


@dataclass(slots=True, eq=False)
class Output:
    """What a module put out in one call.

    Attributes:
        module: The module.
        tensor: The output.
        weight: The name of its weight; `None` where it is no map by a matrix.
        bias: The name of the bias that was added.
        start: The first output feature, as an index into the weight.
        bias_start: The same for the bias.
        errors: The squared distance from weight times input, and the square of the output, of each feature, by the
            dimension of the weight that is that of the output: both may fit the shapes. Tensors, so that nothing waits
            for the device.
        computed: Whether the weight takes part only by way of something computed from it.
        call: Which call of the module it was, in the step in which it is looked at.
        flow: What came back of each feature in the backward pass, see `flow_of`; `None` if nothing did.
        features: How many output features there are.
    """

    module: nn.Module
    tensor: Tensor
    weight: str | None = None
    bias: str | None = None
    start: int = 0
    bias_start: int = 0
    errors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    computed: bool = False
    call: int = 0
    flow: Tensor | None = None
    features: int = field(init=False)

    def __post_init__(self) -> None:
        self.features = int(self.tensor.shape[-1])

    def forget(self) -> None:
        """Let go of what was put out."""
        self.tensor = self.tensor.new_empty(0)

    def rows(self, tokens: int, split: tuple[int, ...]) -> Tensor | None:
        """Return some tokens of the output, [N, features], or `None` where it is not of these tokens.

        Args:
            tokens: How many there are.
            split: The shape [B, heads, tokens, D] of an output whose heads were split and moved to the front already.
        """
        tensor = self.tensor.transpose(1, 2) if tuple(self.tensor.shape) == split else self.tensor
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.numel() % tokens:
            return None
        rows = tensor.reshape(tokens, -1)
        return rows[sampled_tokens(tokens)] if rows.shape[1] % tensor.shape[-1] == 0 else None

    def dim(self) -> int | None:
        """Return which dimension of the weight is that of the output, `None` if this is no linear map."""
        self.errors = {dim: (off.cpu(), square.cpu()) for dim, (off, square) in self.errors.items()}
        errors = {dim: _relative(*parts) for dim, parts in self.errors.items()}
        return next((dim for dim, error in errors.items() if error < _LINEAR), None)

    def is_exact(self, dim: int, features: slice) -> bool:
        """Tell whether some features are weight times input each for itself, as far as the precision lets tell."""
        off, square = self.errors[dim]
        if off.dim() == 0:
            return True
        chosen = self._chosen(features)
        limit = _FULL_LINEAR if self.tensor.dtype in (torch.float32, torch.float64) else _LINEAR
        return _relative(off[chosen], square[chosen]) < limit

    def flow_of(self, features: slice) -> Tensor | None:
        """Return what came back of some features, [3], `None` if nothing did.

        It is the sum over tokens of output times gradient, the sum of its squares, and what the rounding of the
        smallest gradients adds to these.
        """
        return None if self.flow is None else self.flow[:, self._chosen(features)].sum(1)

    def follow(self, tensor: Tensor) -> None:
        """Have the gradient of an output tell, once it comes, whether attention is all that the output is for."""
        out = tensor.detach()
        version = out._version

        def note(gradient: Tensor) -> None:
            try:
                with unseen(), torch.no_grad():
                    if out._version == version and type(gradient) is Tensor:
                        found = _flow(out, gradient)
                        self.flow = found if self.flow is None else self.flow + found
            except Exception:  # then nothing is known, and the training is not to be disturbed
                self.flow = None

        if tensor.requires_grad and type(out) is Tensor:
            tensor.register_hook(note)

    def _chosen(self, features: slice) -> Tensor:
        return torch.arange(features.start, features.stop, features.step or 1) % self.features

    def slice(self, dim: int, features: slice) -> Slice:
        """Return the part of the weight that makes some features."""
        assert self.weight is not None, "only of linear maps"
        start = self.start + features.start % self.features  # one map may run over each head in turn
        where = (start, start + features.stop - features.start, features.step)
        return Slice(self.module, self.weight, self.bias, dim, where, self.bias_start - self.start)


@dataclass(slots=True, eq=False)
class PackedOutput(Output):
    """What a projection of `nn.MultiheadAttention` makes of its input, `tensor`: it is no module of its own.

    Attributes:
        matrix: The weight of this projection.
        offset: Its bias.
    """

    matrix: Tensor = field(kw_only=True)
    offset: Tensor | None = field(kw_only=True)

    def __post_init__(self) -> None:
        self.features = len(self.matrix)

    def forget(self) -> None:
        """Let go of the input and of what may be a copy of the weight."""
        self.tensor = self.tensor.new_empty(0)
        self.matrix, self.offset = self.tensor, None

    def rows(self, tokens: int, split: tuple[int, ...]) -> Tensor | None:
        """Return what it makes of some tokens."""
        if self.tensor.numel() != tokens * self.tensor.shape[-1]:
            return None
        chosen = self.tensor.reshape(tokens, -1)[sampled_tokens(tokens)]
        return nn.functional.linear(chosen, self.matrix, self.offset)


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
    tensor = output[0] if isinstance(output, (tuple, list)) else output
    found = Output(module, tensor.detach())
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
    found.computed = _is_computed(tensor, weight)
    found.follow(tensor)
    chosen = sampled_tokens(tensor.numel() // tensor.shape[-1])
    x, out = (part.detach().flatten(0, -2)[chosen].float() for part in (given, tensor))
    if isinstance(bias, Tensor):
        out = out - bias.detach().float()
    matrix = weight.detach().float()
    # nn.Linear multiplies by the transposed weight, transformers' Conv1D by the weight.
    with torch.autocast(out.device.type, enabled=False):
        for dim, side in {0: matrix.T, 1: matrix}.items():
            if side.shape == (x.shape[-1], out.shape[-1]):
                found.errors[dim] = (out - x @ side).square().sum(0), out.square().sum(0)
    return [found]


def packed_outputs(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Output]:
    """Return what the projections of `nn.MultiheadAttention` get and what they would make of it."""
    inputs = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    first = next(iter(inputs.values()))  # for a subclass that takes one input; whether it is right the numbers tell
    found: list[Output] = []
    for number, side in enumerate(("query", "key", "value")):
        start = number * module.embed_dim
        packed = module._parameters["in_proj_weight"] is not None
        name = "in_proj_weight" if packed else f"{side[0]}_proj_weight"
        rows = slice(start, start + module.embed_dim)
        weight = getattr(module, name)[rows] if packed else getattr(module, name)
        biases = module._parameters["in_proj_bias"]
        bias = None if biases is None else biases[rows]
        nothing = weight.new_zeros(())
        found.append(
            PackedOutput(
                module,
                inputs.get(side, first).detach(),
                weight=name,
                bias=None if bias is None else "in_proj_bias",
                start=start if packed else 0,
                bias_start=start,
                errors={0: (nothing, nothing + 1)},
                matrix=weight.detach(),
                offset=None if bias is None else bias.detach(),
            )
        )
    return found


def _flow(out: Tensor, gradient: Tensor) -> Tensor:
    """Return for each feature what `Output.flow_of` adds up, [3, F]."""
    dtype = state_dtype(out.device)
    tiny = torch.finfo(gradient.dtype).smallest_normal * torch.finfo(gradient.dtype).eps
    out = out.flatten(0, -2).to(dtype)
    products = out * gradient.flatten(0, -2)
    return torch.stack([products.sum(0), products.square().sum(0), out.mul(tiny).square().sum(0)])


def _relative(off: Tensor, square: Tensor) -> float:
    return float((off.sum() / square.sum()).sqrt())


def _is_computed(output: Tensor, weight: Tensor) -> bool:
    """Tell whether autograd has a way from an output to a weight, and none that is a plain product."""
    ways = [(output.grad_fn, True)]
    plain = computed = False
    for _ in range(_REACH):
        ways = [
            (node, direct and _is_plain(before))
            for before, direct in ways
            if before is not None
            for node, _ in before.next_functions
            if node is not None
        ]
        for node, direct in ways:
            if getattr(node, "variable", None) is weight:
                plain |= direct
                computed |= not direct
    return computed and not plain


def _is_plain(node: Any) -> bool:
    name = str(node.name())
    return name.partition("Backward")[0] in _PLAIN

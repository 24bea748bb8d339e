"""Which torch functions do what, by every spelling a model may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Function: TypeAlias = Callable[..., Any]


def _spellings(*names: str) -> frozenset[Function]:
    """Collect a function under the names it has as a method, in torch and in torch.nn.functional."""
    homes = (Tensor, torch, torch.nn.functional, torch.special)
    return frozenset(found for name in names for home in homes if (found := getattr(home, name, None)) is not None)


def _properties(*names: str) -> frozenset[Function]:
    return frozenset(getattr(Tensor, name).__get__ for name in names)


SDPA: Function = F.scaled_dot_product_attention
MULTI_HEAD: Function = F.multi_head_attention_forward
SOFTMAX = _spellings("softmax", "_softmax")
LOG_SOFTMAX = _spellings("log_softmax")

MATMUL = _spellings("matmul", "bmm", "mm", "__matmul__")
RIGHT_MATMUL = _spellings("__rmatmul__")
BADDBMM = _spellings("baddbmm", "baddbmm_")
EINSUM = _spellings("einsum")

MULTIPLY = _spellings("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")
DIVIDE = _spellings(
    "div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__div__", "__truediv__", "__itruediv__"
)
ADD = _spellings("add", "add_", "__add__", "__radd__", "__iadd__")
SUBTRACT = _spellings("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__")
REVERSE_SUBTRACT = _spellings("__rsub__", "rsub")
NEGATE = _spellings("neg", "neg_", "negative", "negative_", "__neg__")

MASKED_FILL = _spellings("masked_fill", "masked_fill_")
WHERE = _spellings("where")
SET_ITEM = _spellings("__setitem__")
TANH = _spellings("tanh", "tanh_")
NO_SOFTMAX = LOG_SOFTMAX | _spellings(
    *("sigmoid", "sigmoid_", "exp", "exp_", "softplus", "relu", "relu_", "leaky_relu", "elu", "gelu", "silu"),
    *("pow", "pow_", "__pow__", "__ipow__", "square", "square_", "abs", "abs_"),
)
"""What is done to scores where a softmax was expected; followed to report it, not to measure it."""

LARGEST = _spellings("max", "amax")
SMALLEST = _spellings("min")
DISTANCE = _spellings("cdist")

CONCATENATE = _spellings("cat", "concat", "concatenate")
RESHAPE = _spellings("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
VIEW = (
    _spellings(
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint"),
        *("unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "__getitem__", "select", "narrow"),
        *("unbind", "chunk", "split", "tensor_split", "split_with_sizes"),
    )
    | {Tensor.unfold}
    | _properties("T", "mT", "H", "mH")
)
STACK = _spellings("stack")
REARRANGE = _spellings("roll", "flip", "index_select", "gather", "take_along_dim")
"""Functions that take entries of a tensor in another order."""
PAD = _spellings("pad")
REPEAT = _spellings("repeat", "tile")
REPEAT_INTERLEAVE = _spellings("repeat_interleave")
AS_STRIDED = _spellings("as_strided")
INDEXING = _spellings("__getitem__", "select")
SAME = _spellings(
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "alias"),
    *("cuda", "cpu", "nan_to_num", "nan_to_num_", "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max"),
    *("maximum", "minimum", "dropout", "dropout_", "requires_grad_", "tril", "triu", "masked_scatter", "index_fill"),
)
"""Elementwise functions after which a tensor is still what it was."""
MIXING = _spellings("conv2d")
"""Functions that mix the heads of the scores (talking heads as a 1 x 1 convolution)."""

BACKWARD = _spellings("backward") | {torch.autograd.backward, torch.autograd.grad}


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str, default: Any = None) -> Any:
    """Return an argument given by position or by any of its names."""
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


def flat(values: Iterable[Any]) -> list[Any]:
    """Return arguments with the tuples among them opened, as those of an index."""
    return [item for value in values for item in (value if isinstance(value, tuple) else (value,))]


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments, those inside lists and tuples too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found

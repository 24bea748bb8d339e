"""Which torch functions do what, by every spelling a model may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

Function: TypeAlias = Callable[..., Any]


def _spellings(*names: str) -> frozenset[Function]:
    """Collect a function under the names it has as a method, in torch and in torch.nn.functional."""
    homes = (Tensor, torch, torch.nn.functional, torch.special)
    return frozenset(found for name in names for home in homes if (found := getattr(home, name, None)) is not None)


def _properties(*names: str) -> frozenset[Function]:
    return frozenset(getattr(Tensor, name).__get__ for name in names)


SDPA: Function = F.scaled_dot_product_attention
MULTI_HEAD: Function = F.multi_head_attention_forward
OPENED: frozenset[Function] = frozenset({F.gumbel_softmax, F.softmin})
"""Functions of torch in Python around a softmax, which is looked at inside of them."""
SOFTMAX = _spellings("softmax", "_softmax")
LOG_SOFTMAX = _spellings("log_softmax")

MATMUL = _spellings("matmul", "bmm", "mm", "mv", "__matmul__")
RIGHT_MATMUL = _spellings("__rmatmul__")
BADDBMM = _spellings("baddbmm", "baddbmm_")
ADDMM = _spellings("addmm", "addmm_", "addbmm", "addbmm_")
EINSUM = _spellings("einsum")
LINEAR = _spellings("linear")
INNER = _spellings("inner")
TENSORDOT = _spellings("tensordot")
VECDOT: frozenset[Function] = frozenset({torch.linalg.vecdot})
SUM = _spellings("sum")
MEAN = _spellings("mean")

MULTIPLY = _spellings("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")
DIVIDE = _spellings(
    "div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__div__", "__truediv__", "__itruediv__"
)
ADD = _spellings("add", "add_", "__add__", "__radd__", "__iadd__")
SUBTRACT = _spellings("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__")
REVERSE_SUBTRACT = _spellings("__rsub__", "rsub")
ADDCMUL = _spellings("addcmul", "addcmul_")
ADDCDIV = _spellings("addcdiv", "addcdiv_")
LERP = _spellings("lerp", "lerp_")
NEGATE = _spellings("neg", "neg_", "negative", "negative_", "__neg__")

MASKED_FILL = _spellings("masked_fill", "masked_fill_")
WHERE = _spellings("where")
SET_ITEM = _spellings("__setitem__")
SCATTER = _spellings("scatter", "scatter_")
INDEX_FILL = _spellings("index_fill", "index_fill_")
CLAMP = _spellings("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_")
CAP = _spellings(*("clamp_max", "clamp_max_", "maximum", "minimum", "nan_to_num", "nan_to_num_"))
DROP = _spellings("dropout", "dropout_")
CUT_OUT = _spellings("tril", "tril_", "triu", "triu_", "masked_scatter", "masked_scatter_")
TANH = _spellings("tanh", "tanh_")
NO_SOFTMAX = LOG_SOFTMAX | _spellings(
    *("sigmoid", "sigmoid_", "expit", "hardsigmoid", "exp", "exp_", "exp2", "exp2_", "expm1", "expm1_", "softplus"),
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "prelu", "rrelu", "rrelu_", "threshold", "threshold_"),
    *("elu", "elu_", "celu", "celu_", "selu", "selu_", "gelu", "silu", "mish", "hardswish", "logsigmoid", "softsign"),
    *(
        "pow",
        "pow_",
        "__pow__",
        "__rpow__",
        "__ipow__",
        "square",
        "square_",
        "abs",
        "abs_",
        "absolute",
        "sqrt",
        "sqrt_",
    ),
    *("log1p", "log1p_", "sin", "cos"),
)
"""What is done to scores in the place of a softmax, which is told, or before it: then they are no scale * q.k."""
KEEPS_MASKS = LOG_SOFTMAX | _spellings("leaky_relu", "leaky_relu_", "prelu", "rrelu", "rrelu_")
"""Those of them after which a score of minus infinity, or near it, is still that."""

LARGEST = _spellings("max", "amax")
SMALLEST = _spellings("min")
DISTANCE = _spellings("cdist")

CONCATENATE = _spellings("cat", "concat", "concatenate")
RESHAPE = _spellings("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
VIEW_IN_PLACE = _spellings("unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_")
VIEW = (
    VIEW_IN_PLACE
    | _spellings(
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint"),
        *("unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "__getitem__", "select", "narrow"),
        *("unbind", "chunk", "split", "tensor_split", "split_with_sizes"),
    )
    | {Tensor.unfold}
    | _properties("T", "mT", "H", "mH")
)
SWAP = _spellings("transpose", "swapaxes", "swapdims")
PERMUTE = _spellings("permute")
UNSQUEEZE = _spellings("unsqueeze")
CUT = _spellings("narrow", "chunk", "split", "tensor_split", "split_with_sizes")
SLICE = _spellings("__getitem__")
STACK = _spellings("stack")
SELECT_LARGEST = _spellings("topk", "sort")
REARRANGE = _spellings("roll", "flip", "index_select", "gather", "take_along_dim")
"""Functions that take entries of a tensor in another order."""
PAD = _spellings("pad")
REPEAT = _spellings("repeat", "tile")
REPEAT_INTERLEAVE = _spellings("repeat_interleave")
AS_STRIDED = _spellings("as_strided")
INDEXING = _spellings("__getitem__", "select")
SAME = _spellings(
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "alias"),
    *("cuda", "cpu", "requires_grad_"),
)
"""Elementwise functions after which a tensor is still what it was."""
CONVOLUTION_1D = _spellings("conv1d")
CONVOLUTION = CONVOLUTION_1D | _spellings("conv2d")
"""Functions that make channels of a weight, or mix the heads of the scores (talking heads as 1 x 1 convolution)."""

_ATEN = {
    "_unsafe_view": "view",
    "_reshape_alias": "view",
    "_to_copy": "to",
    "_log_softmax": "log_softmax",
    "lift_fresh": "alias",
    "slice": "narrow",
    "index": "__getitem__",
}
"""Operators of torch that have no function of the same name."""
_known_operators: dict[OpOverload | OpOverloadPacket, Function] = {}


def known_as(function: Function) -> Function:
    """Return the function of torch that an operator of `torch.ops.aten` is; any other function as it is."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return function
    if (known := _known_operators.get(function)) is None:
        full: str = function._schema.name if isinstance(function, OpOverload) else function._qualified_op_name
        namespace, _, name = full.partition("::")
        homes = (torch, Tensor, torch.nn.functional) if namespace == "aten" else ()
        name = _ATEN.get(name, name)
        known = next((found for home in homes if (found := getattr(home, name, None)) is not None), function)
        _known_operators[function] = known
    return known


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

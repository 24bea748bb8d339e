"""Which kernel is read by which adapter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from attn_monitor.capture.adapters import check_measurable
from attn_monitor.capture.sighting import Sighting, UnmeasurableError
from attn_monitor.records import AttentionCall

OPERATORS = (HigherOrderOperator, OpOverload, OpOverloadPacket)
"""Kinds of functions that the function mode sees and that have a name of their own."""


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """What an adapter makes of the arguments of a kernel.

    Attributes:
        make: Returns the call in canonical axes. It is called again in the backward pass, so that nothing that was
            made for it has to be kept until then.
        canonical: Brings the kernel's output, and so its gradient, into [B, H, Q, V].
        note: What the user should know about the numbers.

    Example:
        >>> import torch
        >>> from attn_monitor.arguments import attention_call
        >>> q = k = v = torch.randn(2, 5, 3, 8)  # [B, Q, H, D]
        >>> read = KernelCall(lambda: attention_call(*(x.transpose(1, 2) for x in (q, k, v))), lambda out: out.mT)
        >>> read.make().shape
        CallShape(batch=2, heads=3, queries=5, keys=5)
    """

    make: Callable[[], AttentionCall]
    canonical: Callable[[Tensor], Tensor] = as_it_is
    note: str = ""


Adapter: TypeAlias = Callable[..., "KernelCall | None"]
AdapterType = TypeVar("AdapterType", bound=Adapter)

KERNELS: dict[str, Adapter] = {}
"""Python functions by ``module:name``; they are seen while a probe is attached and their module is imported."""
_OPERATORS: dict[str, Adapter] = {}


def register_kernel(path: str) -> Callable[[AdapterType], AdapterType]:
    """Have a Python function read by an adapter.

    Args:
        path: Where the function is defined, ``package.module:function``. It is never imported from here.

    Returns:
        A decorator for the adapter. The adapter is called with the arguments of the kernel, by the names of the
        kernel's own signature, and returns a `KernelCall`, or `None` where this call is no attention. It may raise
        `UnmeasurableError`, whose message the user reads.

    Raises:
        ValueError: If the path has no colon.

    Example:
        >>> from attn_monitor.arguments import attention_call
        >>> @register_kernel("my_kernels:fast_attention")
        ... def read(q, k, v, causal=False):
        ...     return KernelCall(lambda: attention_call(q, k, v, is_causal=causal))
        >>> KERNELS.pop("my_kernels:fast_attention") is read  # only here, to leave nothing behind
        True
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"`path` expects 'package.module:function', got {path!r}.")
    return _into(KERNELS, path)


def register_operator(name: str) -> Callable[[AdapterType], AdapterType]:
    """Have an operator of torch read by an adapter, as `register_kernel` does for a Python function.

    Args:
        name: ``namespace::operator`` as in `torch.ops`, or the name of a higher-order operator.

    Returns:
        A decorator for the adapter, which is called with the arguments by the names of the operator's schema.

    Example:
        >>> from attn_monitor.arguments import attention_call
        >>> @register_operator("my_kernels::fast_attention")
        ... def read(q, k, v):
        ...     return KernelCall(lambda: attention_call(q, k, v))
        >>> _OPERATORS.pop("my_kernels::fast_attention") is read  # only here, to leave nothing behind
        True
    """
    return _into(_OPERATORS, name)


def _into(table: dict[str, Adapter], key: str) -> Callable[[AdapterType], AdapterType]:
    def register(adapter: AdapterType) -> AdapterType:
        table[key] = adapter
        return adapter

    return register


def operator_adapter(function: Any) -> Adapter | None:
    """Return the adapter of an operator, `None` if it has none."""
    if isinstance(function, HigherOrderOperator):
        return _OPERATORS.get(function.name())
    name: str = function._schema.name if isinstance(function, OpOverload) else function._qualified_op_name
    return _OPERATORS.get(name)


def read_kernel(adapter: Adapter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sighting | None:
    """Return what an adapter makes of a call; `None` where the kernel itself will refuse the arguments."""
    named = _named(function, args, kwargs)
    if named is None:
        return None
    try:
        read = adapter(**named)
        if read is None:
            return None
        call = read.make()
    except (ValueError, TypeError, IndexError) as error:
        raise UnmeasurableError(f"the arguments of {_name(function)} were not understood: {error}") from error
    check_measurable(*(tensor for tensor in (call.query, call.key, call.value, call.logits) if tensor is not None))
    given = [value for value in named.values() if isinstance(value, Tensor)]
    return Sighting(
        call=call,
        logits=None,
        canonical=read.canonical,
        differentiable=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given),
        note=read.note,
        path=_name(function),
        make=read.make,
    )


def _name(function: Any) -> str:
    if isinstance(function, OPERATORS):
        name: str = function.name() if isinstance(function, HigherOrderOperator) else function.__name__
        return name
    return getattr(function, "__name__", type(function).__name__)


def _named(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by the names that the function itself has for them."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        overload = function if isinstance(function, OpOverload) else getattr(function, function.overloads()[0])
        return {**dict(zip((part.name for part in overload._schema.arguments), args, strict=False)), **kwargs}
    signature = inspect.signature(function.__call__ if isinstance(function, HigherOrderOperator) else function)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named

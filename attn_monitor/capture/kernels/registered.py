"""Functions that users register in transformers' `ALL_ATTENTION_FUNCTIONS`, and that nothing else can see into.

Most of them end in something that is seen anyway. Only where nothing was seen are their arguments read.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_monitor.capture.kernels import relay
from attn_monitor.capture.kernels.packed import reach
from attn_monitor.capture.kernels.registry import KernelCall
from attn_monitor.records import AttentionCall

_HOME, _CLASS = "transformers.modeling_utils", "AttentionInterface"


def read(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> KernelCall:
    """Read the arguments that transformers hands to every attention function: [B, H, Q, D], output [B, Q, H, V]."""
    queries, keys = query.shape[2], key.shape[2]
    whole = isinstance(attention_mask, Tensor) and attention_mask.dim() == 4
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal) and not whole

    def make() -> AttentionCall:
        masks: list[Tensor] = []
        if whole:
            masks.append(attention_mask.detach()[..., :keys])
        elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            masks.append(attention_mask.detach()[:, None, None, -keys:] != 0)
        plain = causal and queries == keys and sliding_window is None
        if causal and not plain:
            left = -1 if sliding_window is None else sliding_window - 1
            window = reach(queries, keys, (queries, keys), left, 0, query.device)
            masks.extend([] if window is None else [window])
        return AttentionCall(
            query=query.detach(),
            key=key.detach(),
            value=value.detach(),
            masks=tuple(masks),
            is_causal=plain,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.detach(),
            head_dim=query.shape[-1],
            dropout=bool(dropout),
        )

    note = "" if whole else "read from the arguments of a registered function; its mask is what the module declares"
    return KernelCall(make, canonical=lambda out: out.transpose(1, 2), note=note)


def install() -> None:
    """Have functions looked up in `ALL_ATTENTION_FUNCTIONS` watched for as long as a probe is attached."""
    relay.add_patch(_patch)


def _patch() -> Callable[[], None] | None:
    home = sys.modules.get(_HOME)
    interface: Any = getattr(home, _CLASS, None)
    if interface is None:
        return None
    lookup: Callable[[Any, str], Any] = interface.__getitem__
    own = vars(interface).get("__getitem__")

    def __getitem__(self: Any, key: str) -> Any:
        function = lookup(self, key)
        return _watched(function) if relay.active_modes() else function

    interface.__getitem__ = __getitem__

    def undo() -> None:
        if own is None:
            del interface.__getitem__
        else:
            interface.__getitem__ = own

    return undo


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = function
        for mode in relay.active_modes():
            call = functools.partial(mode.unseen_kernel, read, call, function)
        return call(*args, **kwargs)

    return watched

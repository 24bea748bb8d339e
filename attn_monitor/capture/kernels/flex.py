"""flex_attention: `score_mod` and `mask_mod` are evaluated for every pair, and only for the statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_monitor.capture.kernels.registry import KernelCall
from attn_monitor.records import AttentionCall
from attn_monitor.tiles import undisturbed

Modification: TypeAlias = Callable[..., Tensor]
_NOTHING = frozenset({"_identity", "noop_mask"})
"""What flex itself puts where the user gave no function."""


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Modification,
    block_mask: tuple[Any, ...],
    scale: float,
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
    **_: Any,
) -> KernelCall:
    """Read the operator behind `flex_attention`."""
    batch, queries, dim = query.shape[0], query.shape[2], query.shape[3]

    def make() -> AttentionCall:
        keys = [tensor.detach().expand(batch, -1, -1, -1) for tensor in (key, value)]
        logits = None
        if not _is_nothing(score_mod):
            logits = _scores(query.detach(), keys[0], score_mod, scale, score_mod_other_buffers)
        return AttentionCall(
            query=query.detach(),
            key=keys[0],
            value=keys[1],
            logits=logits,
            masks=_masks(block_mask, (queries, key.shape[2]), query.device, mask_mod_other_buffers),
            scale=scale,
            head_dim=dim,
        )

    return KernelCall(make)


class _Indexing(TorchFunctionMode):
    """Keeps indices tensors, as flex itself does: torch 2.8 makes numbers of them, which vmap refuses."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # no other mode takes notice
            if func is Tensor.__getitem__:
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if all(isinstance(part, Tensor) for part in index):
                    return torch.ops.aten.index(args[0], list(index))
            return func(*args, **(kwargs or {}))


def _is_nothing(function: object) -> bool:
    home = str(getattr(function, "__module__", ""))
    return getattr(function, "__name__", "") in _NOTHING and home == "torch.nn.attention.flex_attention"


def _masks(
    block_mask: tuple[Any, ...], lengths: tuple[int, int], device: torch.device, buffers: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the mask, [B, H, Q, K], as many items and heads as the blocks have."""
    mask_mod = next(part for part in block_mask if callable(part))
    if _is_nothing(mask_mod):
        return ()
    blocks = next(part for part in block_mask if isinstance(part, Tensor))
    return (_for_every_pair(mask_mod, None, (*blocks.shape[:2], *lengths), device, buffers),)


def _scores(query: Tensor, key: Tensor, score_mod: Modification, scale: float, buffers: tuple[Any, ...]) -> Tensor:
    """Return what the softmax receives, [B, H, Q, K], as the kernel makes it."""
    with undisturbed(query):
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        keys = key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.to(dtype) @ keys.transpose(-1, -2) * scale
        return _for_every_pair(score_mod, scores, tuple(scores.shape), scores.device, buffers)


def _for_every_pair(
    function: Modification,
    scores: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    buffers: tuple[Any, ...],
) -> Tensor:
    """Evaluate a function of (score,) batch, head, query and key, which is written for one pair."""

    def one(*given: Tensor) -> Tensor:
        return function(*given, *buffers)

    with torch.no_grad():
        positions = [torch.arange(size, device=device) for size in shape]
        given = positions if scores is None else [scores, *positions]
        for axis in (3, 2, 1, 0):
            dims = tuple(0 if i == axis else None for i in range(4))
            one = torch.vmap(one, in_dims=dims if scores is None else (0, *dims))
        with torch._C._EnableTorchFunction(), _Indexing():  # not enabled where we are unseen
            return one(*given)

"""Calls a user can put where nothing else sees the attention: custom kernels, and logits of any softmax."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attn_monitor.arguments import attention_call, check_output, check_tensor, softmax_call
from attn_monitor.capture.adapters import check_measurable
from attn_monitor.capture.sighting import Sighting, UnmeasurableError
from attn_monitor.phrases import error_line
from attn_monitor.unseen import unseen


class Watcher(Protocol):
    """Takes what the user shows. None of its methods may raise."""

    def observed(self, name: str, sighting: Sighting, out: Tensor | None) -> None:
        """Take a call under a name of the user's, with the kernel's output if that was shown."""

    def not_observed(self, name: str, reason: str) -> None:
        """Take note of a call that can't be measured."""


_watchers: list[Watcher] = []


class _Shown:
    """Counts the calls that users have shown."""

    calls = 0


def shown() -> int:
    """Return how many calls users have shown so far."""
    return _Shown.calls


def _show(name: str, sighting: Sighting, out: Tensor | None) -> None:
    _Shown.calls += 1
    for watcher in tuple(_watchers):
        watcher.observed(name, sighting, out)


def watch(watcher: Watcher) -> None:
    """Start to send what is observed to `watcher`."""
    if watcher not in _watchers:
        _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Stop to send to `watcher`."""
    if watcher in _watchers:
        _watchers.remove(watcher)


def _check_name(name: object, function: str, tensors: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"`name` expects a string, got {type(name).__name__}; the name of the record comes first: "
            f'{function}("name", {tensors})'
        )


def _refuse(name: object, function: str, error: Exception) -> None:
    """Tell every watcher why a call that was shown can't be measured."""
    said = isinstance(error, (UnmeasurableError, ValueError, TypeError))  # in our words, what others say needs a type
    for watcher in tuple(_watchers):
        watcher.not_observed(name if isinstance(name, str) else function, str(error) if said else error_line(error))


def observe_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    output: Tensor | None = None,
) -> None:
    """Show an attention that no one can see from outside: a custom kernel, an extension, a hand-written softmax.

    Does nothing when no probe or monitor is watching, and never raises for what it is given: what can't be
    measured is listed in `skipped` under the name.

    Args:
        name: The name of its record.
        query: [B, H, Q, D] or [H, Q, D].
        key: [B, G, K, D] or [G, K, D], G = H unless `enable_gqa`.
        value: [B, G, K, V]; not needed for the statistics.
        attn_mask: Broadcastable to [B, H, Q, K], as in `torch.nn.functional.scaled_dot_product_attention`: bool, True
            is kept; float, added.
        is_causal: Query i sees key j if j <= i.
        scale: Multiplies q.k, 1 / sqrt(D) by default.
        enable_gqa: H may be a multiple of G.
        softcap: Logits are softcap * tanh(scale * q.k / softcap).
        output: What the kernel returned, [B, H, Q, V] or [H, Q, V]. With it, and `value`, the gradients are measured,
            from the gradient that this tensor receives.

    Source: Vaswani et al. 2017, arXiv 1706.03762; for the softcap Gemma 2 2024, arXiv 2408.00118.

    Example:
        >>> import torch
        >>> from attn_monitor import AttentionProbe, observe_attention
        >>> class Kernel(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         out = torch.softmax(q @ k.mT, -1) @ v  # a kernel of your own
        ...         observe_attention("kernel", q, k, v, output=out)
        ...         return out
        >>> model, qkv = Kernel(), torch.randn(3, 2, 4, 5, 8)
        >>> with AttentionProbe(model) as probe:
        ...     _ = model(*qkv)
        >>> probe.compute()["kernel"].heads
        4
    """
    if not _watchers:
        return
    try:
        with unseen():
            _check_name(name, "observe_attention", "query, key")
            check_tensor("query", query)
            check_tensor("key", key)
            check_measurable(query, key)
            call = attention_call(
                query,
                key,
                value,
                attn_mask=attn_mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                softcap=softcap,
            )
            if output is not None:
                check_output(output, call, value)
            # Without the kernel's output nothing tells the gradient.
            differentiable = output is not None and torch.is_grad_enabled() and output.requires_grad
            sighting = Sighting(
                call=call,
                logits=None,
                canonical=lambda tensor: tensor if tensor.ndim == 4 else tensor[None],
                differentiable=differentiable,
                path="observed",
            )
    except Exception as error:
        _refuse(name, "observe_attention", error)
        return
    _show(name, sighting, output)


def observe_logits(name: str, logits: Tensor, dim: int = -1, head_dim: int | None = None) -> None:
    """Show the logits of a softmax that is not recognised as attention: contrastive, routing or written by hand.

    Entries of -inf, the dtype's smallest number and values <= -9.9e8 count as masked. The gradient of the logits is
    measured when they take one. Does nothing when no probe or monitor is watching, and never raises for what it is
    given: what can't be measured is listed in `skipped` under the name.

    Args:
        name: The name of its record.
        logits: What goes into the softmax; of four dimensions the second is the heads, else there is one head.
        dim: The axis of the softmax.
        head_dim: The length of the vectors whose products the logits are, for the saturation rule.

    Example:
        >>> import torch
        >>> from attn_monitor import AttentionProbe, observe_logits
        >>> class Contrastive(torch.nn.Module):
        ...     def forward(self, image, text):
        ...         logits = image @ text.T / 0.07
        ...         observe_logits("contrastive", logits, head_dim=image.shape[-1])
        ...         return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
        >>> model = Contrastive()
        >>> with AttentionProbe(model) as probe:
        ...     _ = model(torch.eye(5), torch.eye(5))
        >>> round(probe.compute()["contrastive"].logit_max.item(), 4)
        14.2857
    """
    if not _watchers:
        return
    try:
        with unseen():
            _check_name(name, "observe_logits", "logits")
            check_tensor("logits", logits)
            check_measurable(logits)
            call, canonical = softmax_call(logits, dim=dim, head_dim=head_dim)
            differentiable = torch.is_grad_enabled() and logits.requires_grad
            sighting = Sighting(
                call=call, logits=logits, canonical=canonical, differentiable=differentiable, path="observed"
            )
    except Exception as error:
        _refuse(name, "observe_logits", error)
        return
    _show(name, sighting, None)

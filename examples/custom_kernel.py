"""A kernel of your own that nobody can see into, shown to the monitor in one line.

    python examples/custom_kernel.py

The kernel stands for an extension in C++ or Triton: forward and backward by hand, and a softmax as `exp` and a sum.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from attn_monitor import AttentionProbe, observe_attention
from attn_monitor.functional import attention_statistics

WIDTH, HEADS, BATCH, LENGTH = 60, 3, 2, 17


class FastAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d_k)) v in a way no softmax is visible."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / query.shape[-1] ** 0.5).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        ctx.save_for_backward(query, key, value, weights)
        return weights @ value

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, weights = ctx.saved_tensors  # type: ignore[attr-defined]  # not in torch's hints
        of_weights = gradients[0] @ value.mT
        of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
        return of_logits @ key, of_logits.mT @ query, weights.mT @ gradients[0]


class Attention(nn.Module):
    """Multi-head attention with the kernel."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self.shown = shown
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        out: Tensor = FastAttention.apply(query, key, value)  # type: ignore[no-untyped-call]  # not in torch's hints
        if self.shown:
            # Does nothing when nobody watches. With `output=` the gradients at the softmax are measured too.
            observe_attention("fast", query, key, value, output=out)
        return out.transpose(1, 2).flatten(2)


def main() -> int:
    """Watch the kernel unseen and shown, and check the numbers against those of the tensors themselves."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH)

    hidden = Attention(shown=False)
    with AttentionProbe(hidden) as probe:
        hidden(x).square().sum().backward()
    print(f"not shown: {dict(probe.skipped)}")
    assert not probe.compute()

    shown = Attention(shown=True)
    with AttentionProbe(shown) as probe:
        shown(x).square().sum().backward()
    [(name, found)] = probe.compute().items()
    query, key, value = shown.heads(x)
    expected = attention_statistics(query, key)
    assert found.entropy_normalized is not None
    assert expected.entropy_normalized is not None
    assert found.grad_logits_norm is not None

    # The same gradient from logits that autograd knows.
    logits = (query @ key.mT / query.shape[-1] ** 0.5).detach().requires_grad_()
    (logits.softmax(-1) @ value.detach()).square().sum().backward()
    assert logits.grad is not None
    gradient = logits.grad.square().sum((0, 2, 3)).sqrt()
    print(f"{name}: entropy_normalized {found.entropy_normalized}, grad_logits_norm {found.grad_logits_norm}")
    assert float((found.entropy_normalized - expected.entropy_normalized).abs().max()) < 1e-6
    assert float((found.grad_logits_norm / gradient - 1).abs().max()) < 1e-5
    return 0


if __name__ == "__main__":
    sys.exit(main())

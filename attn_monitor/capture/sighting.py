"""What capture reports, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attn_monitor.records import AttentionCall
from attn_monitor.tensor_parallel import HeadShard


class UnmeasurableError(Exception):
    """Attention that was seen and can't be measured; the message is the reason the user reads.

    Example:
        >>> from attn_monitor.capture.sighting import UnmeasurableError
        >>> def read(q, k, v, block_table=None):  # an adapter
        ...     if block_table is not None:
        ...         raise UnmeasurableError("keys in pages (block_table) are not read")
        >>> read(None, None, None, block_table=[0])
        Traceback (most recent call last):
        attn_monitor.capture.sighting.UnmeasurableError: keys in pages (block_table) are not read
    """


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """An attention call and what its gradients need.

    Attributes:
        call: The call, detached.
        logits: The softmax input as the model has it; `None` where the softmax happens inside a kernel.
        canonical: Brings a gradient into canonical axes: that of the softmax input or output into [B, H, Q, K], that
            of a kernel's output into [B, H, Q, V].
        differentiable: Whether a gradient will flow through.
        note: What the user should know about the numbers.
        path: By what the attention is computed.
        make: Makes the call again; given where keeping it for the backward pass would cost memory.
        kept: Whether autograd keeps query and key as they are for the backward pass of a kernel: results of this
            forward pass, with no mask beside them, to which nothing has been written.
        shard: Which part of the heads it has, `None` where it has them all.
        placed: Whether that is known.
    """

    call: AttentionCall
    logits: Tensor | None
    canonical: Callable[[Tensor], Tensor]
    differentiable: bool
    note: str = ""
    path: str = ""
    make: Callable[[], AttentionCall] | None = None
    kept: bool = False
    shard: HeadShard | None = None
    placed: bool = False


class Sink(Protocol):
    """Takes the sightings. None of its methods may raise."""

    def before(self, sighting: Sighting) -> None:
        """Take a call that is about to run; a recomputation may get no further than this."""

    def after(self, sighting: Sighting, out: Tensor) -> None:
        """Take a call that has run, with its output (of a kernel) or its probabilities (of a softmax)."""

    def unmeasured(self, reason: str) -> None:
        """Take note of attention in the running module that can't be measured."""

    def lost(self, error: Exception) -> None:
        """Take note that scores in the running module can't be followed any further."""

    def failed(self, error: Exception) -> None:
        """Take note of an error of ours in the running module."""

    def broken(self, error: Exception) -> None:
        """Take note of an error of ours after which nothing that was seen can be trusted."""

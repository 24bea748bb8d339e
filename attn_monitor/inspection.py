"""What of a model will be watched: one look at it with a sample batch, before any training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attn_monitor.capture.naming import canonical_names
from attn_monitor.diagnosis import SAFE_SCALE, scale_slip
from attn_monitor.phrases import some
from attn_monitor.probe import AttentionProbe

_CHEAP = ("logit_max",)
"""Something has to be measured for a record to exist."""


@dataclass(frozen=True, slots=True)
class InspectedAttention:
    """One attention of a model, as it will be watched.

    Attributes:
        name: The name of its record, or of the module where `skipped` says why there is none.
        kind: The class of the module; empty for what the user shows.
        path: By what it is computed: `softmax` (in plain torch), `sdpa`, the name of a kernel, or `observed`.
        heads: The number of query heads.
        head_dim: D of query and key, where known.
        scale_ratio: The scale times sqrt(D), 1 for textbook attention; the smallest and the largest of the heads.
        keys: The largest number of keys.
        calls: How often it was called.
        note: What to know about its numbers.
        skipped: Why it is not measured; empty if it is.

    Source: Vaswani et al. 2017, arXiv 1706.03762, for the scale.

    Example:
        >>> import torch
        >>> from attn_monitor import inspect_attention
        >>> [found] = inspect_attention(torch.nn.TransformerDecoderLayer(8, 2).self_attn, *torch.ones(3, 5, 1, 8))
        >>> found.kind, found.scale_ratio, found.keys, found.calls
        ('MultiheadAttention', (1.0, 1.0), 5, 1)
    """

    name: str
    kind: str
    path: str = ""
    heads: int | None = None
    head_dim: int | None = None
    scale_ratio: tuple[float, float] | None = None
    keys: int | None = None
    calls: int = 0
    note: str = ""
    skipped: str = ""


def inspect_attention(model: nn.Module, *args: Any, **kwargs: Any) -> list[InspectedAttention]:
    """Run a model once and list the attention that will be watched, and what will not be and why.

    The model runs without gradients, in the mode that it is in; its buffers and the random state are what they were
    before.

    Args:
        model: Any module.
        *args: What the model is called with.
        **kwargs: Likewise.

    Returns:
        What is measured in the order of the forward pass, then what is not.

    Raises:
        TypeError: If `model` is no module.

    Example:
        >>> import torch
        >>> from attn_monitor import inspect_attention
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> [found] = inspect_attention(model, torch.ones(1, 5, 16))
        >>> found.name, found.path, found.heads, found.head_dim
        ('self_attn', 'sdpa', 2, 8)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect_attention expects a torch.nn.Module, got {type(model).__name__}.")
    probe = AttentionProbe(model, statistics=_CHEAP, gradients=False)
    with _unchanged(model, (args, kwargs)), torch.no_grad(), probe:
        model(*args, **kwargs)
    return [*_measured(probe), *_skipped(probe, model)]


def _measured(probe: AttentionProbe) -> Iterator[InspectedAttention]:
    for name, stats in probe.compute().items():
        owner = probe.owner(name)
        ratio = stats.scale_ratio
        yield InspectedAttention(
            name=name,
            kind="" if owner is None else type(owner).__name__,
            path=probe.paths.get(name, ""),
            heads=stats.heads,
            head_dim=stats.head_dim,
            scale_ratio=None if ratio is None else (float(ratio.min()), float(ratio.max())),
            keys=stats.keys,
            calls=stats.calls,
            note=probe.notes.get(name, ""),
        )


def _skipped(probe: AttentionProbe, model: nn.Module) -> Iterator[InspectedAttention]:
    names = canonical_names(model)
    modules = {name or type(module).__name__: module for module, name in names.items()}
    for name, reason in probe.skipped.items():
        kind = type(modules[name]).__name__ if name in modules else ""
        yield InspectedAttention(name=name, kind=kind, skipped=reason)


@contextmanager
def _unchanged(model: nn.Module, inputs: object) -> Iterator[None]:
    """Give the random state and the buffers back as they were; parameters do not change without gradients."""
    tensors = [*model.parameters(), *model.buffers(), *(leaf for leaf in tree_leaves(inputs) if _is_tensor(leaf))]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


_COLUMNS: Sequence[tuple[str, Callable[[InspectedAttention], str]]] = (
    ("name", lambda found: found.name),
    ("class", lambda found: found.kind or "-"),
    ("path", lambda found: found.path),
    ("heads", lambda found: str(found.heads)),
    ("head_dim", lambda found: "-" if found.head_dim is None else str(found.head_dim)),
    ("scale*sqrt(d)", lambda found: _ratio(found.scale_ratio)),
    ("keys", lambda found: str(found.keys)),
)


_EXPLANATION = (
    "path: how it is computed, `softmax` in plain torch, `observed` if shown by you, else the fused kernel; "
    "scale*sqrt(d): 1 for the scale 1/sqrt(d_k); keys: the most of any call"
)
_LISTED = 3


def inspection_table(found: Sequence[InspectedAttention]) -> str:
    """Return what `inspect_attention` found as lines of text.

    Example:
        >>> found = InspectedAttention("attn", "Attention", "sdpa", 2, 8, (1.0, 1.0), 5, 1)
        >>> print(inspection_table([found]))  # doctest: +ELLIPSIS
        name  class      path  heads  head_dim  scale*sqrt(d)  keys
        attn  Attention  sdpa  2      8         1              5
        <BLANKLINE>
        path: how it is computed, ...
    """
    measured = [one for one in found if not one.skipped]
    lines: list[str] = []
    if measured:
        rows = [[title for title, _ in _COLUMNS], *([cell(one) for _, cell in _COLUMNS] for one in measured)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines += [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += ["", _EXPLANATION]
    lines += _scale_remarks(measured)
    lines += [f"{one.name}: {one.note}" for one in measured if one.note]
    skipped = [one for one in found if one.skipped]
    if skipped:
        lines += ["", "not measured:"] if lines else ["not measured:"]
        lines += [f"  {one.name}{f' ({one.kind})' if one.kind else ''}: {one.skipped}" for one in skipped]
    return "\n".join(lines)


def _scale_remarks(measured: Sequence[InspectedAttention]) -> list[str]:
    """Return a line for each unusual scale, with the layers that have it: remarks, as it may be meant."""
    layers: dict[str, list[str]] = {}
    for one in measured:
        if one.scale_ratio is not None and (remark := _scale_remark(one.scale_ratio, one)):
            layers.setdefault(remark, []).append(one.name)
    return [f"{some(names, _LISTED)}: {remark}" for remark, names in layers.items()]


def _scale_remark(ratio: tuple[float, float], one: InspectedAttention) -> str:
    low, high = sorted(abs(value) for value in ratio)
    if not (low < SAFE_SCALE[0] or high > SAFE_SCALE[1]):
        return ""
    slips = {scale_slip(value, one.head_dim, one.heads or 1) for value in (low, high)}
    guess = f"perhaps {slips.pop()}, " if len(slips) == 1 and "" not in slips else ""
    return f"the scale is {_ratio(ratio)} x 1/sqrt(d_k): {guess}fine if the design wants it so"


def _ratio(ratio: tuple[float, float] | None) -> str:
    if ratio is None:
        return "-"
    low, high = (f"{value:.3g}" for value in ratio)
    return low if low == high else f"{low}..{high}"

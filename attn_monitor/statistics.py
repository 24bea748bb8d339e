"""From one attention call to its rows, in tiles, and to its sums.

Axes: B batch, H query heads, G key heads, Q queries, K keys, V value dimension. Tiles are float32 (float64 for float64
inputs); what is pooled over rows is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_monitor.allowed import EntryBits, QualifyingEntries, VisibleKeys, first_visible, visible_keys
from attn_monitor.gradients import check_gradient
from attn_monitor.passes import Note, Wanted, fill_rows
from attn_monitor.pooling import LayerRows, pooled
from attn_monitor.records import AttentionCall
from attn_monitor.rows import RowValues
from attn_monitor.sizes import KeySquares
from attn_monitor.sums import AttentionSums, LayerFacts
from attn_monitor.tiles import TiledCall, undisturbed
from attn_monitor.workspace import Workspaces


def attention_sums(
    call: AttentionCall,
    statistics: frozenset[str],
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    grad_output: Tensor | None = None,
    spaces: Workspaces | None = None,
) -> AttentionSums:
    """Return the sums of one attention call; the arguments are those of `attention_rows`."""
    rows = attention_rows(call, statistics, max_queries, generator, grad_output=grad_output, spaces=spaces)
    with undisturbed(call.query if call.logits is None else call.logits):
        return pooled([rows])[0]


def attention_rows(
    call: AttentionCall,
    statistics: frozenset[str],
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    grad_output: Tensor | None = None,
    spaces: Workspaces | None = None,
) -> LayerRows:
    """Return the rows of one attention call, from which `pooled` makes sums, without waiting for its device.

    Args:
        call: The call; it is not modified.
        statistics: Names of the catalog; what is not chosen is not computed.
        max_queries: Look at so many random rows at most. All statistics are estimates then, and there are no extrema.
        generator: For the choice of rows, on the CPU; the same rows each time without one.
        grad_output: The gradient of the output of a fused kernel, [B, H, Q, V]: with it, and with the call's value, the
            statistics of gradients are measured as well, for less than what measuring them alone costs.
        spaces: Memory to compute in, if there is some already.

    Raises:
        ValueError: If the call has no value for the gradient, or the gradient does not fit the call.
    """
    if grad_output is not None:
        check_gradient(call, grad_output)
    spaces = spaces or Workspaces()
    with undisturbed(call.query if call.logits is None else call.logits):
        return spaces.fitting(
            lambda shrink: _rows(
                TiledCall.of(call, shrink).at_most(max_queries, generator), statistics, grad_output, spaces
            )
        )


def softmax_rows(
    call: AttentionCall,
    statistics: frozenset[str],
    max_queries: int | None = None,
    generator: torch.Generator | None = None,
    *,
    spaces: Workspaces | None = None,
) -> tuple[LayerRows, QualifyingEntries]:
    """Return the rows of one attention call, and the entries that its gradients will need: in one look.

    Args:
        call: The call.
        statistics: Names of the catalog.
        max_queries: Look at so many random rows at most.
        generator: For the choice of rows, on the CPU.
        spaces: Memory to compute in, if there is some already.
    """
    spaces = spaces or Workspaces()

    def compute(shrink: int) -> tuple[LayerRows, QualifyingEntries]:
        tiled = TiledCall.of(call, shrink).at_most(max_queries, generator)
        bits = EntryBits(tiled)
        layer = _rows(tiled, statistics, None, spaces, bits)
        return layer, bits.entries(layer.rows, tiled, call.shape)

    with undisturbed(call.query if call.logits is None else call.logits):
        return spaces.fitting(compute)


def _rows(
    tiled: TiledCall,
    statistics: frozenset[str],
    grad_output: Tensor | None,
    spaces: Workspaces,
    bits: EntryBits | None = None,
) -> LayerRows:
    sampled = tiled.index is not None
    wanted = Wanted.by(tiled.call, statistics, sampled=sampled, gradients=grad_output is not None)
    rows = RowValues(wanted.names(), tiled.call.shape, tiled.device, tiled.dtype, tiled.weights)
    keys_seen = wanted.keys or wanted.first_key
    visible = visible_keys(tiled) if keys_seen else None
    gathered = VisibleKeys(tiled) if keys_seen and visible is None else None
    notes: list[Note] = [] if bits is None else [bits.note]
    if gathered is not None and wanted.first_key:  # which must be known before anything is summed, of all rows
        whole = tiled.whole or tiled
        for items, heads, part in whole.parts():
            for tile in part.tiles():
                gathered.note(items, heads, tile, part.blocked(tile, spaces.at(tiled.device, tiled.dtype)))
        visible = gathered.keys()
    elif gathered is not None:
        notes.append(gathered.note)
    first = first_visible(visible, tiled.call.layers) if visible is not None and wanted.first_key else None
    squares = KeySquares(tiled) if wanted.keys else None
    fill_rows(rows, tiled, wanted, spaces, first=first, squares=squares, grad_output=grad_output, notes=notes)
    estimated = visible is None  # then the sample tells which keys are seen
    visible = gathered.keys() if visible is None and gathered is not None else visible
    keys = torch.zeros((2, tiled.call.shape.heads), device=tiled.device, dtype=rows.dtype)
    if visible is not None and squares is not None:
        keys = squares.sums(visible)
    exact = frozenset() if estimated else frozenset({"k_rms"})
    facts = LayerFacts(
        measured=wanted.measured,
        approximate=wanted.measured - exact if sampled else frozenset(),
        head_dim=tiled.call.head_dim if tiled.call.query is None else tiled.call.query.shape[-1],
        keys=tiled.call.shape.keys,
        calls=1,
    )
    return LayerRows.of(rows, tiled, wanted, keys, facts)

"""The passes over one tile: from logits to the values of its rows, forward and backward.

Axes: B batch, H query heads, G key heads, Q queries, K keys, V value dimension; b batch items, t rows and k columns of
a tile. A tile is overwritten many times, in three pieces of memory: each pass says what it leaves where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from attn_monitor import crew
from attn_monitor.catalog import GRADIENTS
from attn_monitor.masking import Blocked
from attn_monitor.precision import known_below, known_finite, row_norms
from attn_monitor.records import AttentionCall
from attn_monitor.relative import RelativeRows
from attn_monitor.rows import RowValues
from attn_monitor.sizes import KeySquares, finite_squares
from attn_monitor.sums import state_dtype
from attn_monitor.tiles import Tile, TiledCall, multiply_heads
from attn_monitor.workspace import Workspace, Workspaces

Note: TypeAlias = Callable[[slice, slice, Tile, Blocked], None]
"""Takes batch items, heads, the tile, and what is blocked in it."""
_SHARP = 0.5
"""Rows whose likeliest key has no more leave enough to the others that nothing is lost by subtracting it."""
_EXTREMA = frozenset({"logit_max", "logit_min"})
_PROBABILITIES = frozenset(
    {"entropy", "entropy_normalized", "max_probability", "sink_mass", "jacobian_trace", "jacobian_norm"}
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which parts of the work the chosen statistics need."""

    measured: frozenset[str]
    moments: bool
    qk_apart: bool
    qk_alike: bool
    smallest: bool
    probabilities: bool
    entropy: bool
    squares: bool
    queries: bool
    keys: bool
    first_key: bool
    cubes: bool
    gradients: bool

    @classmethod
    def by(cls, call: AttentionCall, statistics: frozenset[str], *, sampled: bool, gradients: bool) -> Wanted:
        """Return what a call needs.

        Args:
            call: The call.
            statistics: The chosen ones.
            sampled: Whether only some rows are looked at: then there are no extrema.
            gradients: Whether the gradient of the output is there.
        """
        measured = statistics - GRADIENTS - (_EXTREMA if sampled else frozenset())
        products = call.query is not None and call.key is not None
        if not products:
            measured -= {"q_rms", "k_rms"}
        if not products or call.scale is None:
            measured -= {"alignment"} if call.plain and call.logits is not None else {"alignment", "qk_std"}
        qk = bool(measured & {"qk_std", "alignment"})
        changed = not call.plain if call.logits is not None else _reshapes_products(call)
        return cls(
            measured=measured,
            moments=bool(measured & {"logit_mean", "logit_std", "logit_row_std", "critical_ratio"})
            or (qk and not changed),
            qk_apart=qk and changed,
            qk_alike=qk and not changed,
            smallest="logit_min" in measured,
            probabilities=bool(measured & _PROBABILITIES),
            entropy=bool(measured & {"entropy", "entropy_normalized"}),
            squares=bool(measured & {"jacobian_trace", "jacobian_norm"}),
            queries=bool(measured & {"q_rms", "alignment"}),
            keys=bool(measured & {"k_rms", "alignment"}),
            first_key="sink_mass" in measured,
            cubes="jacobian_norm" in measured,
            gradients=gradients,
        )

    def names(self) -> list[str]:
        """Return the names of the row values that are filled in."""
        moments = ("shift", "rest", "spread")
        parts: dict[str, bool] = {
            **dict.fromkeys(("allowed", "nonfinite", "largest"), True),
            "smallest": self.smallest,
            **dict.fromkeys(moments, self.moments),
            **dict.fromkeys([f"qk_{name}" for name in ("nonfinite", "largest", *moments)], self.qk_apart),
            **dict.fromkeys(("q_n", "q_sq"), self.queries),
            **dict.fromkeys(("top", "ties", "rest1"), self.probabilities),
            "weighted": self.entropy,
            "rest2": self.squares,
            "rest3": self.cubes,
            "first": self.first_key,
            **dict.fromkeys(("grad_size", "grad_logits", "grad_probs"), self.gradients),
        }
        return [name for name, wanted in parts.items() if wanted]


def _reshapes_products(call: AttentionCall) -> bool:
    return call.softcap is not None or any(mask.is_floating_point() for mask in call.masks)


def fill_rows(
    rows: RowValues,
    tiled: TiledCall,
    wanted: Wanted,
    spaces: Workspaces,
    *,
    first: Tensor | None = None,
    squares: KeySquares | None = None,
    grad_output: Tensor | None = None,
    notes: Sequence[Note] = (),
) -> None:
    """Fill in the values of all rows of a call, tile by tile.

    Args:
        rows: Where they go.
        tiled: The call.
        wanted: What is wanted of them.
        spaces: Where to compute.
        first: The first visible key of each batch item, [B, 1] or [B, H].
        squares: Where the sizes of the keys go.
        grad_output: The gradient of the output, [B, H, Q, V], with all rows of the call.
        notes: Who else wants to know what is blocked in each tile.
    """
    if grad_output is not None and tiled.index is not None:
        grad_output = grad_output.index_select(2, tiled.index)

    def look(items: slice, heads: slice, part: TiledCall, tile: Tile) -> None:
        work = spaces.at(tiled.device, tiled.dtype)
        grad = None if grad_output is None else grad_output[items, heads, tile.rows]
        first_bH = None if first is None else first[items, heads if first.shape[1] > 1 else slice(None)]
        blocked = part.blocked(tile, work)
        _look(part, tile, blocked, wanted, work, rows.window(items, heads, tile.rows), first_bH, grad)
        for note in notes:
            note(items, heads, tile, blocked)

    def jobs() -> Iterator[crew.Job]:
        for items, heads, part in tiled.parts(values=grad_output is not None):
            if wanted.queries or squares is not None:
                yield partial(_sizes, tiled, rows if wanted.queries else None, squares, items, heads, part)
            for tile in part.tiles():
                yield partial(look, items, heads, part, tile)

    crew.run(jobs(), tiled.workers)


def _sizes(
    tiled: TiledCall, rows: RowValues | None, squares: KeySquares | None, items: slice, heads: slice, part: TiledCall
) -> None:
    """Fill in the sizes of the queries and keys of a part."""
    if rows is not None and tiled.call.query is not None:
        every_row = rows.window(items, heads, slice(None))
        sizes = finite_squares(tiled.call.query[items, heads].to(tiled.dtype))
        for name, values in zip(("q_n", "q_sq"), sizes, strict=True):
            every_row[name].copy_(values)
    if squares is not None and part.call.key is not None:
        squares.put(items, tiled.key_heads(heads), part.call.key)


def _look(
    part: TiledCall,
    tile: Tile,
    blocked: Blocked,
    wanted: Wanted,
    work: Workspace,
    out: Mapping[str, Tensor],
    first: Tensor | None,
    grad_output: Tensor | None,
) -> None:
    """Fill in the values of the rows of one tile, views [b, H, t] by the names of `RowValues`."""
    blocked.fill_allowed(out["allowed"])
    product = part.product(tile, work) if part.call.logits is None or wanted.qk_apart else None
    if wanted.qk_apart:
        assert product is not None, "chosen only where the product is known"
        apart = RelativeRows.of(work.second(product).copy_(product), blocked, work, out, "qk_")
        apart.moments(work.take(4, product.shape), out, "qk_")
    rows = RelativeRows.of(part.logits(tile, work, product), blocked, work, out)
    if wanted.moments:
        rows.moments(work.second(rows.gaps), out)
    if not (wanted.probabilities or wanted.gradients):
        return
    # The softmax of torch is faster than its exp.
    probs = torch._softmax(rows.gaps, -1, False, out=work.second(rows.gaps))
    if wanted.probabilities:
        _probabilities(rows.gaps, probs, first, work, out)
    if grad_output is not None:
        value = part.call.value
        assert value is not None, "checked by the caller"
        _gradients(probs, rows.largest, blocked, grad_output, value, part.call.sinks, work, out)


def _probabilities(
    gaps: Tensor, probs: Tensor, first: Tensor | None, work: Workspace, out: Mapping[str, Tensor]
) -> None:
    """Write what the probabilities of each row are made of; the relative logits are overwritten.

    The maximal keys are set aside, and p, p^2, p^3 are summed over the rest: nothing cancels later, however close to
    one-hot the row is.
    """
    torch.amax(probs, -1, out=out["top"])
    if "weighted" in out:
        torch.sum(torch.mul(probs, gaps, out=work.third(gaps)), -1, out=out["weighted"])
    if first is not None:
        out["first"].copy_(_at_first_key(probs, first))
    if known_below(out["top"], _SHARP):
        _spread_probabilities(probs, work, out)
        return
    below = gaps.sign_()  # -1 below the row maximum, 0 at it
    torch.sum(below, -1, out=out["ties"]).add_(gaps.shape[-1])
    rest = torch.mul(probs, below, out=work.third(gaps))
    torch.sum(rest, -1, out=out["rest1"])
    if "rest2" in out:
        torch.linalg.vector_norm(rest, dim=-1, out=out["rest2"])
    if "rest3" in out:
        torch.sum(torch.mul(rest, rest, out=gaps).mul_(rest), -1, out=out["rest3"])


def _spread_probabilities(probs: Tensor, work: Workspace, out: Mapping[str, Tensor]) -> None:
    """Write the same for rows of which none is near one-hot: subtracting the likeliest key cancels nothing there."""
    top = out["top"]
    out["ties"].fill_(1)
    torch.sub(top, 1, out=out["rest1"])
    if "rest2" in out:
        norms = torch.linalg.vector_norm(probs, dim=-1)
        out["rest2"].copy_((norms.square_() - top.square()).clamp_(min=0).sqrt_())
    if "rest3" in out:
        cubes = torch.mul(probs, probs, out=work.third(probs)).mul_(probs).sum(-1)
        torch.sub(top.pow(3), cubes, out=out["rest3"])


def _at_first_key(probs_bHtk: Tensor, first_bH: Tensor) -> Tensor:
    """Return the entries of each batch item's first visible key, 0 where it lies beyond the tile's columns."""
    columns = probs_bHtk.shape[-1]
    inside = first_bH < columns
    index = first_bH.clamp(max=columns - 1)[:, :, None, None].expand(*probs_bHtk.shape[:3], 1)
    return probs_bHtk.gather(-1, index)[..., 0] * inside[:, :, None]


def _gradients(
    probs: Tensor,
    largest: Tensor,
    blocked: Blocked,
    grad_output: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    work: Workspace,
    out: Mapping[str, Tensor],
) -> None:
    """Write the norms of dP = dO V^T and dS = P (dP - rowsum(P dP)); the probabilities are overwritten."""
    sink_prob = _make_room(probs, largest, sinks)
    # Each row relative to its largest entry, so that the square of 1e-25 is not 0.
    grad_output = grad_output.to(probs.dtype)
    size = torch.amax(grad_output.abs(), -1, out=out["grad_size"])
    size.masked_fill_(size == 0, 1)
    grad_probs = multiply_heads(grad_output / size[..., None], value, probs.shape[-1], work)
    # A value of a padded key may be anything, and must not enter through 0 * nan.
    if known_finite(grad_probs.sum(-1)):
        blocked.zero_(grad_probs)
    else:
        blocked.zero_any_(grad_probs)
    row_norms(grad_probs, out["grad_probs"])
    row_norms(_softmax_backward(probs, grad_probs, sink_prob, work), out["grad_logits"])


def _make_room(probs_bHtk: Tensor, largest_bHt: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Scale probabilities down, in place, for a learned sink that joins the outcomes, and return its probability."""
    if sinks is None:
        return None
    dtype = state_dtype(probs_bHtk.device)
    # With e relative to the likeliest key, the keys sum to 1 / max p.
    keys = largest_bHt.to(dtype) - probs_bHtk.amax(-1).to(dtype).log()
    sink = sinks.detach().to(dtype)[:, None]
    probs_bHtk.mul_(torch.sigmoid(keys - sink).to(probs_bHtk.dtype)[..., None])
    return torch.sigmoid(sink - keys).to(probs_bHtk.dtype)


def _softmax_backward(
    probs_bHtk: Tensor, grad_probs_bHtk: Tensor, sink_prob_bHt: Tensor | None, work: Workspace
) -> Tensor:
    """Return P (dP - sum P dP); both inputs are overwritten.

    In a saturated row dP of the likeliest key almost equals the sum, and their difference is all rounding. A second
    pass over the differences brings back what the first one lost.
    """
    scratch = work.third(probs_bHtk)
    mean = torch.mul(probs_bHtk, grad_probs_bHtk, out=scratch).sum(-1)
    grad_probs_bHtk.sub_(mean[..., None])
    if sink_prob_bHt is None:
        return torch._softmax_backward_data(grad_probs_bHtk, probs_bHtk, -1, probs_bHtk.dtype, grad_input=scratch)
    # The sink has no value, so its dP is 0, less what was taken.
    rest = torch.mul(probs_bHtk, grad_probs_bHtk, out=scratch).sum(-1) - sink_prob_bHt * mean
    return grad_probs_bHtk.sub_(rest[..., None]).mul_(probs_bHtk)

"""Per-head numbers as colours: one palette of 8-bit indices, and which colour a number has.

The maps can be told apart with every kind of colour blindness: viridis, whose lightness grows from end to end, and for
the saturation ratio blue below the limit and orange above it, lightness growing through both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attn_monitor.scales import RATIO, Scale, scale_of

Color = tuple[int, int, int]

PAPER, INK, UNKNOWN, FRAME = range(4)
"""Indices of the background, of text and lines, of a value that is not known, and of the inner line of a frame."""
_FIXED: tuple[Color, ...] = ((255, 255, 255), (0, 0, 0), (150, 150, 150), (255, 255, 255))
_STEPS = 64
_FIRST = len(_FIXED)

_VIRIDIS: tuple[Color, ...] = (
    (68, 1, 84),
    (71, 45, 123),
    (59, 82, 139),
    (44, 114, 142),
    (33, 145, 140),
    (40, 174, 128),
    (94, 201, 98),
    (173, 220, 48),
    (253, 231, 37),
)
_BELOW: tuple[Color, ...] = ((8, 29, 88), (34, 84, 160), (66, 120, 180))
_ABOVE: tuple[Color, ...] = ((222, 105, 8), (252, 166, 54), (255, 245, 190))


def _ramp(anchors: Sequence[Color], steps: int) -> NDArray[np.uint8]:
    """Return colours at equal distances along the anchors, [steps, 3]."""
    places = np.linspace(0, len(anchors) - 1, steps)
    channels = np.array(anchors, dtype=np.float64).T
    mixed = [np.interp(places, np.arange(len(anchors)), channel) for channel in channels]
    return np.stack(mixed, axis=1).round().astype(np.uint8)


PALETTE: NDArray[np.uint8] = np.concatenate(
    [
        np.array(_FIXED, dtype=np.uint8),
        _ramp(_VIRIDIS, _STEPS),
        _ramp(_BELOW, _STEPS // 2),
        _ramp(_ABOVE, _STEPS // 2),
    ]
)
"""Every colour of a picture by index, [colours, 3]."""


def positions(scale: Scale, values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return where values stand on a scale, 0 to 1; nan stays nan."""
    bounded = np.clip(values.astype(np.float64), scale.low, scale.high)
    low, high = _stretched(scale, np.array([scale.low, scale.high]))
    found: NDArray[np.float64] = (_stretched(scale, bounded) - low) / (high - low)
    return found


def _stretched(scale: Scale, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if scale.kind == "log":
        return np.log(values)
    return np.arcsinh(values) if scale.kind == "signed" else values


def color_indices(
    statistic: str, values: NDArray[np.floating], limit: float | NDArray[np.floating] | None = None
) -> NDArray[np.uint8]:
    """Return the palette index of every value, `UNKNOWN` for nan.

    Args:
        statistic: Chooses the scale.
        values: Of any shape.
        limit: Where the map of the saturation ratio breaks, for all or for each value; without one it does not.
    """
    scale = scale_of(statistic)
    found = positions(scale, values)
    known = ~np.isnan(found)
    if statistic == RATIO and limit is not None:
        half = _STEPS // 2
        limits = np.broadcast_to(np.asarray(limit, dtype=np.float64), found.shape)
        break_at = np.clip(np.nan_to_num(positions(scale, limits), nan=1.0), 1e-6, 1 - 1e-6)
        with np.errstate(invalid="ignore"):
            above = (
                values > limits
            )  # not by position: what is at the limit is not above it, beyond both ends of the scale too
        low = np.clip(found / break_at, 0, 1) * half
        high = np.clip((found - break_at) / (1 - break_at), 0, 1) * half
        steps = np.where(above, _STEPS + half + np.minimum(high, half - 1), _STEPS + np.minimum(low, half - 1))
    else:
        steps = np.minimum(found * _STEPS, _STEPS - 1)
    return np.where(known, _FIRST + np.where(known, steps, 0.0), UNKNOWN).astype(np.uint8)

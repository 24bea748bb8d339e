"""A table of heads as a small, sharp picture: cells with axes, a legend and frames around the heads above the limit."""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attn_monitor.catalog import STATISTICS
from attn_monitor.dashboards.colors import FRAME, INK, PALETTE, PAPER, color_indices
from attn_monitor.dashboards.tables import Snapshot
from attn_monitor.scales import RATIO, Scale, scale_of
from attn_monitor.tags import direction

MAX_SIDE = 1024
"""No picture is larger, whatever the model."""
_LEFT, _TOP, _BOTTOM, _RIGHT = 30, 44, 34, 12
_MIN_WIDTH = 240
_MAP_SIDE = 640
_LARGEST_CELL = 16
_GAP_FROM = 5
"""From this size on cells have a line around them, and heads above the limit a frame."""
_BAR_HEIGHT = 8


class Picture(NamedTuple):
    """A picture in the indices of the palette.

    Attributes:
        indices: [height, width].
        cell: The pixels of a cell's side.
        left: Where the first column starts.
        top: Where the first row starts.
    """

    indices: NDArray[np.uint8]
    cell: int
    left: int = _LEFT
    top: int = _TOP

    def rgb(self) -> NDArray[np.uint8]:
        """Return the picture as [height, width, 3]."""
        return PALETTE[self.indices]

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        return encode_png(self.indices)


def draw(name: str, snapshot: Snapshot, limit: float) -> Picture:
    """Return the picture of one per-head number.

    Layers and heads beyond what fits are drawn several to a cell, which shows the worst of them.

    Args:
        name: The number.
        snapshot: Has its table.
        limit: The rule's limit, which the legend shows.
    """
    table = snapshot.tables[name]
    missing = np.arange(table.shape[1]) >= np.array(snapshot.heads)[:, None]
    above = snapshot.above
    down = name in STATISTICS and STATISTICS[name].worse == "down"
    limits = np.broadcast_to(snapshot.limits[:, None], table.shape)
    most_rows, most_columns = MAX_SIDE - _TOP - _BOTTOM, MAX_SIDE - _LEFT - _RIGHT
    by_row, by_column = (
        max(1, math.ceil(n / most)) for n, most in zip(table.shape, (most_rows, most_columns), strict=True)
    )
    if by_row > 1 or by_column > 1:
        table = _pooled(table, by_row, by_column, np.fmin if down else np.fmax)
        limits = _pooled(limits, by_row, by_column, np.fmin)
        missing = _pooled(missing, by_row, by_column, np.logical_and)
        above = _pooled(above, by_row, by_column, np.logical_or)
    colors = np.where(missing, np.uint8(PAPER), color_indices(name, table, limits))
    rows, columns = table.shape
    cell = max(1, min(_LARGEST_CELL, _MAP_SIDE // max(rows, columns, 1)))
    indices = _frame_of(name, (rows, columns), (by_row, by_column), cell, limit).copy()
    body = np.repeat(np.repeat(colors, cell, axis=0), cell, axis=1)
    if cell >= _GAP_FROM:
        _draw_lines(body.reshape(rows, cell, columns, cell), above)
    indices[_TOP : _TOP + rows * cell, _LEFT : _LEFT + columns * cell] = body
    return Picture(indices, cell)


def _draw_lines(pixels: NDArray[np.uint8], above: NDArray[np.bool_]) -> None:
    """Draw a line between cells, and a double one around those that are marked.

    Args:
        pixels: [rows, y, columns, x].
        above: The marked cells, [rows, columns].
    """
    pixels[:, 0], pixels[..., 0] = PAPER, PAPER
    for inset, color in ((0, INK), (1, FRAME)):
        line = slice(inset, pixels.shape[1] - inset)
        for edge in (inset, -1 - inset):
            pixels[:, edge][above, line] = color
            pixels[..., edge].transpose(0, 2, 1)[above, line] = color


def encode_png(indices: NDArray[np.uint8]) -> bytes:
    """Return palette indices [height, width] as a PNG file.

    Written here since the pictures of a step must cost milliseconds: a palette needs a third of the bytes of RGB, and a
    line that repeats the one above is all zeros.
    """
    height, width = indices.shape
    lines = np.zeros((height, 1 + width), dtype=np.uint8)
    repeats = np.zeros(height, dtype=bool)
    repeats[1:] = (indices[1:] == indices[:-1]).all(axis=1)
    lines[repeats, 0] = 2  # the filter "up", the difference to the line above; the others have none
    lines[~repeats, 1:] = indices[~repeats]
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    content = zlib.compress(lines.data, 1)  # 6 makes it a third smaller and takes three times as long
    parts = ((b"IHDR", header), (b"PLTE", PALETTE.tobytes()), (b"IDAT", content), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _pooled(table: NDArray[Any], by_row: int, by_column: int, worst: np.ufunc) -> NDArray[Any]:
    """Return the worst of each block of rows and columns."""
    for axis, size in enumerate((by_row, by_column)):
        table = worst.reduceat(table, np.arange(0, table.shape[axis], size), axis=axis)
    return table


@lru_cache(maxsize=64)
def _frame_of(name: str, shape: tuple[int, int], blocks: tuple[int, int], cell: int, limit: float) -> NDArray[np.uint8]:
    """Return everything of a picture but the cells."""
    from PIL import Image, ImageDraw, ImageFont  # comes with tensorboard, which a monitor can do without

    rows, columns = shape
    width = max(_MIN_WIDTH, _LEFT + columns * cell + _RIGHT)
    height = _TOP + rows * cell + _BOTTOM
    sheet = Image.new("1", (width, height), 0)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=10)

    def write(x: float, y: float, text: str, anchor: str) -> None:
        reach = pen.textlength(text, font=font)
        x = min(max(x, reach / 2), width - 1 - reach / 2) if anchor[0] == "m" else x
        pen.text((x, y), text, fill=1, font=font, anchor=anchor)

    row = STATISTICS.get(name)
    unit = f" [{row.unit}]" if row is not None and row.unit else ""
    packed = f", {blocks[0]} x {blocks[1]} heads a cell" if blocks != (1, 1) else ""
    write(2, 1, f"{name}{unit}, {direction(name)}{packed}", "la")
    write(0, _TOP - (3 if cell > 7 else 8), "layer", "ls")  # the number of a thin first row reaches above it
    write(_LEFT, _TOP - 15, "head", "ls")
    every = _tick_distance(rows, cell, 11)
    for index in range(0, rows, every):
        write(_LEFT - 3, _TOP + index * cell + cell / 2, str(index * blocks[0]), "rm")
    every = _tick_distance(columns, cell, 20)
    for index in range(0, columns, every):
        write(_LEFT + index * cell + cell / 2, _TOP - 3, str(index * blocks[1]), "ms")
    scale = scale_of(name)
    left, right, top = _LEFT, width - _RIGHT, _TOP + rows * cell + 8
    marks = _marks(scale, limit if name == RATIO else None)
    for mark in marks:
        x = left + scale.position(mark) * (right - 1 - left)
        pen.line([(x, top + _BAR_HEIGHT), (x, top + _BAR_HEIGHT + 2)], fill=1)
        write(x, top + _BAR_HEIGHT + 3, f"limit {mark:g}" if name == RATIO and mark == limit else f"{mark:g}", "ma")
    indices = np.where(np.asarray(sheet), np.uint8(INK), np.uint8(PAPER))
    values = np.array([scale.value(place) for place in np.linspace(0, 1, right - left)])
    indices[top : top + _BAR_HEIGHT, left:right] = color_indices(name, values, limit)
    return indices


def _tick_distance(count: int, cell: int, room: int) -> int:
    """Return every how many cells there is room for a number."""
    for distance in (1, 2, 5, 10, 20, 50, 100, 200):
        if distance * cell >= room:
            return distance
    return max(count, 1)


def _marks(scale: Scale, limit: float | None) -> list[float]:
    """Return the values that the legend names: both ends, and the limit or the middle."""
    middle = scale.value(0.5) if limit is None else limit
    middle = float(f"{middle:.1g}") if limit is None else middle
    near = [end for end in (scale.low, scale.high) if abs(scale.position(end) - scale.position(middle)) < 0.25]
    return [*(end for end in (scale.low, scale.high) if end not in near), middle]

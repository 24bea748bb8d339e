"""CRC-32C of the records of event files, fast for the large ones.

A CRC is linear: that of `a + b` follows from those of `a` and `b` by shifting the first over the length of the second.
So the words of a record are combined in pairs, then pairs of pairs, each level with a few numpy operations.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_SHORT = 256
"""Up to so many bytes a loop in Python is faster."""

_Words = NDArray[np.uint32]


def masked_crc32c(data: bytes) -> int:
    """Return the checksum that stands behind `data` in an event file.

    Example:
        >>> hex(crc32c(b"123456789")), hex(masked_crc32c(b"123456789"))
        ('0xe3069283', '0xc78ab0e5')
    """
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of `data`."""
    return _bytewise(data) if len(data) <= _SHORT else _pairwise(data)


def _bytewise(data: bytes) -> int:
    table = _byte_table()
    crc = _ONES
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ _ONES


def _pairwise(data: bytes) -> int:
    """Pad with zeros in front, which change nothing once the initial ones are part of the data."""
    words = np.zeros((len(data) + 3) // 4, "<u4")
    padded = words.view(np.uint8)
    start = len(padded) - len(data)
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start : start + 4] ^= 0xFF
    level = 0
    while len(words) > 1:
        if len(words) % 2:
            words = np.concatenate([np.zeros(1, np.uint32), words])
        words = _shift(words[::2], level) ^ words[1::2]
        level += 1
    return int(_shift(words, 0)[0]) ^ _ONES


def _shift(states: _Words, level: int) -> _Words:
    """Return what 4 * 2^level zero bytes make of each state."""
    low, high = _shift_tables(level)
    shifted: _Words = low[states & 0xFFFF] ^ high[states >> 16]
    return shifted


@cache
def _shift_tables(level: int) -> tuple[_Words, _Words]:
    """Return the shift of every lower and of every upper half of a state."""
    if level:
        low, high = _shift_tables(level - 1)
        return _shift(low, level - 1), _shift(high, level - 1)
    halves = np.arange(1 << 16, dtype=np.uint32)
    return _shift_bits(halves, 32), _shift_bits(halves << np.uint32(16), 32)


@cache
def _byte_table() -> list[int]:
    table: list[int] = _shift_bits(np.arange(256, dtype=np.uint32), 8).tolist()
    return table


def _shift_bits(states: _Words, bits: int) -> _Words:
    for _ in range(bits):
        states = (states >> np.uint32(1)) ^ (states & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return states

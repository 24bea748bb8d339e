"""The records of TensorBoard's event files: read fast, and in spite of damage.

A record is its length (8 bytes), a checksum of the length, the payload and a checksum of the payload. TensorBoard's own
reader spends nearly all of its time on checksums in Python; here, records that nobody wants are passed over.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from attn_monitor.checksum import masked_crc32c
from attn_monitor.phrases import count

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_UPPER_BYTES = b"\0\0\0\0\0"
"""Of a length below 16 MiB, as every one is."""
_PROGRESS = 1 << 20
_checksum_of_length = lru_cache(maxsize=1 << 14)(masked_crc32c)  # the same few lengths again and again


@dataclass(slots=True)
class Damage:
    """What of a file could not be read.

    Attributes:
        records: How many records did not have the checksum they should have.
        skipped: Bytes between which no record could be made out.
        unfinished: Bytes of a last record that ends too early.
    """

    records: int = 0
    skipped: int = 0
    unfinished: int = 0

    def __str__(self) -> str:
        parts = []
        if self.records:
            parts.append(f"{count(self.records, 'damaged record')} left out")
        if self.skipped:
            parts.append(f"{self.skipped} bytes that are no records left out")
        if self.unfinished:
            parts.append(f"the last record is unfinished, {self.unfinished} bytes left out")
        return ", ".join(parts)


def read_records(
    path: Path, wanted: Callable[[bytes], bool], damage: Damage, progress: Callable[[int], object]
) -> Iterator[bytes]:
    """Yield the payloads of a file that are wanted and undamaged.

    Args:
        path: The file; what is appended to it meanwhile is not read.
        wanted: Chooses payloads. The checksums of others are not looked at.
        damage: Takes what is lost.
        progress: Takes numbers of bytes that were read; in the end they add up to the size of the file.
    """
    size = path.stat().st_size
    position = reported = 0
    with path.open("rb", buffering=_PROGRESS) as file:
        while position < size:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                damage.unfinished += size - position
                break
            length, check = _HEADER.unpack(header)
            if _checksum_of_length(header[:8]) != check:
                found = _next_record(file, position, size)
                damage.skipped += found - position
                position = found
                continue
            end = position + _HEADER.size + length + _FOOTER.size
            if end > size:
                damage.unfinished += size - position
                break
            payload = file.read(length)
            footer = file.read(_FOOTER.size)
            if len(footer) < _FOOTER.size:  # the file has shrunk meanwhile
                damage.unfinished += size - position
                break
            if wanted(payload):
                if masked_crc32c(payload) == _FOOTER.unpack(footer)[0]:
                    yield payload
                else:
                    damage.records += 1
            position = end
            if position - reported >= _PROGRESS:
                progress(position - reported)
                reported = position
    progress(size - reported)


def _next_record(file: BinaryIO, position: int, size: int) -> int:
    """Go to the next place behind `position` that looks like the start of a record, or to the end."""
    file.seek(position + 1)
    rest = file.read(size - position - 1)
    for match in re.finditer(b"(?=%s)" % _UPPER_BYTES, rest):  # a lookahead: zeros overlap
        start = match.start() - 3
        if start < 0 or start + _HEADER.size > len(rest):
            continue
        if _checksum_of_length(rest[start : start + 8]) == _FOOTER.unpack_from(rest, start + 8)[0]:
            file.seek(position + 1 + start)
            return position + 1 + start
    return size

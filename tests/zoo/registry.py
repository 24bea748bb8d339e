"""All entries of the zoo."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tests.zoo.compare import Findings, examine
from tests.zoo.decoders import DECODERS
from tests.zoo.encoders import ENCODERS
from tests.zoo.entry import Entry
from tests.zoo.handwritten import HANDWRITTEN
from tests.zoo.hybrids import HYBRIDS
from tests.zoo.libraries import LIBRARIES, installed
from tests.zoo.multimodal import MULTIMODAL
from tests.zoo.sequence_to_sequence import SEQUENCE_TO_SEQUENCE
from tests.zoo.vision import VISION

GROUPS: dict[str, tuple[Entry, ...]] = {
    "Decoders": DECODERS,
    "Encoders": ENCODERS,
    "Encoder and decoder": SEQUENCE_TO_SEQUENCE,
    "Vision": VISION,
    "Speech, series, text with images": MULTIMODAL,
    "Hybrids": HYBRIDS,
    "Other libraries": LIBRARIES,
    "By hand": HANDWRITTEN,
}
ENTRIES = {entry.name: entry for entries in GROUPS.values() for entry in entries}


def cases(entries: Iterable[Entry] = tuple(ENTRIES.values())) -> list[tuple[str, str]]:
    """Return name and implementation of everything that can be run here."""
    return [(entry.name, implementation) for entry in entries for implementation in entry.implementations]


def available(entry: Entry) -> bool:
    """Tell whether the library an entry is from is installed."""
    return installed(entry.library)


@cache
def findings(name: str, implementation: str) -> Findings:
    """Return what was found in an entry, examined once."""
    return examine(ENTRIES[name], implementation)

"""Parts of a page that are written by the code, between two comments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def filled(text: str, blocks: Mapping[str, str]) -> str:
    """Return a page with its blocks written anew.

    A block stands between `<!-- name -->` and `<!-- /name -->`, each on a line of its own.

    Raises:
        ValueError: If the page has no such block.
    """
    for name, content in blocks.items():
        match = re.search(rf"<!-- {re.escape(name)} -->\n(.*?)<!-- /{re.escape(name)} -->", text, re.DOTALL)
        if match is None:
            raise ValueError(f"the page has no block {name!r}; write <!-- {name} --> and <!-- /{name} --> in it")
        text = text[: match.start(1)] + content + text[match.end(1) :]
    return text


def row_of(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def table_of(head: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table."""
    return "\n".join([row_of(*head), f"|{'---|' * len(head)}", *rows]) + "\n"

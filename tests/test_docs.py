"""The documentation says what the catalog says.

`python -m tests.test_docs` writes the table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from attn_monitor.catalog import STATISTICS, Statistic

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"(<!-- catalog -->\n).*?(<!-- /catalog -->)", re.DOTALL)
PAGE = ROOT / "docs" / "statistics.md"


def catalog_table() -> str:
    """Return the catalog as a Markdown table."""
    rows = [
        f"| `{row.name}` | {row.definition} | {row.unit or '-'} | {value_range(row)} | {row.worse or '-'} |"
        for row in STATISTICS.values()
    ]
    return (
        "\n".join(["| name | over allowed entries | unit | range | worse is |", "|---|---|---|---|---|", *rows]) + "\n"
    )


def value_range(row: Statistic) -> str:
    """Return the range of a statistic in words."""
    if row.low is None:
        return "any"
    return f"{row.low:g} to {row.high}" if row.high else f"at least {row.low:g}"


def with_table(text: str) -> str:
    """Return the page with its table as the catalog has it."""
    return TABLE.sub(lambda match: match.group(1) + catalog_table() + match.group(2), text)


def test_table_equals_the_catalog() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(text)
    assert text == with_table(text), "run python -m tests.test_docs"


def test_every_statistic_has_an_entry_in_the_order_of_the_catalog() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == list(STATISTICS)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

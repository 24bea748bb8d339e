"""The statistics have a page each, and the overview says what the catalog says.

`python -m tests.docs_pages` writes the table anew.
"""

from __future__ import annotations

from attn_monitor.catalog import STATISTICS
from tests.docs_pages import statistics


def test_table_equals_the_catalog() -> None:
    text = statistics.OVERVIEW.read_text(encoding="utf-8")
    assert text == statistics.overview(), "run python -m tests.docs_pages"


def test_every_statistic_has_a_page() -> None:
    assert {page.stem for page in statistics.FOLDER.glob("*.md")} == set(STATISTICS)

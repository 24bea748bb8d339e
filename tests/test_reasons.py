"""Whoever silences a checker says why, behind a second `#`."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("attn_monitor", "examples", "tests", "docs")
SILENCER = re.compile(r"#\s*(?:type:\s*ignore|noqa|mypy:|ruff:|flake8:|pragma:)", re.IGNORECASE)
REASONED = re.compile(r"# (?:type: ignore\[[a-z, -]+\]|noqa: [A-Z]+\d+(?:, [A-Z]+\d+)*) +# .*\w{2}.*")


def without_reason(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines and comments that silence a checker and lack a reason, or do not say what they silence.

    A text that speaks of such a comment is none.
    """
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and SILENCER.search(token.string) and not REASONED.fullmatch(token.string):
            yield token.start[0], token.string


def test_what_lacks_a_reason_is_found() -> None:
    good = [
        "a = f()  # type: ignore[no-untyped-call] # torch has no hints for it\n",
        "a = f()  # type: ignore[misc, name-defined]  # the package is a parameter\n",
        "a = f()  # noqa: PERF401 # an interrupt must not lose one\n",
        "a = f()  # noqa: PERF401, B007 # two of them\n",
        'a = "# type: ignore"  # a text about it\n',
    ]
    bad = [
        "a = f()  # type: ignore[no-untyped-call]\n",
        "a = f()  # type: ignore # torch has no hints for it\n",
        "a = f()  # type: ignore[misc] #\n",
        "a = f()  # type:ignore[misc] # written otherwise\n",
        "a = f()  # noqa\n",
        "a = f()  # noqa: PERF401\n",
        "a = f()  # noqa: PERF401 - behind a dash\n",
        "# ruff: noqa\n",
        "# mypy: ignore-errors\n",
    ]
    lines = good + bad
    found = list(without_reason("".join(lines)))
    assert found == [(lines.index(line) + 1, line[line.index("#") :].rstrip()) for line in bad]


def test_whatever_silences_a_checker_has_a_reason() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 250
    found = {str(path.relative_to(ROOT)): list(without_reason(path.read_text("utf-8"))) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}

"""The Attention tab as one HTML file: data, style and scripts inside, nothing to be loaded, to be kept or mailed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attn_monitor import __version__
from attn_monitor.flight_records import write_whole
from attn_monitor.reports.terminal import printable
from attn_monitor.reports.thinning import thin
from attn_monitor.tensorboard_plugin.page import page_file
from attn_monitor.views import RunData, events, frames, run_meta, scalar

_FORMAT_VERSION = 1
_GENERATOR = '<meta name="generator" content="attn_monitor '
"""What tells a report from a file that is not ours."""
_STYLES = ("uPlot.min.css", "index.css")
_LIBRARY, _MODULE = "uPlot.iife.min.js", "index.js"
_START = """
const stored = JSON.parse(document.getElementById("attn-monitor-data").textContent);
mount(document.getElementById("attention"), inlineSource(stored));
"""
_OWN_STYLE = """
:root { color-scheme: light dark; background: Canvas; color: CanvasText; }
body { margin: 0; font: 13px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; }
.report { padding: 8px 16px; overflow-wrap: anywhere; }
.report p { margin: 4px 0; }
.report summary { cursor: pointer; }
.report pre { overflow-x: auto; }
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{generator}{version}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div class="report">
<details><summary>{title}: the summary in words</summary>
<pre>{summary}</pre>
<p>Written {generated} by attn_monitor {version}.</p>
</details>
{flights}{notes}<noscript>The charts need JavaScript; the summary does not.</noscript>
</div>
<main id="attention"></main>
<script type="application/json" id="attn-monitor-data">{data}</script>
{scripts}
</body>
</html>
"""


def check_output(path: Path) -> None:
    """Refuse to write over what is no report, or to where nothing can be written.

    Raises:
        FileExistsError: If something else is there.
        FileNotFoundError: If the directory is not there.
    """
    if path.is_dir():
        raise FileExistsError(f"{path} is a directory: --output expects a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no directory {path.parent} to write {path.name} to")
    if path.exists() and not _is_report(path):
        raise FileExistsError(f"{path} exists and is no report of attn_monitor: move it, or choose another --output")


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(1024)


def write_report(
    path: Path, runs: Sequence[RunData], summary: str, flights: Sequence[str] = (), *, megabytes: float = 20.0
) -> list[str]:
    """Write runs as one HTML file; one that was there is replaced when the new one is complete.

    Args:
        path: The file.
        runs: What it shows.
        summary: Text that stands in it.
        flights: What the flight recorder left, in words: a section for each, the last one unfolded.
        megabytes: About the largest size of the data; steps are left out to keep to it.

    Returns:
        What was left out, in words.

    Raises:
        FileExistsError: If `path` is something else than a report.
        OSError: If it cannot be written.
    """
    check_output(path)
    page, left_out = render_report(runs, summary, flights, megabytes=megabytes)
    write_whole(path, page)
    return left_out


def render_report(
    runs: Sequence[RunData],
    summary: str,
    flights: Sequence[str] = (),
    *,
    megabytes: float = 20.0,
    generated: datetime | None = None,
) -> tuple[str, list[str]]:
    """Return the page and, in words, what was left out of it.

    Args:
        runs: As in `write_report`.
        summary: As in `write_report`.
        flights: As in `write_report`.
        megabytes: As in `write_report`.
        generated: The time that stands in it, now by default.
    """
    thinned = thin(runs, megabytes * 1e6)
    notes = [note for one in thinned for note in one.notes]
    when = (generated or datetime.now()).strftime("%Y-%m-%d %H:%M")
    data = {
        "version": _FORMAT_VERSION,
        "generated": when,
        "left_out": notes,
        "runs": [_run_json(one.run) for one in thinned],
    }
    names = printable(", ".join(run.name for run in runs[:3]) + (", ..." if len(runs) > 3 else ""))
    scripts = _scripts()
    page = _PAGE.format(
        generator=_GENERATOR,
        version=html.escape(__version__),
        policy=_policy(scripts),
        title=html.escape(f"Attention of {names}"),
        style="\n".join([*map(page_file, _STYLES), _OWN_STYLE]),
        flights="".join(_flight(text, text == flights[-1]) for text in flights),
        notes="".join(f"<p>{html.escape(printable(note))}.</p>\n" for note in notes),
        summary=html.escape(summary),
        generated=when,
        data=_embedded(data),
        scripts="\n".join(f"<script{attributes}>{text}</script>" for attributes, text in scripts),
    )
    return page, notes


def _flight(text: str, unfolded: bool) -> str:
    """Return the section of a flight record: what happened, with the last observations."""
    title, _, rest = text.partition("\n")
    start = f"<details{' open' if unfolded else ''}><summary>{html.escape(title)}</summary>"
    return f"{start}\n<pre>{html.escape(rest)}</pre>\n</details>\n"


def _run_json(run: RunData) -> dict[str, Any]:
    return {
        "meta": run_meta(run),
        "tables": {name: frames(run, name, slice(None)) for name in run.tables},
        "scalars": {tag: scalar(run, tag) for tag in run.scalars},
        "events": [{name: _finite(value) for name, value in event.items()} for event in events(run)],
    }


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _embedded(data: object) -> str:
    """Return JSON that no reader of HTML takes for markup: outside of strings it has no `<`."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _scripts() -> list[tuple[str, str]]:
    """Return the attributes and the text of the scripts; `</script` must not end them early."""
    scripts = [("", page_file(_LIBRARY)), (' type="module"', page_file(_MODULE) + _START)]
    return [(attributes, text.replace("</script", "<\\/script")) for attributes, text in scripts]


def _policy(scripts: Sequence[tuple[str, str]]) -> str:
    """Allow these scripts and nothing else: neither the network nor whatever a name could have smuggled in."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'"

"""The tab's page in the browser: opening it, and reading what it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.board import start_in_process
from tests.browser import Browser
from tests.event_data import StoredRun, make_event

SICK = "layers.1.attn"
EVENTS = {
    20: [make_event(20, SICK, 3)],
    30: [make_event(30, "layers.0.attn", 1)],
    40: [make_event(40, SICK, 3, severity="critical", state="critical")],
    50: [make_event(50, "layers.0.attn", 1, state="ended")],
}
ENTRY = "data/plugin_entry.html?name=attn_monitor"
PAGE = "document.body.attention"
READY = "document.body.dataset.ready === 'true'"
DRAWN = f"{PAGE}.state().drawn"


def opened(browser: Browser, url: str) -> Iterator[Browser]:
    browser.go("about:blank")
    browser.problems.clear()
    browser.requests.clear()
    browser.go(url + ENTRY)
    browser.wait(READY)
    browser.wait(DRAWN)
    yield browser
    assert browser.problems == []
    outside = [request for request in browser.requests if not request.startswith((url, "data:", "about:", "blob:"))]
    assert outside == []


def cells(browser: Browser, run: str) -> list[list[float | None]]:
    found: list[list[float | None]] = browser.run(f"{PAGE}.cells({json.dumps(run)})")
    return found


def assert_cells(browser: Browser, run: str, expected: NDArray[np.float32]) -> None:
    """Compare the cells with a [layers, heads] table whose missing heads are nan at the end of a row."""
    found = cells(browser, run)
    wanted = [row[~np.isnan(row)].tolist() for row in expected]
    assert found == wanted


def state(browser: Browser) -> dict[str, Any]:
    found: dict[str, Any] = browser.run(f"{PAGE}.state()")
    return found


def place(browser: Browser, run: str, layer: int, head: int) -> tuple[float, float]:
    """Return where in the window a cell is, after scrolling to it."""
    x, y = browser.run(f"""(() => {{
        const map = {PAGE}.app.maps.get({json.dumps(run)});
        map.canvas.scrollIntoView({{block: "center"}});
        const box = map.canvas.getBoundingClientRect();
        const {{width, height}} = map.cell;
        return [box.left + map.left + ({head} + 0.5) * width, box.top + map.top + ({layer} + 0.5) * height];
    }})()""")
    return x, y


def pixel(browser: Browser, run: str, layer: int, head: int) -> list[int]:
    """Return the colour of a cell, beside its middle."""
    colour: list[int] = browser.run(f"""(() => {{
        const map = {PAGE}.app.maps.get({json.dumps(run)});
        const [x, y] = [map.left + ({head} + 0.25) * map.cell.width, map.top + ({layer} + 0.25) * map.cell.height];
        return [...map.canvas.getContext("2d").getImageData(Math.round(x), Math.round(y), 1, 1).data].slice(0, 3);
    }})()""")
    return colour


def drawn_alone(browser: Browser, folder: Path, *runs: StoredRun) -> Iterator[Browser]:
    """Open the tab over runs called run0, run1, ..."""
    for index, run in enumerate(runs):
        run.write(folder / "logs" / f"run{index}")
    server = start_in_process(folder / "logs")
    server.wait(lambda server: len(server.get("runs").body) == len(runs))
    yield from opened(browser, server.url)

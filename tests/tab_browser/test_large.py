"""The tab and the report of a large run, whose file takes longer to write than both of them to read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from attn_monitor.cli import main
from tests.board import Server, start_command
from tests.browser import Browser
from tests.event_data import StoredRun, make_run
from tests.tab_browser.pages import DRAWN, ENTRY, PAGE, READY, cells, state

pytestmark = pytest.mark.slow
SCALARS = "/data/plugin/scalars/scalars"


class Large(NamedTuple):
    """What was written, and where to."""

    run: StoredRun
    logs: Path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    """80 layers of 64 heads over 2000 steps."""
    logs = tmp_path_factory.mktemp("logs")
    layers = [f"model.layers.{index}.self_attn" for index in range(80)]
    run = make_run(steps=range(2000), layers=layers, heads=64)
    run.tables = {name: run.tables[name] for name in ("saturation_ratio", "q_rms")}
    run.write(logs / "large")
    return Large(run, logs)


def first_paint(browser: Browser, server: Server) -> float:
    """Return the seconds until a server that has read everything shows it for the first time."""

    # What the server needs to read the file is its own time, the same for every tab. Scalars tell when it is done: to
    # ask the tab for it would fill the tab's cache.
    def loaded(server: Server) -> bool:
        answer = server.ask(SCALARS, run="large", tag="train_loss")
        return answer.status == 200 and answer.body[-1][1] == 1999

    server.wait(loaded, 120)
    browser.problems.clear()
    browser.go("about:blank")
    start = time.monotonic()
    browser.go(server.url + ENTRY)
    browser.wait(READY)
    return time.monotonic() - start


def test_80_layers_of_64_heads_over_2000_steps_are_painted_within_3_seconds(
    browser: Browser, large: Large, tmp_path: Path
) -> None:
    ratios, seconds = large.run.tables["saturation_ratio"], []
    for _ in range(3):  # the best of three, each of a server without a cache: other processes may take the core
        with start_command(large.logs) as server:
            seconds.append(first_paint(browser, server))
            print(f"first paint after {seconds[-1]:.2f} s")
            assert state(browser)["steps"][-1] == 1999
            found = np.array(cells(browser, "large")[:-1], np.float32)
            np.testing.assert_array_equal(found, ratios[-1, :-1])
            browser.wait(DRAWN, 60)
            start = time.monotonic()
            browser.run(f"{PAGE}.app.setStep(1000)")
            browser.wait(f"{PAGE}.cells('large')[0][0] === {ratios[1000, 0, 0].item()!r}")
            print(f"a far step after {time.monotonic() - start:.2f} s")
            browser.screenshot(tmp_path / "large.png")
            assert browser.problems == []
        if seconds[-1] < 3.0:
            break
    assert min(seconds) < 3.0


def test_the_report_of_such_a_run_is_small_and_soon_drawn(browser: Browser, large: Large, tmp_path: Path) -> None:
    assert main(["report", str(large.logs / "large")]) == 0
    path = large.logs / "large" / "attention_report.html"
    assert path.stat().st_size < 21e6
    page = "document.getElementById('attention').attention"
    browser.go("about:blank")
    browser.problems.clear()
    browser.requests.clear()
    started = time.monotonic()
    browser.go(path.as_uri())
    browser.wait(f"{page}?.state().drawn")
    assert time.monotonic() - started < 15
    shown = browser.run(f"{page}.cells('large')")
    assert shown == [row[~np.isnan(row)].tolist() for row in large.run.tables["saturation_ratio"][-1]]
    assert "of 2000 observed steps are left out" in browser.run("document.querySelector('.report').textContent")
    browser.screenshot(tmp_path / "report.png")
    assert browser.problems == []
    assert [request for request in browser.requests if not request.startswith(("about:", "data:"))] == [path.as_uri()]

"""The report in a real browser, opened as a file. Screenshots lie in pytest's temporary folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn_monitor.cli import main
from tests.browser import Browser, open_browser
from tests.event_data import HOSTILE, make_event, make_run

pytestmark = pytest.mark.slow

PAGE = "document.getElementById('attention').attention"
DRAWN = f"{PAGE}?.state().drawn"
SICK = "layers.1.attn"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def report(folder: Path, *options: str) -> Path:
    assert main(["report", str(folder), *options]) == 0
    return folder / "attention_report.html"


def opened(browser: Browser, path: Path) -> Browser:
    browser.go("about:blank")
    browser.problems.clear()
    browser.requests.clear()
    browser.go(path.as_uri())
    browser.wait(DRAWN)
    return browser


def assert_quiet(browser: Browser, path: Path) -> None:
    """Nothing went wrong and nothing but the file was asked for."""
    assert browser.problems == []
    assert [request for request in browser.requests if not request.startswith(("about:", "data:"))] == [path.as_uri()]


def cells(browser: Browser, run: str) -> Any:
    return browser.run(f"{PAGE}.cells({json.dumps(run)})")


def rows(table: Any) -> list[list[float]]:
    """Return a [layers, heads] table as the page has it, without heads that are not there."""
    return [row[~np.isnan(row)].tolist() for row in table]


def test_the_report_shows_the_runs_as_the_tab_does(browser: Browser, tmp_path: Path) -> None:
    events = {20: [make_event(20, SICK, 3)], 40: [make_event(40, SICK, 3, severity="critical", state="critical")]}
    one, two = make_run(events=events), make_run(steps=(0, 20, 40, 80), seed=5)
    one.write(tmp_path / "one")
    two.write(tmp_path / "two")
    path = report(tmp_path)
    page = opened(browser, path)
    assert cells(page, "one") == rows(one.tables["saturation_ratio"][-1])
    assert cells(page, "two") == rows(two.tables["saturation_ratio"][-1])
    page.run(f"{PAGE}.app.setStatistic('q_rms')")
    page.run(f"{PAGE}.app.setStep(40)")
    page.wait(f"{PAGE}.cells('two')[0][0] === {float(two.tables['q_rms'][2, 0, 0])}")
    assert cells(page, "one") == rows(one.tables["q_rms"][4])
    page.run("document.querySelector('.events a').click()")
    page.wait(f"{PAGE}.state().step === 20")
    page.wait(DRAWN)
    state = page.run(f"{PAGE}.state()")
    assert state["selected"] == {"run": "one", "layer": SICK, "head": 3}
    drawn = {*one.tables, "factors"} - {"nonfinite", "scale_ratio"}  # which are the same throughout
    assert (state["events"], set(state["charts"])) == (2, drawn)
    assert page.run("document.querySelector('.refresh').getClientRects().length") == 0
    lines = page.run(f"{PAGE}.app.plots.find(({{name}}) => name === 'k_rms').plot.data")
    assert lines[0] == sorted({*one.steps, *two.steps})
    assert [lines[1][lines[0].index(step)] for step in one.steps] == one.tables["k_rms"][:, 1, 3].tolist()
    page.screenshot(tmp_path / "report.png", whole=True)
    assert_quiet(page, path)


def test_a_click_on_a_cell_shows_its_head(browser: Browser, tmp_path: Path) -> None:
    make_run().write(tmp_path)
    path = report(tmp_path)
    page = opened(browser, path)
    x, y = page.run(f"""(() => {{
        const map = {PAGE}.app.maps.values().next().value;
        map.canvas.scrollIntoView({{block: "center"}});
        const box = map.canvas.getBoundingClientRect();
        return [box.left + map.left + 4.5 * map.cell.width, box.top + map.top + 0.5 * map.cell.height];
    }})()""")
    page.click(x, y)
    page.wait(f"{PAGE}.state().selected.layer === 'layers.0.attn' && {PAGE}.state().selected.head === 4")
    assert_quiet(page, path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_summary_is_in_the_page_in_light_and_dark(browser: Browser, tmp_path: Path, scheme: str) -> None:
    make_run().write(tmp_path)
    path = report(tmp_path)
    browser.prefer(scheme)
    page = opened(browser, path)
    page.run("document.querySelector('.report details').open = true")
    assert "3 layers of 5 heads, 7 observations" in page.run("document.querySelector('.report pre').innerText")
    ground = page.run("getComputedStyle(document.documentElement).backgroundColor")
    assert (max(int(part) for part in ground[4:-1].split(",")) < 100) is (scheme == "dark")
    page.screenshot(tmp_path / f"{scheme}.png", whole=True)
    assert_quiet(page, path)
    browser.prefer("light")


def test_nothing_that_is_named_can_inject(browser: Browser, tmp_path: Path) -> None:
    run = make_run(layers=HOSTILE, heads=3, scalars={"<script>window.injected=1</script>loss": [1.0] * 7})
    run.events = {20: [make_event(20, name, 1, message=name) for name in HOSTILE]}
    folder = tmp_path / "<img src=x onerror=window.injected=1>'&\""
    run.write(folder / "<b>version")
    path = report(folder)
    page = opened(browser, path)
    page.run("document.querySelector('.report details').open = true")
    text = page.run("document.body.textContent")
    assert all(name in text for name in HOSTILE)
    assert page.run("window.injected === undefined && !document.querySelector('img, b:not(figcaption b)')")
    page.screenshot(tmp_path / "hostile.png", whole=True)
    assert page.problems == []


def test_what_is_injected_anyway_does_not_run(browser: Browser, tmp_path: Path) -> None:
    make_run().write(tmp_path)
    path = report(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("<main", "<script>window.injected = 1</script><img src=http://x.test/x><main", 1))
    page = opened(browser, path)
    assert page.run("window.injected === undefined")
    assert len([problem for problem in page.problems if "Content Security Policy" in problem]) == 2

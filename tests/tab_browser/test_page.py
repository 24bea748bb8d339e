"""The page of the Attention tab as a whole, alone, in TensorBoard and in a report: links, keys, themes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn_monitor import views
from attn_monitor.tensorboard_plugin.page import page_file
from tests.board import Server, start_in_process
from tests.browser import Browser
from tests.event_data import HOSTILE, StoredRun, make_event, make_run
from tests.tab_browser.pages import (
    DRAWN,
    ENTRY,
    EVENTS,
    PAGE,
    READY,
    SICK,
    assert_cells,
    drawn_alone,
    opened,
    place,
    state,
)

pytestmark = pytest.mark.slow


def test_events_are_links_to_their_head_and_step(page: Browser) -> None:
    items = page.run("[...document.querySelectorAll('.events li')].map((item) => item.textContent)")
    assert len(items) == 4
    assert "head 3 of layers.1.attn is saturated" in items[0]
    page.run("document.querySelectorAll('.events a')[1].click()")
    page.wait(f"{PAGE}.state().step === 30")
    assert state(page)["selected"] == {"run": "one", "layer": "layers.0.attn", "head": 1}
    link = page.run("document.querySelectorAll('.events a')[2].href")
    page.go("about:blank")
    page.go(link)
    page.wait(READY)
    page.wait(f"{PAGE}.state().step === 40")
    assert state(page)["selected"] == {"run": "one", "layer": SICK, "head": 3}


def test_the_keyboard_does_everything(page: Browser) -> None:
    page.run(f"{PAGE}.app.select({{run: 'one', layer: 'layers.0.attn', head: 0}})")
    page.run("document.querySelector('.run canvas').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.press(key)
    assert state(page)["selected"] == {"run": "one", "layer": SICK, "head": 1}
    for key, step in (("Home", 0), (".", 10), (".", 20), (",", 10), ("End", 80)):
        page.press(key)
        page.wait(f"{PAGE}.state().step === {step}")
    page.press("]")
    page.wait(f"{PAGE}.state().statistic === 'logit_row_std'")
    page.press("[")
    page.wait(f"{PAGE}.state().statistic === 'saturation_ratio'")
    page.press("Home")
    page.press("n")
    page.wait(f"{PAGE}.state().step === 20 && {PAGE}.state().selected.head === 3")
    page.press("n")
    page.wait(f"{PAGE}.state().step === 30")
    page.press("p")
    page.wait(f"{PAGE}.state().step === 20")
    page.press("?")
    page.wait("document.querySelector('dialog').open")
    page.press("Escape")
    page.wait("!document.querySelector('dialog').open")


def test_play_goes_through_the_steps_and_stops(page: Browser) -> None:
    page.press("Home")
    page.wait(f"{PAGE}.state().step === 0")
    page.press(" ")
    page.wait(f"{PAGE}.state().playing && {PAGE}.state().step >= 20")
    page.press(" ")
    page.wait(f"!{PAGE}.state().playing")
    paused = state(page)["step"]
    assert paused < 80
    page.run("document.querySelector('.play').click()")
    page.wait(f"{PAGE}.state().step === 80 && !{PAGE}.state().playing")
    assert_cells(page, "one", make_run().tables["saturation_ratio"][-1])


def test_light_and_dark(page: Browser, tmp_path: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    for scheme, colour in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(23, 25, 28)")):
        page.prefer(scheme)
        page.wait(f"{background} === '{colour}'")
        page.screenshot(tmp_path / f"{scheme}.png")
    page.press("d")
    page.wait(f"{background} === 'rgb(255, 255, 255)'")
    page.prefer("light")


def test_the_tab_opens_inside_tensorboard_and_follows_its_theme(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    browser.problems.clear()
    browser.go(f"{server.url}#attn_monitor")
    inside = "document.querySelector('iframe').contentDocument.body"
    browser.wait(f"{inside}.dataset.ready === 'true'")
    browser.wait(f"{inside}.attention.state().drawn")
    assert browser.run(f"{inside}.attention.cells('one').map((row) => row.length)") == [5, 5, 3]
    for name, theme in (("dark-mode", "dark"), ("", "light")):
        browser.run(f"document.body.classList.{'add' if name else 'remove'}('dark-mode')")
        browser.wait(f"{inside}.dataset.theme === '{theme}'")
    browser.screenshot(tmp_path / "tensorboard.png")
    assert [problem for problem in browser.problems if "plugin/attn_monitor" in problem] == []


def test_nothing_that_is_named_can_inject(browser: Browser, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=window.injected=1>'\"&"
    run = make_run(layers=HOSTILE, heads=3, scalars={"<script>window.injected=1</script>loss": [1.0] * 7})
    run.events = {20: [make_event(20, HOSTILE[4], 1, message=HOSTILE[3] + hostile, severity="warning", state="opened")]}
    run.write(tmp_path / "logs" / hostile.replace("/", ""))
    server = start_in_process(tmp_path / "logs")
    server.wait(lambda server: len(server.get("runs").body) == 1)
    for page in opened(browser, server.url):
        assert state(page)["selected"]["layer"] == HOSTILE[4]
        page.click(*place(page, hostile, 3, 1))
        page.wait(f"{PAGE}.state().selected.layer === {json.dumps(HOSTILE[3])}")
        page.wait(f"{PAGE}.app.drawing === {PAGE}.app.selected")
        page.wait(DRAWN)
        page.run("document.querySelector('.events a').click()")
        text = page.run("document.body.textContent")
        assert all(name in text for name in (hostile, HOSTILE[3] + hostile))
        assert page.run("window.injected === undefined && !document.querySelector('img, .events script')")
        page.screenshot(tmp_path / "hostile.png", whole=True)


def test_an_empty_directory_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    server = start_in_process(tmp_path)
    browser.problems.clear()
    browser.go(server.url + ENTRY)
    browser.wait("document.querySelector('.banner') && !document.querySelector('.banner').hidden")
    assert "no attention data here yet" in browser.run("document.querySelector('.banner').textContent")
    assert browser.problems == []


def test_a_run_that_is_still_being_written_is_followed(browser: Browser, tmp_path: Path) -> None:
    run = make_run(events=EVENTS)
    run.write(tmp_path / "one", range(3))
    server = start_in_process(tmp_path, "--reload_interval=1")
    server.wait(lambda server: server.get("runs").body == ["one"])
    for page in opened(browser, server.url):
        assert state(page)["steps"] == [0, 10, 20]
        later = StoredRun(run.steps, run.tables, run.layers, run.head_dims, events=EVENTS, scalars=run.scalars)
        later.write(tmp_path / "one", range(3, 7))
        server.wait(lambda server: len(server.get("meta", run="one").body["steps"]) == 7)
        page.press("r")
        page.wait(f"{PAGE}.state().step === 60")
        page.wait(f"{PAGE}.state().events === 4")
        assert_cells(page, "one", run.tables["saturation_ratio"][-1])
        page.wait(DRAWN)


def test_an_event_says_since_when_and_in_which_run(page: Browser) -> None:
    page.run(f"{PAGE}.app.select({{run: 'one', layer: '{SICK}', head: 3}})")
    page.wait(DRAWN)
    for step, word in ((30, "warning since step 20"), (60, "critical since step 40")):
        page.run(f"{PAGE}.app.setStep({step})")
        one, two, *_ = page.run("document.querySelector('.readout').textContent").split(" · ")[1:]
        assert one.startswith("one: ")
        assert one.endswith(f", {word}")
        assert two.startswith("two: ")
        assert "since" not in two
    page.wait(DRAWN)
    causes = page.run("[...document.querySelectorAll('.causes p')].map((one) => one.textContent)")
    assert causes == ["one: critical since step 40: head 3 of layers.1.attn is saturated"]
    page.hover(*place(page, "one", 1, 3))
    page.wait("document.querySelector('.tip').textContent.endsWith(', critical since step 40')")


def test_runs_that_are_not_shown_are_counted_and_their_events_marked(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(steps=(0, 10), seed=seed) for seed in range(6)]
    runs[5].events = {10: [make_event(10, SICK, 3), make_event(10, SICK, 2, severity="critical")]}
    for page in drawn_alone(browser, tmp_path, *runs):
        page.wait(
            "document.querySelector('.runs .count').textContent === '4 of 6 shown; 1 of those not shown has events'"
        )
        labels = page.run("[...document.querySelectorAll('.runs label')].map((one) => one.textContent)")
        assert labels == ["run0", "run1", "run2", "run3", "run4", "run5⚑ 2 events"]
        page.run("document.querySelectorAll('.runs input')[5].focus()")
        page.press(" ")
        page.wait("document.querySelector('.runs .count').textContent === '5 of 6 shown'")
        assert page.run("document.activeElement.value") == "run5"
        page.wait(DRAWN)


def inline_page(folder: Path, runs: list[views.RunData]) -> str:
    """Write what a report is: the page's own files and the data, in one file."""
    data = {
        "version": 1,
        "generated": "now",
        "runs": [
            {
                "meta": views.run_meta(run),
                "tables": {name: views.frames(run, name, slice(None)) for name in run.tables},
                "scalars": {tag: views.scalar(run, tag) for tag in run.scalars},
                "events": views.events(run),
            }
            for run in runs
        ],
    }
    style = "".join(page_file(name) for name in ("uPlot.min.css", "index.css"))
    path = folder / "report.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body>"
        f"<script>{page_file('uPlot.iife.min.js')}</script>"
        f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
        f'<script type="module">{page_file("index.js")}\n'
        'mount(document.body, inlineSource(JSON.parse(document.getElementById("data").textContent)));</script>',
        encoding="utf-8",
    )
    return path.as_uri()


def test_the_same_page_shows_data_that_is_embedded_in_it(browser: Browser, tmp_path: Path) -> None:
    run = make_run(layers=HOSTILE[:3])
    tensors: dict[str, Any] = {
        f"attn_monitor/{name}": list(zip(run.steps, table, strict=True)) for name, table in run.tables.items()
    }
    tensors["attn_monitor/grad_logits_norm"] = [(10, np.full((3, 5), 2.5, np.float32))]
    tensors["attn_monitor/layers"] = [(0, np.array([name.encode() for name in run.layers], dtype=object))]
    loss = views.series(list(zip(run.steps, run.scalars["train_loss"], strict=True)))
    browser.go("about:blank")
    browser.problems.clear()
    browser.go(inline_page(tmp_path, [views.assemble("one", tensors, {"loss": loss}, threshold=0.5)]))
    browser.wait(READY)
    browser.wait(DRAWN)
    assert_cells(browser, "one", run.tables["saturation_ratio"][-1])
    browser.run(f"{PAGE}.app.setStatistic('grad_logits_norm')")
    browser.run(f"{PAGE}.app.setStep(10)")
    browser.wait(f"{PAGE}.cells('one')[0][0] === 2.5")
    browser.run(f"{PAGE}.app.setStep(20)")
    browser.wait(f"{PAGE}.cells('one')[0][0] !== 2.5")
    assert browser.run("document.querySelector('.refresh').getClientRects().length") == 0  # nothing can be added
    lines = browser.run(f"{PAGE}.app.plots.find(({{name}}) => name === 'k_rms').plot.data")
    layer, head = state(browser)["selected"]["layer"], state(browser)["selected"]["head"]
    assert lines[1] == run.tables["k_rms"][:, run.layers.index(layer), head].tolist()
    assert browser.problems == []

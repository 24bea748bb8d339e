"""Heads with nan logits, and the runs of other monitors, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.board import Server, start_in_process
from tests.browser import Browser
from tests.event_data import StoredRun, make_event, make_run
from tests.tab_browser.pages import DRAWN, EVENTS, PAGE, SICK, cells, opened, pixel, state

pytestmark = pytest.mark.slow


def broken_run(prefix: str = "", **more: Any) -> StoredRun:
    """Return a run whose second layer has nan logits from step 40 on, in all heads but one."""
    events = {
        20: [make_event(20, SICK, 3)],
        40: [
            make_event(40, SICK, 0, kind="nonfinite", statistic="nonfinite", severity="critical", ratio=None),
            make_event(40, SICK, 3, kind="nonfinite", statistic="nonfinite", severity="critical", ratio=None),
        ],
    }
    run = make_run(prefix=prefix, **{"events": events, **more})
    for name, table in run.tables.items():
        table[4:, 1, [0, 3]] = 7 if name == "nonfinite" else np.nan
    return run


@pytest.fixture(scope="module")
def broken_server(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Server:
    folder = tmp_path_factory.mktemp("broken")
    broken_run().write(folder / "run")
    broken_run("val_", events={}).write(folder / "run")
    server = start_in_process(folder)
    server.wait(lambda server: server.get("runs").body == ["run", "run (validation)"])
    return server


@pytest.fixture
def broken_page(browser: Browser, broken_server: Server) -> Iterator[Browser]:
    yield from opened(browser, broken_server.url)


def test_heads_with_nan_logits_say_so_and_since_when(broken_page: Browser, tmp_path: Path) -> None:
    page = broken_page
    training, validation = page.run("[...document.querySelectorAll('.summary')].map((one) => one.textContent)")
    assert training.startswith(
        "2 heads with nan or inf logits since step 40 · first ever: layers.1.attn head 3, step 20"
    )
    assert validation.startswith("2 heads with nan or inf logits at step 60 · highest saturation ratio")
    reading = f"[...{PAGE}.app.maps.values()].map((map) => [map.reading(1, 0), map.reading(1, 1), map.reading(2, 2)])"
    (first, healthy, _), (silent, *_) = page.run(reading)
    assert first == "nan or inf logits, critical since step 40"
    assert silent == "nan or inf logits"
    assert float(healthy) > 0
    assert pixel(page, "run", 1, 0) != pixel(page, "run", 1, 1)
    assert page.run("document.querySelector('.legend .key.broken') !== null")
    page.screenshot(tmp_path / "broken.png", whole=True)

    page.run(f"{PAGE}.app.setStep(30)")
    page.wait(f"{PAGE}.state().painted.every(({{step}}) => step === 30)")
    assert page.run("document.querySelector('.legend .key.broken') === null")
    assert page.run(f"{PAGE}.app.maps.get('run').reading(1, 0)") == page.run(
        f"String(Number({PAGE}.app.maps.get('run').value(1, 0).toPrecision(4)))"
    )


def test_the_charts_of_a_head_with_nan_logits_claim_no_number_at_the_end(broken_page: Browser) -> None:
    page = broken_page
    page.run(f"{PAGE}.app.select({{run: 'run', layer: '{SICK}', head: 3}})")
    page.wait(f"{DRAWN} && document.querySelector('.growth')?.textContent.includes('logit std')")
    words = page.run("document.querySelector('.growth').textContent")
    assert "Step 0 to 30: logit std" in words
    assert ". At step 30, the last with these numbers, " in words
    assert "At the end" not in words
    assert page.run("document.querySelector('.causes .critical').textContent").startswith("run: critical since step 40")
    shown = page.run(f"""(() => {{
        const {{plot, card}} = {PAGE}.app.plots.find(({{name}}) => name === "saturation_ratio");
        plot.setCursor({{left: plot.valToPos(50, "x"), top: 5}});
        return card.reading.textContent;
    }})()""")
    assert shown == "step 50: nan or inf logits | nan or inf logits"


def test_a_second_monitor_is_a_run_of_its_own_with_its_events(browser: Browser, tmp_path: Path) -> None:
    make_run(events=EVENTS).write(tmp_path / "run")
    make_run(prefix="monitor2_", layers=("decoder.attn",), events={30: [make_event(30, "decoder.attn", 1)]}).write(
        tmp_path / "run"
    )
    server = start_in_process(tmp_path)
    server.wait(lambda server: server.get("runs").body == ["run", "run (monitor 2)"])
    for page in opened(browser, server.url):
        assert state(page)["runs"] == ["run", "run (monitor 2)"]
        assert len(cells(page, "run (monitor 2)")) == 1
        items = page.run("[...document.querySelectorAll('.events li')].map((item) => item.textContent)")
        assert sum("decoder.attn" in item for item in items) == 1
        page.run(f"{PAGE}.app.select({{run: 'run (monitor 2)', layer: 'decoder.attn', head: 1}})")
        page.wait(DRAWN)
        assert "warning since step 30" in page.run("document.querySelector('.causes').textContent")

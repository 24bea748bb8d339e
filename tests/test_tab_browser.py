"""The Attention tab in a real browser, with TensorBoard around it. Screenshots lie in pytest's temporary folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attn_monitor import views
from attn_monitor.dashboards.colors import PALETTE, color_indices
from attn_monitor.scales import Scale, scale_of
from attn_monitor.tensorboard_plugin.plugin import STATIC
from tests.board import Server, start_command, start_in_process
from tests.browser import Browser, open_browser
from tests.event_data import HOSTILE, StoredRun, make_event, make_run

pytestmark = pytest.mark.slow

SICK = "layers.1.attn"
EVENTS = {
    20: [make_event(20, SICK, 3)],
    30: [make_event(30, "layers.0.attn", 1)],
    40: [make_event(40, SICK, 3, severity="critical", state="critical")],
    50: [make_event(50, "layers.0.attn", 1, state="ended")],
}
ENTRY = "data/plugin_entry.html?name=attn_monitor"
PAGE = "document.body.attention"
SCALARS = "/data/plugin/scalars/scalars"
READY = "document.body.dataset.ready === 'true'"
DRAWN = f"{PAGE}.state().drawn"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Server:
    folder = tmp_path_factory.mktemp("logs")
    make_run(events=EVENTS).write(folder / "one")
    make_run(steps=(0, 20, 40, 80), seed=5).write(folder / "two")
    server = start_in_process(folder)
    server.wait(lambda server: server.get("runs").body == ["one", "two"])
    return server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The tab's page, drawn; afterwards nothing may have gone wrong in it."""
    yield from opened(browser, server.url)


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


def test_the_heat_map_has_a_cell_for_every_head_with_its_value(page: Browser, tmp_path: Path) -> None:
    one, two = make_run(), make_run(steps=(0, 20, 40, 80), seed=5)
    assert state(page)["step"] == 80
    assert state(page)["runs"] == ["one", "two"]
    assert state(page)["statistic"] == "saturation_ratio"
    assert_cells(page, "one", one.tables["saturation_ratio"][-1])
    assert_cells(page, "two", two.tables["saturation_ratio"][-1])
    assert [len(row) for row in cells(page, "one")] == [5, 5, 3]
    for layer, head in ((0, 0), (1, 3), (2, 2)):
        value = one.tables["saturation_ratio"][-1, layer, head]
        colour = PALETTE[color_indices("saturation_ratio", value[None], 0.5)][0]
        np.testing.assert_allclose(pixel(page, "one", layer, head), colour, atol=12)
    assert "3 layers, up to 5 heads, step 80" in page.run("document.querySelector('.run canvas').ariaLabel")
    page.screenshot(tmp_path / "tab.png", whole=True)


@pytest.mark.parametrize("scale", [Scale("log", 0.01, 10.0), Scale("linear", 0.0, 0.5), Scale("signed", -1e3, 1e3)])
def test_values_stand_where_they_stand_in_the_pictures(page: Browser, scale: Scale) -> None:
    values = [-5e3, -20.0, -1e-3, 0.0, 0.003, 0.01, 0.2, 0.5, 3.0, 9.9, 40.0, 1e9]
    options = json.dumps({"kind": scale.kind, "low": scale.low, "high": scale.high})
    module = f"{page.run('location.origin')}/data/plugin/attn_monitor/index.js"
    found = page.run(f"import('{module}').then((view) => {json.dumps(values)}.map(view.positions({options})))")
    assert found == pytest.approx([scale.position(value) for value in values])


@pytest.mark.parametrize(
    ("statistic", "limit"), [("saturation_ratio", 0.5), ("saturation_ratio", None), ("logit_max", None)]
)
def test_colours_are_those_of_the_pictures(page: Browser, statistic: str, limit: float | None) -> None:
    values = [-2e3, -3.0, 0.0, 0.01, 0.04, 0.3, 0.49, 0.5, 0.51, 1.2, 4.0, 11.0, 900.0]
    scale = scale_of(statistic)
    options = {"scale": {"kind": scale.kind, "low": scale.low, "high": scale.high}, "threshold": limit}
    module = f"{page.run('location.origin')}/data/plugin/attn_monitor/index.js"
    found = page.run(f"import('{module}').then((view) => {values}.map(view.colours({json.dumps(options)})))")
    rgb = [[int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(",")] for text in found]
    # The pictures have 64 colours, the page has more: they differ by half a step of the map at most.
    np.testing.assert_allclose(rgb, PALETTE[color_indices(statistic, np.array(values), limit)], atol=12)


def test_the_selector_and_the_slider_change_what_is_shown(page: Browser) -> None:
    one, two = make_run(), make_run(steps=(0, 20, 40, 80), seed=5)
    page.run("""(() => { const select = document.querySelector("select[aria-label=Statistic]");
        select.value = "entropy_normalized"; select.dispatchEvent(new Event("change")); })()""")
    page.wait(f"{PAGE}.state().painted.every(({{statistic}}) => statistic === 'entropy_normalized')")
    assert_cells(page, "one", one.tables["entropy_normalized"][-1])
    # the steps of both runs: 0 10 20 30 40 50 60 80; at 30 the second run shows its step 20
    page.run("""(() => { const slider = document.querySelector("input[type=range]");
        slider.value = 3; slider.dispatchEvent(new Event("input")); })()""")
    page.wait(f"{PAGE}.state().painted.every(({{step}}) => step === 30)")
    assert_cells(page, "one", one.tables["entropy_normalized"][3])
    assert_cells(page, "two", two.tables["entropy_normalized"][1])
    assert page.run("document.querySelector('.step').textContent") == "30 (4 of 8)"


def test_a_click_shows_the_lines_of_that_head(page: Browser, tmp_path: Path) -> None:
    run = make_run()
    page.click(*place(page, "one", 2, 1))
    page.wait(f"{PAGE}.state().selected.layer === 'layers.2.attn' && {PAGE}.app.drawing === {PAGE}.app.selected")
    page.wait(DRAWN)
    assert state(page)["selected"] == {"run": "one", "layer": "layers.2.attn", "head": 1}
    charts = state(page)["charts"]
    assert set(charts) == {*run.tables, "factors"} - {"nonfinite", "scale_ratio"}
    assert page.run("document.querySelector('.flat').textContent") == (
        "Without a chart: scale ratio (scale·√d_k) is 1 throughout; nonfinite is 0 throughout"
    )
    data = page.run(f"{PAGE}.app.plots.find(({{name}}) => name === 'q_rms').plot.data")
    assert data[0] == [0, 10, 20, 30, 40, 50, 60, 80]  # both runs, and the loss of both
    assert [value for value in data[1] if value is not None] == run.tables["q_rms"][:, 2, 1].tolist()
    np.testing.assert_allclose([value for value in data[3] if value is not None], run.scalars["train_loss"], rtol=1e-6)
    values = [state_run.tables["saturation_ratio"][-1, 2, 1] for state_run in (run, make_run((0, 20, 40, 80), seed=5))]
    assert page.run("document.querySelector('.readout').textContent") == (
        f"layers.2.attn, head 1, shown: step 80 · one: {values[0]:.4g} · two: {values[1]:.4g}"
    )
    page.screenshot(tmp_path / "head.png", whole=True)


def test_the_factors_are_stacked_and_sum_up_to_the_growth(page: Browser) -> None:
    page.click(*place(page, "one", 1, 3))
    page.wait(f"{PAGE}.state().selected.head === 3 && {PAGE}.app.drawing === {PAGE}.app.selected")
    page.wait(DRAWN)
    data = page.run(f"{PAGE}.app.plots.find(({{name}}) => name === 'factors').plot.data")
    run = make_run()
    total = np.log10(run.tables["qk_std"][:, 1, 3] / run.tables["qk_std"][0, 1, 3])
    np.testing.assert_allclose(data[11], total, atol=1e-5)
    top, bottom = np.array(data[5]), np.array(data[10])  # the highest and the lowest of the stacks
    np.testing.assert_allclose(top + bottom, total, atol=1e-5)
    words = page.run("document.querySelector('.growth').textContent")
    assert words.startswith("Step 0 to 60: logit std \N{MULTIPLICATION SIGN}")
    assert all(
        factor in words
        for factor in (
            "scale·√d_k \N{MULTIPLICATION SIGN}1 ",
            "query norm \N{MULTIPLICATION SIGN}",
            "key norm \N{MULTIPLICATION SIGN}",
            "alignment \N{MULTIPLICATION SIGN}",
        )
    )


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


def test_open_events_are_outlined_and_summed_up(page: Browser) -> None:
    opened: dict[int, dict[str, str]] = {}
    for step in (10, 20, 30, 40, 60):
        page.run(f"{PAGE}.app.setStep({step})")
        opened[step] = page.run(
            f"Object.fromEntries([...{PAGE}.app.maps.get('one').open]"
            ".map(([key, {severity, since}]) => [key, `${severity} since ${since}`]))"
        )
    assert opened == {
        10: {},
        20: {"1:3": "warning since 20"},
        30: {"1:3": "warning since 20", "0:1": "warning since 30"},
        40: {"1:3": "critical since 40", "0:1": "warning since 30"},
        60: {"1:3": "critical since 40"},
    }
    summary = page.run("document.querySelector('.summary').textContent")
    assert summary.startswith("1 saturated head at step 60 (1 critical) · first ever: layers.1.attn head 3, step 20 · ")
    assert "highest saturation ratio: layers.1.attn head 3, " in summary


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


def test_a_run_can_be_hidden_and_shown(page: Browser) -> None:
    page.run("document.querySelectorAll('.runs input')[0].click()")
    page.wait(f"{PAGE}.state().runs.join() === 'two'")
    page.wait("document.querySelectorAll('.run canvas').length === 1")
    assert state(page)["steps"] == [0, 20, 40, 80]
    page.run("document.querySelectorAll('.runs input')[0].click()")
    page.wait(f"{PAGE}.state().runs.join() === 'one,two' && {PAGE}.app.maps.get('one').frame")
    page.wait(DRAWN)


def test_light_and_dark(page: Browser, tmp_path: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    for scheme, colour in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(23, 25, 28)")):
        page.prefer(scheme)
        page.wait(f"{background} === '{colour}'")
        page.screenshot(tmp_path / f"{scheme}.png")
    page.press("d")
    page.wait(f"{background} === 'rgb(255, 255, 255)'")
    page.prefer("light")


def test_a_pointer_over_a_cell_reads_it(page: Browser) -> None:
    page.hover(*place(page, "one", 1, 2))
    page.wait("!document.querySelector('.tip').hidden")
    value = make_run().tables["saturation_ratio"][-1, 1, 2]
    assert page.run("document.querySelector('.tip').textContent") == f"layers.1.attn, head 2: {value:.4g}"
    page.hover(*place(page, "one", 2, 4))  # a head that this layer does not have
    page.wait("document.querySelector('.tip').hidden")


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


QUICKLY = {
    "runs toggled": "[0, 1, 0, 0, 1, 0, 1, 1].map((place) => () => boxes()[place].click())",
    "a run hidden": "[() => boxes()[0].click()]",
    "all hidden and one shown": "[0, 1, 1].map((place) => () => boxes()[place].click())",
    "beside changed": "['', 'train_loss', '', 'train_loss', ''].map((value) => () => beside(value))",
    "read again": "[0, 1, 2].map(() => () => { app.metas.get('one').events = -1; app.refresh(); })",
    "heads chosen": "[0, 1, 2, 4].map((head) => () => app.select({run: 'one', layer: 'layers.0.attn', head}))",
    "all of it": """[() => boxes()[1].click(), () => beside(''), () => boxes()[1].click(),
        () => app.select({run: 'one', layer: 'layers.0.attn', head: 2}), () => boxes()[0].click(), () => beside('')]""",
}


@pytest.mark.parametrize("gap", [0, 60, 250])
@pytest.mark.parametrize("what", QUICKLY)
def test_whatever_is_done_quickly_leaves_one_chart_a_statistic_of_the_chosen_runs(
    page: Browser, what: str, gap: int
) -> None:
    page.run(f"""(async () => {{
        const {{app}} = {PAGE};
        for (const name of ["line", "scalar", "events", "meta"]) {{  // as slow as a large run, and never in order
            const real = app.source[name];
            let count = 0;
            app.source[name] = async (...query) => {{
                const answer = await real(...query);
                await new Promise((resolve) => setTimeout(resolve, [40, 90, 10][count++ % 3]));
                return answer;
            }};
        }}
        const boxes = () => document.querySelectorAll(".runs input");
        const beside = (value) => {{
            const select = document.querySelector("select[aria-label^=Scalar]");
            select.value = value;
            select.dispatchEvent(new Event("change"));
        }};
        for (const step of {QUICKLY[what]}) {{
            step();
            await new Promise((resolve) => setTimeout(resolve, {gap}));
        }}
    }})()""")
    page.wait(DRAWN)
    time.sleep(0.7)  # what was overtaken would come now
    page.wait(DRAWN)
    shown = state(page)
    statistics = page.run(
        "[...document.querySelectorAll('.charts figure')].map((card) => card.dataset.statistic ?? null)"
    )
    drawn = sorted(name for name in statistics if name)
    assert drawn == sorted(set(make_run().tables) - {"nonfinite", "scale_ratio"})
    growths = page.run("[...document.querySelectorAll('.charts figure.wide')].map((card) => card.dataset.factors)")
    assert growths == shown["runs"] == page.run("[...document.querySelectorAll('.run h2')].map((title) => title.title)")
    losses = len(growths) if page.run(f"{PAGE}.app.loss") else 0
    lines = page.run(
        f"{PAGE}.app.plots.filter(({{name}}) => name !== 'factors').map(({{plot}}) => plot.series.length - 1)"
    )
    assert lines == [len(growths) + losses] * len(drawn)


def test_no_run_leaves_no_chart(page: Browser) -> None:
    for place in (0, 1):
        page.run(f"document.querySelectorAll('.runs input')[{place}].click()")
    page.wait("document.querySelector('.banner').textContent === 'No run is chosen.'")
    time.sleep(0.3)
    assert page.run("document.querySelectorAll('.charts figure, .run, .events li, .causes p').length") == 0


def test_small_numbers_are_on_their_axes(browser: Browser, tmp_path: Path) -> None:
    run = make_run()
    fall = np.geomspace(3e-3, 2e-6, 7)[:, None, None] * np.ones((1, 3, 5))
    run.tables = {**run.tables, "grad_logits_norm": fall.astype(np.float32)}
    flat = (2e-5 + 1e-5 * np.linspace(0, 1, 7))[:, None, None] * np.ones((1, 3, 5))
    run.tables["grad_probs_norm"] = flat.astype(np.float32)
    for page in drawn_alone(browser, tmp_path, run):
        for name, wanted in (("grad_logits_norm", {"0.01", "1e-4"}), ("grad_probs_norm", {"2e-5", "3e-5"})):
            labels = page.run(
                f"{PAGE}.app.plots.find(({{name}}) => name === '{name}').plot.axes[1]._values.filter((one) => one)"
            )
            assert wanted <= set(labels)
            assert "0" not in labels
            assert len(set(labels)) == len(labels)


def drawn_alone(browser: Browser, folder: Path, *runs: StoredRun) -> Iterator[Browser]:
    """Open the tab over runs called run0, run1, ..."""
    for index, run in enumerate(runs):
        run.write(folder / "logs" / f"run{index}")
    server = start_in_process(folder / "logs")
    server.wait(lambda server: len(server.get("runs").body) == len(runs))
    yield from opened(browser, server.url)


def test_the_selected_head_has_corners_that_no_event_has(page: Browser, tmp_path: Path) -> None:
    page.run(f"{PAGE}.app.select({{run: 'two', layer: 'layers.1.attn', head: 2}})")
    page.run(f"{PAGE}.app.setStep(20)")
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        page.wait(f"getComputedStyle(document.body).colorScheme === '{scheme}'")
        page.screenshot(tmp_path / f"selected_{scheme}.png")
        for run in ("one", "two"):
            corner, middle, other = (
                page.run(f"""(() => {{
                    const map = {PAGE}.app.maps.get("{run}");
                    const [x, y] = [map.left + {head} * map.cell.width, map.top + map.cell.height];
                    const pixels = map.canvas.getContext("2d").getImageData(x + {right} - 2, y - 2, 5, 5).data;
                    return [...pixels].flatMap((_, at) =>
                        at % 4 || pixels[at + 3] < 255 ? [] : [[...pixels.slice(at, at + 3)]]);
                }})()""")
                for head, right in ((2, 0), (2, 18), (4, 0))
            )
            cyan = [any(r < 60 and g > 190 and b > 220 for r, g, b in pixels) for pixels in (corner, middle, other)]
            assert cyan == [True, False, False]
            black = [any(max(pixel) < 8 for pixel in pixels) for pixels in (corner, middle)]
            assert black == [False, False]
    page.prefer("light")
    words = page.run("document.querySelector('.legend').textContent")
    assert "selected" in words
    assert page.run("document.querySelector('.legend canvas.selected').width") > 0


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


@pytest.mark.parametrize(
    ("names", "before", "own", "after"),
    [
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], "model.layers.", ["0", "1"], ".self_attn"),
        (["encoder.0.attn", "decoder.0.attn"], "", ["encoder", "decoder"], ".0.attn"),
        (["blocks.1.attn", "blocks.11.attn"], "blocks.", ["1", "11"], ".attn"),
        (["attn", "attn.attn", "x.attn"], "", ["attn", "attn.attn", "x.attn"], ""),
        (["a.b", "a.b.c"], "a.", ["b", "b.c"], ""),
        (["only.one.attn"], "", ["only.one.attn"], ""),
        ([], "", [], ""),
    ],
)
def test_names_of_layers_are_parted(page: Browser, names: list[str], before: str, own: list[str], after: str) -> None:
    module = f"{page.run('location.origin')}/data/plugin/attn_monitor/index.js"
    found = page.run(f"import('{module}').then((view) => view.parted({json.dumps(names)}))")
    assert found == {"before": before, "own": own, "after": after}


def test_rows_can_be_told_apart_and_neighbours_are_level(browser: Browser, tmp_path: Path) -> None:
    stem = "a_model_with_a_long_name.text_decoder_of_the_whole"
    long = [f"{stem}.{part}.{row}.{kind}" for row in range(2) for part in ("up", "down") for kind in ("self", "cross")]
    events = {20: [make_event(20, long[0], 1, message="word " * 40)]}
    runs = [make_run(layers=long, events=events), make_run(layers=[f"m.{row}.self_attn" for row in range(3)])]
    for page in drawn_alone(browser, tmp_path, *runs):
        labels = page.run(f"[...{PAGE}.app.maps.values()].map((map) => map.labels)")
        assert [len(set(one)) for one in labels] == [8, 3]
        assert labels[1] == ["0", "1", "2"]
        tops = page.run("[...document.querySelectorAll('.run canvas')].map((one) => one.getBoundingClientRect().top)")
        assert tops[0] == tops[1]
        assert page.run(f"[...{PAGE}.app.maps.values()].map((map) => map.cell.height)") == [26, 26]
        x, y = place(page, "run0", 2, 0)
        page.hover(x - page.run(f"{PAGE}.app.maps.get('run0').left"), y)
        page.wait(f"document.querySelector('.tip').textContent === '{long[2]}'")


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


def test_a_missing_scale_is_said_where_it_is_looked_for(browser: Browser, tmp_path: Path) -> None:
    usual, missing = make_run(), make_run(seed=5)
    missing.tables = {**missing.tables, "scale_ratio": np.full_like(missing.tables["scale_ratio"], 32**0.5)}
    for page in drawn_alone(browser, tmp_path, usual, missing):
        start = "scale·√d_k is 5.66, textbook 1"
        panels = page.run(
            "[...document.querySelectorAll('figure.wide')]"
            ".map((one) => one.querySelector('.alarm')?.textContent ?? null)"
        )
        assert panels[0] is None
        assert panels[1].startswith(start)
        [cause] = page.run("[...document.querySelectorAll('.causes .alarm')].map((one) => one.textContent)")
        assert cause.startswith(f"run1: {start}")
        page.screenshot(tmp_path / "scale.png", whole=True)


def test_the_lines_have_a_legend(page: Browser) -> None:
    words = page.run("[...document.querySelectorAll('.keys .part')].map((one) => one.textContent)")
    assert words == ["one", "two", "warning", "critical", "ended", "the step shown", "the limit", "train_loss"]


def test_what_did_not_grow_is_drawn_flat(page: Browser) -> None:
    page.run(f"{PAGE}.app.select({{run: 'one', layer: 'layers.0.attn', head: 2}})")
    page.wait(DRAWN)
    low, high, labels = page.run(f"""(() => {{
        const {{scales, axes}} = {PAGE}.app.plots.find(({{name}}) => name === "factors").plot;
        return [scales.y.min, scales.y.max, axes[1]._values];
    }})()""")
    assert (low, high) == (pytest.approx(np.log10(0.5)), pytest.approx(np.log10(2)))
    assert [label.removeprefix("\N{MULTIPLICATION SIGN}") for label in labels] == ["0.5", "0.7", "1", "1.5", "2"]


def test_growth_does_not_move_the_charts_when_it_comes(page: Browser) -> None:
    tops = page.run(f"""(async () => {{
        const {{app}} = {PAGE};
        const real = app.source.line;
        app.source.line = async (...query) => {{
            const answer = await real(...query);
            await new Promise((resolve) => setTimeout(resolve, 120));
            return answer;
        }};
        app.select({{run: "one", layer: "layers.0.attn", head: 1}});
        const tops = [];
        while (!tops.length || app.charts.dataset.ready !== "true") {{
            await new Promise((resolve) => setTimeout(resolve, 30));
            const first = app.charts.querySelector("figure[data-statistic=saturation_ratio]");
            if (first && app.drawing === app.selected) tops.push(first.offsetTop);
        }}
        return tops;
    }})()""")
    assert len(tops) > 8
    assert max(tops[-9:]) - min(tops[-9:]) <= 2
    assert len(set(tops)) == 1


def test_a_run_that_starts_later_says_so(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(steps=(0, 10, 20)), make_run(steps=(20, 30))]
    for page in drawn_alone(browser, tmp_path, *runs):
        page.run(f"{PAGE}.app.setStep(10)")
        page.wait(f"{PAGE}.state().painted[1] === null")
        said = page.run(
            "[...document.querySelectorAll('.run .note')].map((one) => one.hidden ? null : one.textContent)"
        )
        assert said == [None, "No observation at or before step 10: the first of this run is at step 20."]
        assert page.run("document.querySelectorAll('.summary')[1].textContent") == ""
        page.run(f"{PAGE}.app.setStep(20)")
        page.wait("document.querySelectorAll('.run .note')[1].hidden")


def test_many_layers_leave_room_for_the_lines_of_a_head(browser: Browser, tmp_path: Path) -> None:
    names = [f"model.layers.{row}.self_attn" for row in range(80)]
    for page in drawn_alone(
        browser, tmp_path, *[make_run(steps=(0, 10), layers=names, heads=7, seed=seed) for seed in (0, 1)]
    ):
        assert page.run("document.querySelector('.head').getBoundingClientRect().bottom") < 750
        assert page.run("document.querySelector('.status button').hidden")
        page.resize(640, 700)  # one run below the other: the charts are out of sight, which one can tell
        page.wait("!document.querySelector('.status button').hidden")
        assert page.run("document.querySelector('.readout').getBoundingClientRect().bottom") <= 700
        page.run("document.querySelector('.status button').click()")
        page.wait("document.querySelector('.charts').getBoundingClientRect().top < 300")
        page.resize(1280, 900)


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
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "index.css"))
    script = (STATIC / "index.js").read_text(encoding="utf-8")
    path = folder / "report.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body>"
        f"<script>{(STATIC / 'uPlot.iife.min.js').read_text(encoding='utf-8')}</script>"
        f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
        f'<script type="module">{script}\n'
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


def test_80_layers_of_64_heads_over_2000_steps_are_painted_within_3_seconds(browser: Browser, tmp_path: Path) -> None:
    layers = [f"model.layers.{index}.self_attn" for index in range(80)]
    run = make_run(steps=range(2000), layers=layers, heads=64)
    run.tables = {name: run.tables[name] for name in ("saturation_ratio", "q_rms")}
    run.write(tmp_path / "large")
    with start_command(tmp_path) as server:
        # What the server needs to read the file is its own time, the same for every tab. Scalars tell when it is done:
        # to ask the tab for it would fill the tab's cache.
        def loaded(server: Server) -> bool:
            answer = server.ask(SCALARS, run="large", tag="train_loss")
            return answer.status == 200 and answer.body[-1][1] == 1999

        server.wait(loaded, 120)
        browser.problems.clear()
        browser.go("about:blank")
        start = time.monotonic()
        browser.go(server.url + ENTRY)
        browser.wait(READY)
        seconds = time.monotonic() - start
        assert state(browser)["steps"][-1] == 1999
        found = np.array(cells(browser, "large")[:-1], np.float32)
        np.testing.assert_array_equal(found, run.tables["saturation_ratio"][-1, :-1])
        print(f"first paint after {seconds:.2f} s")
        assert seconds < 3.0
        browser.wait(DRAWN, 60)
        start = time.monotonic()
        browser.run(f"{PAGE}.app.setStep(1000)")
        browser.wait(f"{PAGE}.cells('large')[0][0] === {run.tables['saturation_ratio'][1000, 0, 0].item()!r}")
        print(f"a far step after {time.monotonic() - start:.2f} s")
        browser.screenshot(tmp_path / "large.png")
        assert browser.problems == []


# -- what went wrong ---------------------------------------------------------------------------------------------------


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

"""The heat map of the Attention tab in a real browser: values, colours, outlines, names, reading a cell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from attn_monitor.dashboards.colors import PALETTE, color_indices
from attn_monitor.scales import Scale, scale_of
from tests.browser import Browser
from tests.event_data import make_event, make_run
from tests.tab_browser.pages import PAGE, assert_cells, cells, drawn_alone, pixel, place, state

pytestmark = pytest.mark.slow


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


def test_a_pointer_over_a_cell_reads_it(page: Browser) -> None:
    page.hover(*place(page, "one", 1, 2))
    page.wait("!document.querySelector('.tip').hidden")
    value = make_run().tables["saturation_ratio"][-1, 1, 2]
    assert page.run("document.querySelector('.tip').textContent") == f"layers.1.attn, head 2: {value:.4g}"
    page.hover(*place(page, "one", 2, 4))  # a head that this layer does not have
    page.wait("document.querySelector('.tip').hidden")


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

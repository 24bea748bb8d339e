"""The lines and factors of the chosen head in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.browser import Browser
from tests.event_data import make_run
from tests.tab_browser.pages import DRAWN, PAGE, drawn_alone, place, state

pytestmark = pytest.mark.slow


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


def test_a_run_can_be_hidden_and_shown(page: Browser) -> None:
    page.run("document.querySelectorAll('.runs input')[0].click()")
    page.wait(f"{PAGE}.state().runs.join() === 'two'")
    page.wait("document.querySelectorAll('.run canvas').length === 1")
    assert state(page)["steps"] == [0, 20, 40, 80]
    page.run("document.querySelectorAll('.runs input')[0].click()")
    page.wait(f"{PAGE}.state().runs.join() === 'one,two' && {PAGE}.app.maps.get('one').frame")
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
    for run in (0, 1):
        page.run(f"document.querySelectorAll('.runs input')[{run}].click()")
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

"""docs/debugging.md: what the trainings of `tests.docs_pages.runs` printed, how they went, and their pictures."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from attn_monitor.growth import PRODUCT, REST, SPREAD, grown_factors
from tests.board import Server, start_in_process
from tests.browser import Browser, find_browser
from tests.docs_pages.blocks import DOCS, ROOT, filled, row_of, table_of
from tests.docs_pages.runs import COMMANDS, FOLDER, Run, load
from tests.screenshots import ATTENTION, READY, TAB, take

PAGE = DOCS / "debugging.md"
START = DOCS / "start.md"
IMAGES = DOCS / "images"
UNSCALED, SCALED, REPAIRED = COMMANDS
ONSET = 19
"""The step of the map: some heads are sick by then and some are not."""
SQRT_DK = math.sqrt(32)
WIDTH = 118


def said(run: Run, most: int = 99) -> str:
    """Return what the monitor printed, wrapped as a terminal would."""
    lines = []
    for text in run.said[:most]:
        for number, line in enumerate(text.splitlines()):
            start = "" if number == 0 else line[: len(line) - len(line.lstrip())]
            lines += textwrap.wrap(
                line, WIDTH, subsequent_indent=start + "    ", break_long_words=False, break_on_hyphens=False
            )
    return "```text\n" + "\n".join(lines or ["(nothing)"]) + "\n```\n"


def outcome(runs: Mapping[str, Run]) -> str:
    """Return the trainings side by side."""
    rows = {
        "loss, last 20 steps": [f"{run.loss:.3f}" for run in runs.values()],
        "largest `logit_row_std / sqrt(d_k)`": [f"{_largest_ratio(run):.2f}" for run in runs.values()],
        "heads flagged, of 16": [str(len({(e["layer"], e["head"]) for e in run.events})) for run in runs.values()],
        "first flag": [_step(min((e["step"] for e in run.events), default=None)) for run in runs.values()],
        "first critical event": [
            _step(min((e["critical_step"] for e in run.events if e["critical_step"] is not None), default=None))
            for run in runs.values()
        ],
        "lowest mean `jacobian_trace`": [
            f"{min(map(_mean, run.heads['jacobian_trace'])):.2f}" for run in runs.values()
        ],
        "the same at the end": [f"{_mean(run.heads['jacobian_trace'][-1]):.2f}" for run in runs.values()],
        "worst head at the end: `entropy_normalized`": [
            f"{min(run.heads['entropy_normalized'][-1]):.3f}" for run in runs.values()
        ],
        "`jacobian_trace`": [f"{min(run.heads['jacobian_trace'][-1]):.3f}" for run in runs.values()],
    }
    head = ("", *(f"`{run.recipe}`" for run in runs.values()))
    return table_of(head, [row_of(label, *cells) for label, cells in rows.items()])


def factors(run: Run) -> str:
    """Return how the factors of the widest head came to be what they are."""
    last = run.heads["logit_row_std"]
    step, head = max(
        ((step, head) for step in range(len(run.steps)) for head in range(len(last[step]))),
        key=lambda place: last[place[0]][place[1]],
    )
    names = (SPREAD, "qk_std", *PRODUCT)
    first, then = ({name: run.heads[name][at][head] for name in names} for at in (0, step))
    grown = {SPREAD: then[SPREAD] / first[SPREAD], **grown_factors(then, first)}
    for values in (first, then):
        values[REST] = values[SPREAD] / values["qk_std"]
    rows = [row_of(f"`{name}`", f"{first[name]:.3g}", f"{then[name]:.3g}", f"{by:.3g} x") for name, by in grown.items()]
    layer, index = divmod(head, 4)
    return f"Head {index} of `layers.{layer}.attn`, the widest:\n\n" + table_of(
        ("", f"step {run.steps[0]}", f"step {run.steps[step]}", "growth"), rows
    )


def losses(runs: Mapping[str, Run]) -> str:
    """Return the loss along the way."""
    ends = (20, 50, 100, 200, 300)
    rows = [
        row_of(f"`{run.recipe}`", *(f"{_mean(run.losses[end - 10 : end]):.2f}" for end in ends))
        for run in runs.values()
    ]
    return table_of(("loss, mean of the 10 steps before step", *map(str, ends)), rows)


def made_with() -> str:
    """Return what the numbers are from."""
    return (
        f"torch {torch.__version__}, pytorch-lightning {version('pytorch-lightning')}, Python "
        f"{platform.python_version()}, on a CPU with one thread. Other versions and\nthread counts round differently, "
        "which moves single numbers and not the story.\n"
    )


def report(run: Run) -> str:
    """Return the summary of `attn-monitor report`."""
    command = [sys.executable, "-m", "attn_monitor", "report", str(FOLDER / run.name), "--summary-only"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    header, heads, grew, beside, *_ = done.stdout.rstrip().split("\n\n")
    parts = [header, *_shortened(heads, 4), *_shortened(grew, 3), beside]
    lines = [
        wrapped
        for line in "\n".join(parts).splitlines()
        for wrapped in textwrap.wrap(line, 150, subsequent_indent="      ", drop_whitespace=False) or [""]
    ]
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def _shortened(part: str, lines: int) -> list[str]:
    return ["", *part.splitlines()[:lines], "  ...", ""]


def written(runs: Mapping[str, Run]) -> str:
    """Return the page with what the trainings said and left."""
    blocks = {
        "outcome": outcome(runs),
        "losses": losses(runs),
        "made with": made_with(),
        "factors": factors(runs[UNSCALED]),
        "report": report(runs[UNSCALED]),
        **{f"said {name}": said(run) for name, run in runs.items()},
    }
    return filled(PAGE.read_text(encoding="utf-8"), blocks)


def first_flag(runs: Mapping[str, Run]) -> str:
    """Return the page for beginners with the first that was said of the collapsing training."""
    return filled(START.read_text(encoding="utf-8"), {"first flag": said(runs[UNSCALED], most=2)})


def take_pictures(images: Path = IMAGES) -> None:
    """Take pictures of the tab, if there is a browser."""
    chromium = find_browser()
    if chromium is None:
        print("No Chromium found: the pictures of docs/debugging.md stay as they are.", file=sys.stderr)
        return
    runs = load()
    with Browser(chromium) as browser, tempfile.TemporaryDirectory() as alone:
        (Path(alone) / UNSCALED).symlink_to(FOLDER / UNSCALED)
        browser.resize(1180, 560)
        _show(browser, Path(alone), runs, ONSET)
        take(browser, images / "debugging_map.png")
        browser.resize(1180, 760)
        browser.run("document.querySelector('.head').scrollIntoView()")
        browser.run("window.scrollBy(0, -60)")
        take(browser, images / "debugging_head.png")
        browser.resize(1180, 620)
        _show(browser, FOLDER, runs, runs[UNSCALED].steps[-1])
        browser.run(f"{ATTENTION}.app.setStatistic('jacobian_trace')")
        take(browser, images / "debugging_repaired.png")


def _show(browser: Browser, folder: Path, runs: Mapping[str, Run], step: int) -> None:
    """Show the tab of a folder at a step, once TensorBoard has read everything."""
    expected = {name: run.steps[-1] for name, run in runs.items() if (folder / name).exists()}
    server = start_in_process(folder)
    server.wait(lambda server: set(server.get("runs").body) >= set(expected), 120)
    server.wait(lambda server: _latest(server, expected) == expected, 120)
    browser.go(server.url + TAB)
    browser.wait(READY, 60)
    browser.run(f"{ATTENTION}.app.setStep({step})")


def _latest(server: Server, runs: Iterable[str]) -> dict[str, int]:
    """Return the latest step that the server knows of each run."""
    return {run: server.get("meta", run=run).body["steps"][-1] for run in runs}


def _largest_ratio(run: Run) -> float:
    return max(max(values) for values in run.heads["logit_row_std"]) / SQRT_DK


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _step(step: int | None) -> str:
    return "none" if step is None else f"step {step}"

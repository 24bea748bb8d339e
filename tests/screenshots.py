"""Take the pictures of docs/images from the runs that `make demo` leaves: `make screenshots`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from PIL import Image

from tests.board import Server, start_in_process
from tests.browser import Browser, find_browser

ROOT = Path(__file__).parent.parent
TAB = "data/plugin_entry.html?name=attn_monitor"
READY = "['.attn', '.charts'].every((name) => document.querySelector(name)?.dataset.ready === 'true')"
ATTENTION = "document.querySelector('.attn').attention"


def take(browser: Browser, path: Path) -> None:
    """Save a picture of the window, with few enough colours to be small."""
    browser.screenshot(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1).save(path, optimize=True)


def take_tab(browser: Browser, server: Server, folder: Path) -> None:
    """Show both runs side by side, in light and dark, and the lines of the head that went first."""
    browser.resize(1360, 860)
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.go("about:blank")
        browser.go(server.url + TAB)
        browser.wait(READY, 60)
        browser.run(f"{ATTENTION}.app.setStep(19)")  # some heads are sick by then and some are not
        take(browser, folder / ("attention_tab.png" if scheme == "light" else "attention_tab_dark.png"))
    browser.prefer("light")
    browser.run("document.querySelector('.head').scrollIntoView()")
    browser.run("window.scrollBy(0, -60)")
    take(browser, folder / "attention_head.png")
    browser.run(f"{ATTENTION}.app.setStatistic('entropy_normalized')")
    browser.run("window.scrollTo(0, 0)")
    take(browser, folder / "attention_entropy.png")


def take_native(browser: Browser, server: Server, folder: Path) -> None:
    """Show TensorBoard's own dashboard of the same runs."""
    browser.resize(1360, 860)
    browser.go(f"{server.url}#timeseries")
    browser.wait("document.querySelectorAll('card-view').length > 3", 60)
    browser.wait("document.querySelectorAll('card-view svg path, card-view canvas').length > 3", 60)
    browser.run("new Promise((resolve) => setTimeout(resolve, 2500))")  # its charts grow into place
    take(browser, folder / "timeseries.png")


def take_report(browser: Browser, run: Path, folder: Path) -> None:
    """Show the report of one run."""
    path = folder / "report.html"
    subprocess.run(
        [sys.executable, "-m", "attn_monitor", "report", str(run), "--output", str(path)], check=True, cwd=ROOT
    )
    try:
        browser.resize(1360, 860)
        browser.go(path.resolve().as_uri())
        browser.wait(READY, 60)
        take(browser, folder / "report.png")
    finally:
        path.unlink()


def main() -> int:
    """Take all pictures and return 0, or say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logdir", type=Path, default=ROOT / "runs" / "char_gpt")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    chromium = find_browser()
    if chromium is None:
        print("No Chromium found. Install one: apt-get install chromium", file=sys.stderr)
        return 1
    if not options.logdir.is_dir():
        print(f"{options.logdir} is not there. Run `make demo` first.", file=sys.stderr)
        return 1
    server = start_in_process(options.logdir)
    server.wait(lambda server: bool(server.get("runs").body))
    with Browser(chromium) as browser:
        take_tab(browser, server, options.images)
        take_native(browser, server, options.images)
        take_report(browser, options.logdir, options.images)
    return 0


if __name__ == "__main__":
    sys.exit(main())

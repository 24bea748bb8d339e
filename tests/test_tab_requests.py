"""What the server of the Attention tab answers, which files it serves, and how TensorBoard finds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins import base_plugin

from attn_monitor import tags
from attn_monitor.tensorboard_plugin.loader import NAME, Loader
from attn_monitor.tensorboard_plugin.page import FILES, SCRIPT, STATIC, page_file
from tests import browser
from tests.board import PLUGIN, LocalBoard
from tests.event_data import make_run
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("route", "query", "message"),
    [
        ("meta", {}, "`run` is missing from the query."),
        ("meta", {"run": "two"}, "`run` expects one of ['one'], got 'two'."),
        ("events", {"run": ""}, "`run` expects one of ['one'], got ''."),
        ("frames", {"run": "one"}, "`statistic` is missing from the query."),
        ("frames", {"run": "one", "statistic": "x", "first": 0, "count": 1}, "`statistic` expects one of ['saturation"),
        ("frames", {"run": "one", "statistic": "q_rms"}, "`first` is missing"),
        ("frames", {"run": "one", "statistic": "q_rms", "first": -1, "count": 1}, "a whole number from 0, got '-1'"),
        ("frames", {"run": "one", "statistic": "q_rms", "first": "9" * 40, "count": 1}, "a whole number from 0"),
        ("frames", {"run": "one", "statistic": "q_rms", "first": 7, "count": 1}, "an index below 7, the number of"),
        ("frames", {"run": "one", "statistic": "q_rms", "first": 0, "count": 0}, "`count` expects 1 to 1000 steps"),
        ("frames", {"run": "one", "statistic": "q_rms", "first": 0, "count": 1001}, "got 1001."),
        ("line", {"run": "one", "layer": 0}, "`head` is missing"),
        (
            "line",
            {"run": "one", "layer": 3, "head": 0},
            "`layer` and `head` expect indices of a head, got layer 3 of 3",
        ),
        ("line", {"run": "one", "layer": 2, "head": 3}, "got head 3 of 3."),
        ("line", {"run": "one", "layer": "x", "head": 0}, "`layer` expects a whole number from 0, got 'x'."),
        ("line", {"run": "one", "layer": 0, "head": 0, "statistic": "x"}, "`statistic` expects one of"),
        ("scalar", {"run": "one", "tag": "x"}, "`tag` expects one of ['train_loss'], got 'x'."),
    ],
)
def test_a_bad_request_says_what_was_expected(
    served: LocalBoard, route: str, query: dict[str, Any], message: str
) -> None:
    answer = served.get(route, **query)
    assert answer.status == 400
    assert message in answer.body["error"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> LocalBoard:
    folder = tmp_path_factory.mktemp("served")
    make_run().write(folder / "one")
    return LocalBoard(folder)


def test_only_get_is_answered(served: LocalBoard) -> None:
    assert served.post("runs") == (405, {"error": "GET expected, got POST."})


def test_a_fault_of_ours_is_an_answer_and_not_an_exception(served: LocalBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: object) -> None:
        raise RuntimeError("4 GB do not fit: RESOURCE_EXHAUSTED")

    monkeypatch.setattr("attn_monitor.views.run_meta", broken)
    answer = served.get("meta", run="one")
    assert answer.status == 500
    assert "--samples_per_plugin attn_monitor=1000" in answer.body["error"]
    assert served.ask("/data/plugin/scalars/tags").body["one"]["train_loss"]


def test_the_files_of_the_page_are_served(served: LocalBoard) -> None:
    for name in FILES:
        answer = served.ask(f"{PLUGIN}/{name}")
        assert (answer.status, answer.body) == (200, page_file(name))
    listing = served.ask("/data/plugins_listing").body["attn_monitor"]
    assert listing["tab_name"] == "Attention"
    assert listing["enabled"]
    assert listing["loading_mechanism"] == {"type": "IFRAME", "module_path": f"{PLUGIN}/index.js"}


def test_the_page_asks_nothing_of_the_network_and_parses_no_html() -> None:
    script = page_file("index.js")
    for word in ("http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script
    assert "url(" not in (STATIC / "index.css").read_text(encoding="utf-8")


def test_the_vendored_library_has_its_licence_beside_it() -> None:
    version = (STATIC / "uPlot.iife.min.js").read_text(encoding="utf-8")[:200]
    notice = (STATIC / "NOTICE").read_text(encoding="utf-8")
    licence = (STATIC / "LICENSE-uPlot.txt").read_text(encoding="utf-8")
    assert "MIT" in licence
    assert "Leon Sorokin" in licence
    assert "uPlot" in notice
    assert version.partition("(v")[2].partition(")")[0] in notice


def test_the_entry_point_names_the_loader() -> None:
    [entry] = [entry for entry in entry_points(group="tensorboard_plugins") if entry.name == "attn_monitor"]
    assert entry.load() is Loader


def test_a_plugin_that_cannot_be_made_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "attn_monitor.tensorboard_plugin.plugin", None)
    assert Loader().load(base_plugin.TBContext()) is None
    assert "could not be loaded and is left out" in caplog.text


def test_the_wheel_holds_the_files_of_the_page(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    for part in ("attn_monitor", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / part)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    files = [f"{folder.name}/{path.name}" for folder in (STATIC, SCRIPT) for path in folder.iterdir()]
    assert {f"attn_monitor/tensorboard_plugin/{name}" for name in files} <= names
    assert "[tensorboard_plugins]\nattn_monitor = attn_monitor.tensorboard_plugin.loader:Loader" in entries


def test_the_loader_looks_for_the_name_that_is_written() -> None:
    assert NAME == tags.PLUGIN  # two constants, since the entry point must not depend on anything else of ours


def test_the_entry_point_imports_nothing_heavy() -> None:
    code = (
        "import sys, attn_monitor.tensorboard_plugin.loader, attn_monitor.tensorboard_plugin.plugin;"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "pytorch_lightning", "lightning", "torchmetrics"} & set(done.stdout.split())


def test_a_file_that_was_not_installed_is_an_answer(served: LocalBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("STATIC", "index.css"), ("SCRIPT", "index.js")):
        monkeypatch.setattr(f"attn_monitor.tensorboard_plugin.page.{folder}", Path("nowhere"))
        answer = served.get(name)
        assert answer.status == 500
        assert "not installed completely" in answer.body["error"]


def test_without_a_browser_its_tests_skip_and_say_so_or_fail_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(browser, "find_browser", lambda: None)
    monkeypatch.delenv(browser.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        browser.require_browser()
    monkeypatch.setenv(browser.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="ATTN_MONITOR_REQUIRE_BROWSER=1, but this test needs one of"):
        browser.require_browser()

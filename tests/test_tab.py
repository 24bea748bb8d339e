"""The server side of the Attention tab, with real event files behind a real TensorBoard."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.plugins import base_plugin
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor, tags
from attn_monitor.events import AttentionWarning
from attn_monitor.tensorboard_plugin.loader import NAME, Loader
from attn_monitor.tensorboard_plugin.plugin import FILES, STATIC
from tests import browser
from tests.board import PLUGIN, LocalBoard, Server, start_command
from tests.event_data import HOSTILE, make_event, make_run
from tests.models import DIM, HEADS, LIGHTNING_ADVICE, Lit, loader, quiet

pytestmark = LIGHTNING_ADVICE
ROOT = Path(__file__).parent.parent
EVENTS = {20: [make_event(20, "layers.1.attn", 3)], 40: [make_event(40, "layers.1.attn", 3, state="critical")]}


def decode(frames: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(frames["data"]), "<f4").reshape(frames["shape"])


def all_frames(board: LocalBoard | Server, run: str, statistic: str) -> dict[str, Any]:
    answer = board.get("frames", run=run, statistic=statistic, first=0, count=1000)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.body
    return body


def assert_serves(board: LocalBoard | Server) -> None:
    """Compare every route with the run that `make_run(events=EVENTS)` wrote into the folder "one"."""
    run = make_run(events=EVENTS)
    meta = board.get("meta", run="one").body
    assert meta["steps"] == list(run.steps)
    assert meta["layers"] == list(run.layers)
    assert (meta["heads"], meta["head_dims"]) == ([5, 5, 3], [64, 64, 64])
    assert (meta["scalars"], meta["events"]) == (["train_loss"], 2)
    assert {row["name"] for row in meta["statistics"]} == set(run.tables)
    assert meta["statistics"][0]["threshold"] == 0.5
    for name, table in run.tables.items():
        frames = all_frames(board, "one", name)
        assert frames["steps"] == list(run.steps)
        np.testing.assert_array_equal(decode(frames), table)
    piece = board.get("frames", run="one", statistic="q_rms", first=2, count=3).body
    assert piece["steps"] == [20, 30, 40]
    np.testing.assert_array_equal(decode(piece), run.tables["q_rms"][2:5])
    lines = board.get("line", run="one", layer=1, head=3).body["statistics"]
    assert set(lines) == set(run.tables)
    assert lines["alignment"] == {"steps": list(run.steps), "values": run.tables["alignment"][:, 1, 3].tolist()}
    some = board.get("line", run="one", layer=2, head=0, statistic=["q_rms", "k_rms"]).body["statistics"]
    assert set(some) == {"q_rms", "k_rms"}
    assert board.get("events", run="one").body == [EVENTS[20][0], EVENTS[40][0]]
    loss = board.get("scalar", run="one", tag="train_loss").body
    assert loss["steps"] == list(run.steps)
    np.testing.assert_allclose(loss["values"], run.scalars["train_loss"], rtol=1e-6)


def test_routes_return_exactly_what_was_written(tmp_path: Path) -> None:
    make_run(events=EVENTS).write(tmp_path / "one")
    board = LocalBoard(tmp_path)
    assert board.get("runs").body == ["one"]
    assert_serves(board)
    assert_serves(board)  # and again from what is kept


def test_after_a_fit_the_routes_return_what_was_measured(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="fit")
    monitor = AttentionMonitor(statistics=["entropy_normalized", "logit_row_std"], stages=["train", "validate"])
    model = Lit("hand", "sdpa", gain=6.0)
    with pytest.warns(AttentionWarning, match="critical"):
        quiet(callbacks=[monitor], logger=logger).fit(model, loader(5), loader(2))
    board = LocalBoard(tmp_path)
    run, validation = board.get("runs").body
    assert (run, validation) == ("fit/version_0", "fit/version_0 (validation)")
    meta = board.get("meta", run=run).body
    assert meta["steps"] == [step for step, _ in monitor.history] == list(range(5))
    assert meta["layers"] == ["net.blocks.0", "net.blocks.1"]
    assert meta["heads"] == [HEADS, HEADS]
    assert meta["head_dims"] == [DIM // HEADS] * 2
    assert meta["statistics"][0]["threshold"] == 0.5
    assert "train_loss" in meta["scalars"]
    assert not [tag for tag in meta["scalars"] if "attn" in tag]
    names = {row["name"] for row in meta["statistics"]}
    assert {"saturation_ratio", "entropy_normalized", "scale_ratio", "q_rms", "k_rms", "alignment", "qk_std"} <= names
    for name in ("entropy_normalized", "q_rms", "alignment"):
        measured = [[getattr(stats, name).tolist() for stats in layers.values()] for _, layers in monitor.history]
        np.testing.assert_array_equal(decode(all_frames(board, run, name)), np.array(measured, np.float32))
    served = board.get("events", run=run).body
    assert [event["message"] for event in served if event["state"] == "opened"]
    opened = {(event["step"], event["layer"], event["head"]) for event in served if event["state"] != "ended"}
    assert {(event.step, event.layer, event.head) for event in monitor.events} <= opened
    np.testing.assert_allclose(
        board.get("scalar", run=run, tag="train_loss").body["values"], [loss.item() for loss in model.losses], rtol=1e-6
    )
    assert board.get("meta", run=validation).body["layers"] == meta["layers"]


def test_all_steps_are_kept(tmp_path: Path) -> None:
    run = make_run(steps=range(0, 1212, 4), layers=("a", "b"), heads=3)
    run.write(tmp_path / "one")
    board = LocalBoard(tmp_path)
    assert len(board.get("meta", run="one").body["steps"]) == 303
    np.testing.assert_array_equal(decode(all_frames(board, "one", "q_rms")), run.tables["q_rms"])


def test_the_user_still_decides_how_many_steps_are_kept(tmp_path: Path) -> None:
    make_run(steps=range(50)).write(tmp_path / "one")
    board = LocalBoard(tmp_path, "--samples_per_plugin", f"{NAME}=7")
    assert len(board.get("meta", run="one").body["steps"]) == 7


def test_several_runs_and_stages_have_names_of_their_own(tmp_path: Path) -> None:
    make_run(seed=1).write(tmp_path / "a" / "version_0")
    make_run(seed=2).write(tmp_path / "b")
    make_run(seed=3, prefix="val_", scalars={}).write(tmp_path / "b")
    board = LocalBoard(tmp_path)
    assert board.get("runs").body == ["a/version_0", "b", "b (validation)"]
    for seed, name in enumerate(board.get("runs").body, start=1):
        np.testing.assert_array_equal(decode(all_frames(board, name, "k_rms")), make_run(seed=seed).tables["k_rms"])


def test_a_run_that_is_still_being_written_grows(tmp_path: Path) -> None:
    run = make_run(events=EVENTS)
    writer = SummaryWriter(str(tmp_path / "one"))
    run.write(tmp_path, range(3), writer)
    board = LocalBoard(tmp_path)
    assert board.get("meta", run="one").body["steps"] == [0, 10, 20]
    assert len(board.get("events", run="one").body) == 1
    run.write(tmp_path, range(3, 7), writer)
    board.reload()
    assert_serves(board)
    writer.close()


def test_a_resumed_run_drops_what_it_went_back_over(tmp_path: Path) -> None:
    lost = {10: [make_event(10, "layers.0.attn", 1)], 50: [make_event(50, "layers.0.attn", 2)]}
    first, second = make_run(seed=1, events=lost), make_run(seed=2, events={20: EVENTS[20]})
    first.write(tmp_path / "one", range(6))
    second.write(tmp_path / "one", [0])  # a new process writes its names again
    second.write(tmp_path / "one", range(2, 5))
    board = LocalBoard(tmp_path)
    assert board.get("meta", run="one").body["steps"] == [0, 20, 30, 40]
    frames = decode(all_frames(board, "one", "q_rms"))
    np.testing.assert_array_equal(frames, second.tables["q_rms"][[0, 2, 3, 4]])
    assert [event["step"] for event in board.get("events", run="one").body] == [20]


@pytest.mark.parametrize("kind", ["empty directory", "another run"])
def test_without_our_data_there_are_no_runs_and_no_errors(tmp_path: Path, kind: str) -> None:
    if kind == "another run":
        writer = SummaryWriter(str(tmp_path / "other"))
        writer.add_scalar("loss", 1.0, 0)
        writer.close()
    board = LocalBoard(tmp_path)
    assert board.get("runs") == (200, [])
    answer = board.get("meta", run="other")
    assert (answer.status, answer.body) == (400, {"error": "`run` expects one of [], got 'other'."})


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "no events"])
def test_a_damaged_file_costs_what_is_damaged(tmp_path: Path, damage: str) -> None:
    run = make_run()
    run.write(tmp_path / "one")
    run.write(tmp_path / "sound")
    [path] = (tmp_path / "one").iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[: len(data) * 2 // 3],
            "corrupt": data[: len(data) // 2] + b"\xff" * 64 + data[len(data) // 2 + 64 :],
            "no events": b"not an event file",
        }[damage]
    )
    board = LocalBoard(tmp_path)
    runs = board.get("runs").body
    assert runs == (["sound"] if damage == "no events" else ["one", "sound"])
    for name in runs:
        frames = all_frames(board, name, "q_rms")
        count = len(frames["steps"])
        assert count == 7 if name == "sound" else 1 <= count < 7
        np.testing.assert_array_equal(decode(frames), run.tables["q_rms"][:count])


def test_hostile_names_come_back_as_they_are(tmp_path: Path) -> None:
    tags = [name for name in HOSTILE if "/" not in name]
    run = make_run(layers=HOSTILE, heads=3, scalars={tag: [1.0] * 7 for tag in tags})
    run.events[20] = [make_event(20, HOSTILE[3], 0)]  # type: ignore[index] # a dict, to be read only elsewhere
    folder = "<b>'run' & \N{SNOWMAN} [1]"
    run.write(tmp_path / folder)
    board = LocalBoard(tmp_path)
    assert board.get("runs").body == [folder]
    meta = board.get("meta", run=folder).body
    assert meta["layers"] == list(HOSTILE)
    assert set(tags) <= set(meta["scalars"])
    for tag in tags:
        assert board.get("scalar", run=folder, tag=tag).body["values"] == [1.0] * 7
    assert board.get("events", run=folder).body[0]["layer"] == HOSTILE[3]
    refused = board.get("meta", run="<script>alert(1)</script>")
    assert refused.status == 400  # as JSON that no browser renders
    assert "<script>" in refused.body["error"]


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


def test_what_was_read_is_kept_as_long_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(events=EVENTS).write(tmp_path / "one")
    board = LocalBoard(tmp_path)
    assert_serves(board)
    provider = board.data_provider
    read: list[str] = []

    def counting(*args: Any, **options: Any) -> Any:
        read.extend(options["run_tag_filter"].tags)
        return original(*args, **options)

    original = provider.read_tensors
    monkeypatch.setattr(provider, "read_tensors", counting)
    assert_serves(board)
    assert read == []
    monkeypatch.setattr("attn_monitor.tensorboard_plugin.store._CACHE_BYTES", 1)
    make_run(steps=(70, 80)).write(tmp_path / "one")
    board.reload()
    assert board.get("meta", run="one").body["steps"] == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    assert len(all_frames(board, "one", "q_rms")["steps"]) == 9
    assert {"attn_monitor/saturation_ratio", "attn_monitor/q_rms"} <= set(read)


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
        assert (answer.status, answer.body) == (200, (STATIC / name).read_text(encoding="utf-8"))
    listing = served.ask("/data/plugins_listing").body["attn_monitor"]
    assert listing["tab_name"] == "Attention"
    assert listing["enabled"]
    assert listing["loading_mechanism"] == {"type": "IFRAME", "module_path": f"{PLUGIN}/index.js"}


def test_the_page_asks_nothing_of_the_network_and_parses_no_html() -> None:
    script = (STATIC / "index.js").read_text(encoding="utf-8")
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
    assert {f"attn_monitor/tensorboard_plugin/static/{path.name}" for path in STATIC.iterdir()} <= names
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


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
"""
NO_LIGHTNING = ["pytorch_lightning", "lightning", "torchmetrics"]


def loaded(server: Server) -> bool:
    """Tell whether both data paths' lazy loading is done: the last table and the scalar are there."""
    answer = server.get("line", run="one", layer=0, head=0)
    return (
        answer.status == 200
        and answer.body["statistics"].keys() == make_run().tables.keys()
        and all(len(line["steps"]) == 7 for line in answer.body["statistics"].values())
        and "one" in server.ask("/data/plugin/scalars/tags").body
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocked", [[], NO_LIGHTNING, [*NO_LIGHTNING, "torch"]], ids=["all", "no lightning", "no torch"]
)
def test_the_command_serves_every_tab_on_its_default_data_path(tmp_path: Path, blocked: list[str]) -> None:
    make_run(events=EVENTS).write(tmp_path / "one")
    writer = SummaryWriter(str(tmp_path / "one"))
    writer.add_histogram("weights", np.arange(11.0), 0)
    writer.add_text("note", "hello", 0)
    writer.close()
    with start_command(tmp_path, before=BLOCK.format(blocked=blocked)) as server:
        server.wait(loaded)
        assert_serves(server)
        listing = server.ask("/data/plugins_listing").body
        enabled = {name for name, plugin in listing.items() if plugin["enabled"]}
        assert {"scalars", "histograms", "text", "timeseries", "attn_monitor"} <= enabled
        assert server.ask("/data/plugin/histograms/tags").body["one"]["weights"]
        assert server.ask("/data/plugin/scalars/tags").body["one"]["train_loss"]


@pytest.mark.slow
def test_the_command_starts_when_our_plugin_is_broken(tmp_path: Path) -> None:
    make_run().write(tmp_path / "one")
    broken = BLOCK.format(blocked=["attn_monitor_does_not_matter"]) + (
        "import attn_monitor.tensorboard_plugin\n"
        "sys.modules['attn_monitor.tensorboard_plugin.plugin'] = None  # importing it fails\n"
    )
    with start_command(tmp_path, before=broken) as server:
        server.wait(lambda server: "one" in server.ask("/data/plugin/scalars/tags").body)
        listing = server.ask("/data/plugins_listing").body
        assert listing["scalars"]["enabled"]
        assert "attn_monitor" not in listing


@pytest.mark.slow
def test_the_default_data_path_keeps_all_steps_and_follows_a_resumed_run(tmp_path: Path) -> None:
    run = make_run(steps=range(0, 1212, 4), layers=("a", "b"), heads=3)
    run.write(tmp_path / "long")
    lost = {10: [make_event(10, "layers.0.attn", 1)], 50: [make_event(50, "layers.0.attn", 2)]}
    first, second = make_run(seed=1, events=lost), make_run(seed=2)
    first.write(tmp_path / "one", range(6))
    second.write(tmp_path / "one", [0])
    second.write(tmp_path / "one", range(2, 5))
    with start_command(tmp_path) as server:
        server.wait(lambda server: {"long", "one"} <= set(server.get("runs").body))
        server.wait(lambda server: len(server.get("meta", run="long").body["steps"]) == 303)
        np.testing.assert_array_equal(decode(all_frames(server, "long", "q_rms")), run.tables["q_rms"])
        server.wait(lambda server: server.get("meta", run="one").body["steps"] == [0, 20, 30, 40])
        assert server.get("events", run="one").body == []
        np.testing.assert_array_equal(decode(all_frames(server, "one", "q_rms")), second.tables["q_rms"][[0, 2, 3, 4]])


def test_a_file_that_was_not_installed_is_an_answer(served: LocalBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_monitor.tensorboard_plugin.plugin.STATIC", Path("nowhere"))
    answer = served.get("index.css")
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


def test_json_of_a_damaged_event_record_is_left_out(tmp_path: Path) -> None:
    run = make_run(events={10: [make_event(10, "layers.0.attn", 0, value=float("inf"))]})
    run.write(tmp_path / "one")
    [event] = LocalBoard(tmp_path).get("events", run="one").body
    assert event["value"] is None
    json.dumps(event, allow_nan=False)

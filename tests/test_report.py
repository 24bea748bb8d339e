"""The page of `attn-monitor report`: one file, complete, exact, bounded, and nothing in it but what we put there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from attn_monitor import __version__
from attn_monitor.reports.report import render_report, write_report
from attn_monitor.reports.runs import find_runs, read_runs
from attn_monitor.reports.summary import summarize
from attn_monitor.views import RunData
from tests.event_data import HOSTILE, make_event, make_run


class Page(HTMLParser):
    """The elements of a page as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.meta: dict[str, str] = {}
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attributes}
        self.links += [values[name] for name in ("src", "href") if name in values]
        if tag == "meta":
            self.meta[values.get("name") or values.get("http-equiv", "charset")] = values.get("content", "")
            return
        key = f"{tag}#{values['id']}" if "id" in values else tag
        self.texts.setdefault(key, []).append("")
        self._open.append(key)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().split("#")[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    @property
    def data(self) -> Any:
        """What is embedded."""
        [text] = self.texts["script#attn-monitor-data"]
        return json.loads(text)


def stored(tmp_path: Path, *runs: Any) -> list[RunData]:
    """Return runs that went through event files."""
    for index, run in enumerate(runs):
        run.write(tmp_path / f"version_{index}")
    return read_runs(find_runs(tmp_path)).runs


def table(run: Any, name: str) -> tuple[list[int], Any]:
    stored = run["tables"][name]
    values = np.frombuffer(base64.b64decode(stored["data"]), "<f4").reshape(stored["shape"])
    return stored["steps"], values


def test_the_page_holds_every_number(tmp_path: Path) -> None:
    events = {20: [make_event(20, "layers.1.attn", 3)]}
    one, two = make_run(events=events), make_run(steps=(0, 5, 9), layers=("a", "b"), heads=4, seed=3)
    page = Page(render_report(stored(tmp_path, one, two), "", generated=datetime(2031, 2, 3, 4, 5))[0])
    data = page.data
    assert (data["version"], data["generated"], data["left_out"]) == (1, "2031-02-03 04:05", [])
    for index, run in enumerate((one, two)):
        shown = data["runs"][index]
        assert shown["meta"]["name"] == f"version_{index}"
        assert shown["meta"]["layers"] == list(run.layers)
        assert set(shown["tables"]) == set(run.tables)
        for name, values in run.tables.items():
            assert_array_equal(table(shown, name)[0], run.steps)
            assert_array_equal(table(shown, name)[1], values)
        assert shown["scalars"]["train_loss"]["steps"] == list(run.steps)
        assert shown["scalars"]["train_loss"]["values"] == pytest.approx(run.scalars["train_loss"], rel=1e-6)
    assert [run["events"] for run in data["runs"]] == [events[20], []]


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    runs = stored(tmp_path, make_run())
    text, _ = render_report(runs, summarize(runs[0]))
    page = Page(text)
    assert page.links == []
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", "".join(page.texts["style"]))
    assert page.meta["generator"] == f"attn_monitor {__version__}"
    assert page.texts["pre"] == [summarize(runs[0])]
    assert page.texts["title"] == ["Attention of version_0"]
    assert "uPlot" in page.texts["script"][0]
    assert "export function mount" in page.texts["script"][1]


def test_only_our_scripts_may_run(tmp_path: Path) -> None:
    page = Page(render_report(stored(tmp_path, make_run()), "")[0])
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.texts["script"]]
    policy = page.meta["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src ")
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert "unsafe-inline" not in policy.split(";")[1]
    assert "https:" not in policy


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    scalars = {f"{name} loss": [1.0] * 7 for name in HOSTILE}
    events = {20: [make_event(20, name, 1, message=f"{name} is saturated") for name in HOSTILE]}
    harmless = stored(tmp_path / "harmless", make_run(layers=[f"layer {row}" for row in range(len(HOSTILE))]))
    runs = stored(tmp_path / "hostile", make_run(layers=HOSTILE, scalars=scalars, events=events))
    runs[0] = RunData(HOSTILE[3], *(getattr(runs[0], name) for name in list(RunData.__slots__)[1:]))
    text, _ = render_report(runs, summarize(runs[0]))
    page = Page(text)
    assert page.tags == Page(render_report(harmless, "")[0]).tags
    [run] = page.data["runs"]
    assert run["meta"]["layers"] == list(HOSTILE)
    assert [event["layer"] for event in run["events"]] == list(HOSTILE)
    assert list(run["scalars"]) == list(scalars)
    assert page.texts["title"] == [f"Attention of {HOSTILE[3]}"]
    assert page.texts["pre"] == [summarize(runs[0])]
    for name in HOSTILE:
        assert name not in text or "<" not in name


def test_a_large_run_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    events = {777: [make_event(777, "layers.1.attn", 3)]}
    runs = stored(tmp_path, make_run(steps=range(1009), events=events))
    text, notes = render_report(runs, "", megabytes=0.1)
    page = Page(text)
    [run] = page.data["runs"]
    kept = run["meta"]["steps"]
    assert {0, 777, 1008} <= set(kept)
    assert notes == page.data["left_out"]
    assert notes[0].startswith(f"version_0: {1009 - len(kept)} of 1009 observed steps are left out of the page")
    assert page.texts["p"][1] == f"{notes[0]}."
    whole = runs[0].tables["q_rms"].values
    assert_array_equal(table(run, "q_rms")[1], whole[kept])
    small, _ = render_report(stored(tmp_path / "small", make_run(steps=(0, 1))), "")
    assert len(text) - len(small) < 0.1e6


def test_numbers_that_json_has_not_are_null_or_bytes(tmp_path: Path) -> None:
    event = make_event(0, "layers.0.attn", 0, value=float("nan"), ratio=float("inf"))
    run = make_run(steps=(0, 1), events={0: [event]}, scalars={"train_loss": [float("nan"), float("inf")]})
    run.tables["q_rms"][1, 0, 0] = np.inf
    shown = Page(render_report(stored(tmp_path, run), "")[0]).data["runs"][0]
    assert shown["scalars"]["train_loss"]["values"] == [None, None]
    assert (shown["events"][0]["value"], shown["events"][0]["ratio"]) == (None, None)
    assert_array_equal(table(shown, "q_rms")[1], run.tables["q_rms"])


def test_writing_leaves_one_file(tmp_path: Path) -> None:
    runs = stored(tmp_path / "runs", make_run())
    path = tmp_path / "page.html"
    assert write_report(path, runs, "lone \ud800 surrogate") == []
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["page.html", "runs"]
    assert "lone \\ud800 surrogate" in path.read_text(encoding="utf-8")

"""What was said beside the events, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from attn_monitor.dashboards.summaries import Summaries
from attn_monitor.stored_events import note_records
from attn_monitor.tags import NOTE_RECORDS_TAG
from tests.board import start_in_process
from tests.browser import Browser
from tests.event_data import make_run
from tests.tab_browser.pages import opened

pytestmark = pytest.mark.slow
HOSTILE = "scale audit: <img src=x onerror=window.injected=1>"


def listed(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('.notes li')].map((item) => item.textContent)")
    return found


def test_notes_stand_above_the_events_also_where_there_are_none(browser: Browser, tmp_path: Path) -> None:
    writer: Any = SummaryWriter(str(tmp_path / "run"))
    make_run().write(tmp_path / "run", writer=writer)
    for step, note in ((0, HOSTILE), (30, "step 30: head 1 reaches its limit")):
        summaries = Summaries(set())
        summaries.strings(NOTE_RECORDS_TAG, note_records(step, [note]), "notes", "")
        writer._get_file_writer().add_summary(summaries.proto(), step)
    writer.close()
    make_run().write(tmp_path / "silent")
    server = start_in_process(tmp_path)
    server.wait(lambda server: server.get("runs").body == ["run", "silent"])
    for page in opened(browser, server.url):
        assert listed(page) == [f"run step 0: {HOSTILE}", "run step 30: head 1 reaches its limit"]
        assert (
            page.run("[...document.querySelectorAll('h2')].map((title) => title.textContent)").count("Events: none")
            == 1
        )
        assert page.run("window.injected === undefined")
        page.run("document.querySelector('input[value=silent]').click()")
        page.wait("document.querySelector('.notes li')?.textContent.startsWith('step 0')")
        page.run("document.querySelector('input[value=run]').click()")
        page.wait("!document.querySelector('.notes li')")

"""One browser and one server with two runs for all files here. Screenshots lie in pytest's temporary folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.board import Server, start_in_process
from tests.browser import Browser, open_browser
from tests.event_data import make_run
from tests.tab_browser.pages import EVENTS, opened


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
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

"""TensorBoard as its users run it: in this process, over HTTP or without a port, and as a command of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard import program
from tensorboard.backend import application
from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
from werkzeug.test import Client

PLUGIN = "/data/plugin/attn_monitor"


class Answer(NamedTuple):
    """The answer of a route."""

    status: int
    body: Any


class LocalBoard:
    """TensorBoard's application over a directory, on the Python data path, that reads when told to.

    Attributes:
        data_provider: What the plugins read from.
    """

    def __init__(self, logdir: Path, *flags: str) -> None:
        board = program.TensorBoard()
        board.configure([None, "--logdir", str(logdir), "--load_fast=false", *flags])
        self._ingester = LocalDataIngester(board.flags)
        self._logdir = str(logdir)
        self.data_provider = self._ingester.data_provider
        self.reload()
        self._client = Client(
            application.TensorBoardWSGIApp(
                board.flags,
                board.plugin_loaders,
                self.data_provider,
                board.assets_zip_provider,
                self._ingester.deprecated_multiplexer,
            )
        )

    def reload(self) -> None:
        """Read what was added to the directory."""
        self._ingester._multiplexer.AddRunsFromDirectory(self._logdir)
        self._ingester._multiplexer.Reload()

    def get(self, route: str, **query: Any) -> Answer:
        """Ask a route of the tab."""
        return self.ask(f"{PLUGIN}/{route}", **query)

    def ask(self, path: str, **query: Any) -> Answer:
        """Ask any route."""
        response = self._client.get(path, query_string=urllib.parse.urlencode(query, doseq=True))
        kind = response.headers["Content-Type"]
        return Answer(response.status_code, response.json if kind == "application/json" else response.text)

    def post(self, route: str) -> Answer:
        """Send to a route of the tab what it does not take."""
        response = self._client.post(f"{PLUGIN}/{route}", data="x")
        return Answer(response.status_code, response.json)


class Server:
    """A server with a port.

    Attributes:
        url: Where it is, with a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, route: str, **query: Any) -> Answer:
        """Ask a route of the tab."""
        return self.ask(f"{PLUGIN}/{route}", **query)

    def ask(self, path: str, **query: Any) -> Answer:
        """Ask any route that answers with JSON; its errors may be text."""
        url = f"{self.url}{path.removeprefix('/')}?{urllib.parse.urlencode(query, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return Answer(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
                return Answer(
                    error.code, json.loads(text) if error.headers["Content-Type"] == "application/json" else text
                )

    def wait(self, condition: Callable[[Server], bool], seconds: float = 60.0) -> None:
        """Wait until the server has loaded what is expected; it answers before it has."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if condition(self):
                    return
            except (urllib.error.URLError, ConnectionError):
                pass  # not listening yet
            assert time.monotonic() < deadline, f"TensorBoard did not load the data within {seconds} s"
            time.sleep(0.05)


def start_in_process(logdir: Path, *flags: str) -> Server:
    """Start a server on the Python data path in a thread that ends with the process."""
    board = program.TensorBoard()
    arguments = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0", "--load_fast=false", *flags]
    board.configure([None, *arguments])
    return Server(board.launch())


@contextmanager
def start_command(logdir: Path, *flags: str, before: str = "") -> Iterator[Server]:
    """Run `tensorboard` as a process, on its default data path.

    Args:
        logdir: What it shows.
        flags: More flags.
        before: Python that runs first, in the same process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port), *flags]
    code = f"{before}\nfrom tensorboard.main import run_main\nrun_main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield Server(f"http://127.0.0.1:{port}/")
    finally:
        process.terminate()
        process.wait(20)

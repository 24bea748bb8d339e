"""A headless Chromium, driven over its debugging pipe: nothing but the browser itself has to be installed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "ATTN_MONITOR_REQUIRE_BROWSER"
"""Set to 1, a missing browser is a failure and not a skip."""
_SECONDS = 60.0
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes answers to 4."""
_KEYS = {" ": ("Space", 32), "Home": ("Home", 36), "End": ("End", 35), "ArrowLeft": ("ArrowLeft", 37),
         "ArrowUp": ("ArrowUp", 38), "ArrowRight": ("ArrowRight", 39), "ArrowDown": ("ArrowDown", 40),
         "Enter": ("Enter", 13), "Escape": ("Escape", 27), "Tab": ("Tab", 9)}  # fmt: skip


class BrowserError(AssertionError):
    """The browser refused a command, or a script threw."""


def find_browser() -> str | None:
    """Return the path of a Chromium, `None` without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def require_browser() -> str:
    """Return the path of a Chromium; without one, skip the test and say so, or fail where one is required."""
    path = find_browser()
    if path is None:
        message = f"needs one of {', '.join(NAMES)} (apt-get install chromium)"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but this test {message}")
        pytest.skip(message)
    return path


class Browser:
    """One page.

    Args:
        path: The browser's executable.

    Attributes:
        problems: What the page wrote to the console as an error, uncaught exceptions and failed requests.
        requests: The URLs that were asked for.
    """

    def __init__(self, path: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        their_input, self._output = _high_pipe()
        self._input, their_output = _high_pipe()

        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
                 f"--user-data-dir={self._profile.name}", "--window-size=1280,900", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCH, str(their_input), str(their_output), path, *flags],
            pass_fds=(their_input, their_output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        pages = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        page = pages[0]["targetId"] if pages else self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 900)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and everything it started."""
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        finally:
            os.close(self._input)
            os.close(self._output)
            self._profile.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._output, data) :]
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def go(self, url: str) -> None:
        """Open a page, without waiting for what its scripts do."""
        result = self.call("Page.navigate", url=url)
        if result.get("errorText"):
            raise BrowserError(f"{url}: {result['errorText']}")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(f"{details.get('exception', {}).get('description', details['text'])}\nin: {script}")
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> Any:
        """Return the value of an expression once it is truthy."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                value = self.run(condition)
            except BrowserError as error:  # the page may not be there yet
                value, reason = None, str(error)
            else:
                reason = f"is {value!r}"
            if value:
                return value
            if time.monotonic() > deadline:
                raise BrowserError(f"after {seconds} s still not: {condition}\n{reason}\nproblems: {self.problems}")
            time.sleep(0.05)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button at a place of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def hover(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press and release a key: a character, or a name such as ArrowUp."""
        code, number = _KEYS.get(key, ("", ord(key[0].upper())))
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code, windowsVirtualKeyCode=number, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code, windowsVirtualKeyCode=number)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Let the page believe that its user prefers `"light"` or `"dark"`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """Save a picture of the window, or of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._input], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"the browser did not answer within {_SECONDS:.0f} s")
            more = os.read(self._input, 1 << 16)
            if not more:
                raise BrowserError("the browser ended")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(" ".join(str(part.get("value", part.get("description"))) for part in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            where = params["entry"].get("url", "")
            if not where.endswith("/favicon.ico"):  # what the browser wants by itself is no fault of the page
                self.problems.append(f"{params['entry']['text']} {where}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser, or skip the test without one."""
    with Browser(require_browser()) as browser:
        yield browser


def _high_pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors leave 3 and 4 free."""
    low = os.pipe()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20) for descriptor in low]
    for descriptor in low:
        os.close(descriptor)
    return high[0], high[1]

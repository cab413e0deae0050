"""Headless Chromium for tests, controlled over its debugging pipe.

    with Chromium() as browser:
        page = browser.open(path, width=400, dark=True)
        assert page.errors == []

Chromium reads commands from file descriptor 3 and responds on 4, JSON messages ending with a zero byte (the Chrome
DevTools Protocol), so neither a driver nor a port is needed. Each page is a separate tab; its console messages,
exceptions and network requests are recorded. Cost: about 1 s for the browser, tenths of a second per page.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)

RESPONSE_TIMEOUT_S = 120.0


def find_browser() -> str | None:
    """Return the path of a browser on this machine, or None."""
    return next((path for name in BROWSER_NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """Browser rejected a command or exited."""


class Page:
    """Loaded page."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    @property
    def errors(self) -> list[str]:
        """Uncaught exceptions, and console errors and warnings."""
        errors = []
        for event in self._browser.events(self._session):
            kind, values = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                errors.append(str(details.get("exception", {}).get("description", details["text"])))
            elif kind == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                errors.append(" ".join(str(arg.get("value", arg.get("description", ""))) for arg in values["args"]))
            elif kind == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                errors.append(values["entry"]["text"])
        return errors

    @property
    def requests(self) -> list[str]:
        """URLs of all requests, including the page itself."""
        events = self._browser.events(self._session)
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def evaluate_js(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression."""
        response = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in response:
            raise BrowserError(str(response["exceptionDetails"]))
        return response["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse to a position in the window, in CSS pixels."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, *, full_page: bool = True) -> bytes:
        """Return a PNG of the full page or of the window."""
        return base64.b64decode(
            self._send("Page.captureScreenshot", captureBeyondViewport=full_page, **self._clip(full_page))["data"]
        )

    def _clip(self, full_page: bool) -> dict[str, Any]:
        if not full_page:
            return {}
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _send(self, method: str, **options: Any) -> Any:
        return self._browser.send(method, session=self._session, **options)


class Chromium:
    """Browser process with a temporary profile; a context manager.

    Args:
        program: path of the browser; default: `find_browser()`.

    Raises:
        BrowserError: no browser, or it does not start.
    """

    def __init__(self, program: str | None = None) -> None:
        program = program or find_browser()
        if program is None:
            raise BrowserError("Chromium is not installed: install the Debian package chromium")
        self._resources = ExitStack()
        self._last_id = 0
        self._events: list[dict[str, Any]] = []
        self._buffer = b""
        profile = self._resources.enter_context(
            tempfile.TemporaryDirectory(prefix="lt-chromium-", ignore_cleanup_errors=True)
        )
        commands_out, self._commands = os.pipe()
        self._responses, responses_in = os.pipe()
        # Chromium needs descriptors 3 and 4, which may be in use in this process: the shell redirects them.
        script = f'exec "$@" 3<&{commands_out} 4>&{responses_in}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands_out, responses_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_out)
        os.close(responses_in)

    def open(self, address: str | Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """Open a page in a new tab and wait until it has loaded.

        Args:
            address: URL or file.
            width: window width in CSS pixels; 400 is a phone.
            height: window height in CSS pixels.
            dark: prefer a dark color scheme.
        """
        address = address.resolve().as_uri() if isinstance(address, Path) else address
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable", session=session)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            session=session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", session=session, features=features)
        self._events = [event for event in self._events if event.get("sessionId") != session]
        response = self.send("Page.navigate", session=session, url=address)
        if "errorText" in response:
            raise BrowserError(f"{address}: {response['errorText']}")
        self._wait_until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events(session)))
        return Page(self, session)

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return the events of a tab so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    def send(self, method: str, *, session: str | None = None, **options: Any) -> Any:
        """Send a command and return its result."""
        self._last_id += 1
        message_id, responses = self._last_id, []
        message = {"id": message_id, "method": method, "params": options} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while not responses:
            responses = [message for message in self._read() if message.get("id") == message_id]
        if "error" in responses[0]:
            raise BrowserError(f"{method}: {responses[0]['error']}")
        return responses[0]["result"]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._read()

    def _read(self) -> list[dict[str, Any]]:
        """Return the next messages, and record their events."""
        if not select.select([self._responses], [], [], RESPONSE_TIMEOUT_S)[0]:
            raise BrowserError(f"no message from the browser for {RESPONSE_TIMEOUT_S:g} s")
        data = os.read(self._responses, 1 << 20)
        if not data:
            raise BrowserError(f"the browser exited with code {self._process.wait()}")
        *complete, self._buffer = (self._buffer + data).split(b"\0")
        messages = [json.loads(message) for message in complete]
        self._events += [message for message in messages if "method" in message]
        return messages

    def close(self) -> None:
        """Stop the browser and delete its profile."""
        os.close(self._commands)  # it exits at end of file
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._responses)
        self._resources.close()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

"""A real browser for tests: Chromium without a window, asked over its own debugging pipe.

    with Chromium() as browser:
        page = browser.open(path, width=400, dark=True)
        assert page.errors == []

Chromium reads commands from file descriptor 3 and answers on 4, JSON texts that end with a zero byte (the Chrome
DevTools Protocol), so neither a driver nor a port is needed. Each page is a tab of its own; what it prints on the
console, raises, or asks the network for is kept. Cost: about a second for the browser, tenths of one for a page.
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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
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

PATIENCE_S = 120.0


def find() -> str | None:
    """The path of a browser on this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserFailed(RuntimeError):
    """The browser refused a command or is gone."""


class Page:
    """A page that has loaded."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    @property
    def errors(self) -> list[str]:
        """What was raised, and what stands on the console as an error or a warning."""
        found = []
        for event in self._browser.events(self._session):
            kind, values = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                found.append(str(details.get("exception", {}).get("description", details["text"])))
            elif kind == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(one.get("value", one.get("description", ""))) for one in values["args"]))
            elif kind == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(values["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """The addresses of all that the page asked for, itself included."""
        events = self._browser.events(self._session)
        return [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserFailed(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window, in CSS pixels."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG: all of it, or what the window shows."""
        return base64.b64decode(
            self._send("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _send(self, method: str, **options: Any) -> Any:
        return self._browser.send(method, session=self._session, **options)


class Chromium:
    """A browser process; ends with the context, and so does its profile.

    Args:
        program: path of the browser; the one that `find` finds when None.

    Raises:
        BrowserFailed: there is none, or it does not start.
    """

    def __init__(self, program: str | None = None) -> None:
        program = program or find()
        if program is None:
            raise BrowserFailed("no Chromium on this machine: install the Debian package chromium")
        self._held = ExitStack()
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._buffer = b""
        profile = self._held.enter_context(
            tempfile.TemporaryDirectory(prefix="lt-chromium-", ignore_cleanup_errors=True)
        )
        commands_out, self._commands = os.pipe()
        self._answers, answers_in = os.pipe()
        # Chromium wants exactly 3 and 4, where this process may have anything: the shell puts them there.
        script = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_out)
        os.close(answers_in)

    def open(self, address: str | Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """Open a page in a tab of its own and wait until it has loaded.

        Args:
            address: an address, or a file.
            width: of the window, in CSS pixels; 400 is a telephone.
            height: likewise.
            dark: whether the reader prefers dark colours.
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
        answer = self.send("Page.navigate", session=session, url=address)
        if "errorText" in answer:
            raise BrowserFailed(f"{address}: {answer['errorText']}")
        self._until(lambda: any(one["method"] == "Page.loadEventFired" for one in self.events(session)))
        return Page(self, session)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What a tab has told so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    def send(self, method: str, *, session: str | None = None, **options: Any) -> Any:
        """Give a command and wait for its answer."""
        self._number += 1
        number, found = self._number, []
        message = {"id": number, "method": method, "params": options} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while not found:
            found = [one for one in self._read() if one.get("id") == number]
        if "error" in found[0]:
            raise BrowserFailed(f"{method}: {found[0]['error']}")
        return found[0]["result"]

    def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._read()

    def _read(self) -> list[dict[str, Any]]:
        """The next messages; events are kept as well."""
        if not select.select([self._answers], [], [], PATIENCE_S)[0]:
            raise BrowserFailed(f"the browser has not said a word for {PATIENCE_S:g} s")
        data = os.read(self._answers, 1 << 20)
        if not data:
            raise BrowserFailed(f"the browser has ended with code {self._process.wait()}")
        *whole, self._buffer = (self._buffer + data).split(b"\0")
        messages = [json.loads(one) for one in whole]
        self._events += [one for one in messages if "method" in one]
        return messages

    def close(self) -> None:
        """End the browser."""
        os.close(self._commands)  # at the end of its commands it ends by itself
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._answers)
        self._held.close()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

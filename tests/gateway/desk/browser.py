"""Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import websocket

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_S = 60.0


class Page:
    """One tab. ``problems`` holds errors of the browser's console, and requests to other servers than the gateway."""

    def __init__(self, connection: websocket.WebSocket, origin: str) -> None:
        self._connection = connection
        self._origin = origin
        self._number = 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result. Events that arrive meanwhile are noted."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message["method"], message["params"])

    def _note(self, method: str, event: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.problems.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = event["request"]["url"]
            if not url.startswith((self._origin, "data:")):
                self.problems.append(f"asks for {url}")

    def show(self, path: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page of the gateway, and wait until it is complete."""
        self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=self._origin + path)
        self.until("document.readyState === 'complete'")

    def size(self, width: int, height: int) -> None:
        """Set the size of the window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        until_s = time.monotonic() + _PATIENCE_S
        while not self.value(expression):
            assert time.monotonic() < until_s, f"{expression}; the page says: {self.value('document.body.innerText')}"
            time.sleep(0.05)  # polls for a state, bounded

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def press(self, key: str, code: int) -> None:
        """Press a key in the focused element."""
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" and kind == "keyDown" else ""
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Save a picture of the whole page as PNG."""
        self.size(
            self.value("innerWidth"),
            max(self.value("innerHeight"), self.value("document.documentElement.scrollHeight")),
        )
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def accessible(self) -> list[tuple[str, str]]:
        """The roles and names that a screen reader gets."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]


@contextmanager
def page(origin: str, directory: Path) -> Iterator[Page]:
    """A browser with one tab; its profile is in ``directory``."""
    assert PROGRAM is not None, "no chromium"
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")
    command = [PROGRAM, *flags, *quiet, f"--user-data-dir={directory / 'profile'}", "about:blank"]
    quiet_output: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet_output, start_new_session=True) as process:
        try:
            told = directory / "profile" / "DevToolsActivePort"  # empty for a moment
            port = _awaited(lambda: int(told.read_text().partition("\n")[0]))
            tabs = _awaited(lambda: json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list")))
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            with closing(websocket.create_connection(address, timeout=_PATIENCE_S, suppress_origin=True)) as connection:
                yield Page(connection, origin)
        finally:
            os.killpg(
                process.pid, signal.SIGKILL
            )  # a browser that is asked to close may take minutes on a busy machine


def _awaited(read: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return read()
        except (OSError, ValueError):
            assert time.monotonic() < until_s, "chromium does not start"
            time.sleep(0.05)  # polls for a state, bounded

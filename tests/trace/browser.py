# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium over its DevTools protocol: what a page shows, and what it complains of."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect  # comes with vLLM's server

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
COMPLAINTS = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}


def chromium() -> str | None:
    """The first Chromium on the path."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page.

    Args:
        socket: to the page.

    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result, collecting complaints meanwhile."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("method") in COMPLAINTS:
                self.complaints.append(json.dumps(message["params"]))
            if message.get("method") == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, path: Path, width: int, height: int) -> None:
        """Show a file in a window of this size, and wait until it has drawn itself."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 600, **metrics)
        self.call("Page.navigate", url=path.as_uri())
        self.run(
            "new Promise(done => { const look = () => document.body?.dataset.ready ? done() : "
            "setTimeout(look, 20); look(); })"
        )

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "Home": 36, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            what = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self.call("Input.dispatchKeyEvent", type=kind, **what)

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        where = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def tab(program: str, profile: Path) -> Iterator[Tab]:
    """A fresh browser with one page."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update")
    arguments = [*flags, *quiet, "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    with subprocess.Popen(
        [program, *arguments, "about:blank"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on " in line)
            browser = line.rpartition(" ")[2].strip()
            with connect(browser, max_size=None, open_timeout=120) as socket:
                socket.send(json.dumps({"id": 0, "method": "Target.getTargets"}))
                targets = json.loads(socket.recv(timeout=60))["result"]["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            address = f"{browser.partition('/devtools/')[0]}/devtools/page/{page}"
            with connect(address, max_size=None, open_timeout=120) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.stderr.close()

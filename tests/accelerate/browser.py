"""Headless Chromium over its debugging pipe: open a page, be someone's eyes and colours, and hear its complaints."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One Chromium process and one page in it; the protocol is Chrome's own, JSON between NUL bytes."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs, self._out = (_high(fd) for fd in os.pipe())
        self._in, back = (_high(fd) for fd in os.pipe())

        def hand_over() -> None:
            os.dup2(theirs, 3)
            os.dup2(back, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=hand_over,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(back)
        self._buffer, self._number = b"", 0
        self.complaints: list[str] = []
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and give its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._in, 1 << 16)
            assert piece, "Chromium ended"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = dict(json.loads(line))
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"])[:500])
        if (method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning")) or (
            method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning")
        ):
            self.complaints.append(json.dumps(given)[:500])
        return message

    def open(self, page: Path, width: int, height: int, scheme: str) -> None:
        """Load a page as a reader with this window and colour scheme would, and wait until its figures are drawn."""
        self.complaints.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + 60
        while (
            self.evaluate("document.readyState + (document.body ? document.body.dataset.drawn : '')") != "completeyes"
        ):
            assert time.monotonic() < until, f"the page did not draw its figures; it says {self.complaints}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as it looks."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)


def _high(fd: int) -> int:
    # Out of the way of 3 and 4, where Chromium expects the two ends.
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return moved

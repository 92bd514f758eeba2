"""A page in headless Chromium, driven by the DevTools protocol over a pipe.

Keys, clicks and what scripts return; nothing but Chromium has to be installed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

BINARY = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="chromium is not installed (Debian: apt install chromium)"
)
_SECONDS = 30
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38}
_CODES |= {"ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "/": 191}


class Page:
    """A page that is open.

    Args:
      read, write: descriptors of Chromium's pipe.
    """

    def __init__(self, read: int, write: int):
        self._read, self._write = read, write
        self._number, self._left = 0, b""
        self._session: str | None = None
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        how = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = how["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.loaded: list[str] = []

    def open(self, url: str, *, width: int = 1280, height: int = 900) -> float:
        """Opens an address; returns the seconds until its load event is over."""
        self.resize(width, height)
        self.loaded.clear()
        self._call("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )
        entry = "performance.getEntriesByType('navigation')[0]"
        return self.run(f"{entry}.loadEventEnd - {entry}.startTime") / 1e3

    def resize(self, width: int, height: int) -> None:
        """Sets the window's size; below 600 pixels it is a phone's."""
        is_phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )

    def dark(self, is_dark: bool = True) -> None:
        """Sets the colour scheme that the page is told is preferred."""
        value = "dark" if is_dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        done = self._call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """Waits until an expression is true; returns its value, True for an element."""
        script = f"((found) => found?.nodeType ? true : found)({script})"
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):  # Between two documents.
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}; console: {self.console}")

    def press(self, *keys: str) -> None:
        """Presses keys, by name: `Enter`, `ArrowDown`, `/`."""
        for key in keys:
            code = _CODES.get(key, ord(key[0].upper()))
            how = {"key": key, "windowsVirtualKeyCode": code}
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            more = {"text": text} if text else {}
            self._call("Input.dispatchKeyEvent", type="keyDown", **how, **more)
            self._call("Input.dispatchKeyEvent", type="keyUp", **how)

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self._call("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """Clicks in the middle of what a JavaScript expression returns."""
        box = f"({element}).getBoundingClientRect()"
        x, y = self.run(
            f"(() => {{ const box = {box}; "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def text(self, selector: str) -> str:
        """The text of the first element of a CSS selector, as it is shown."""
        return self.run(f"document.querySelector({selector!r})?.innerText ?? ''")

    def picture(self, path: pathlib.Path) -> None:
        """Writes what is seen as a PNG file."""
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        text = json.dumps(call).encode() + b"\0"
        while text:
            text = text[os.write(self._write, text) :]
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message["method"] == "Runtime.consoleAPICalled":
            words = [str(one.get("value")) for one in parameters["args"]]
            self.console.append(" ".join(words))
        elif message["method"] == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":
            entry = parameters["entry"]
            if not entry.get("url", "").endswith("/favicon.ico"):
                self.console.append(entry["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.loaded.append(parameters["request"]["url"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], _SECONDS)
            assert ready, "chromium does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "chromium has ended"
            self._left += more
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)


@contextlib.contextmanager
def page(folder: pathlib.Path) -> Iterator[Page]:
    """A page in a Chromium of its own, whose profile is in a folder."""
    (their_read, our_write), (our_read, their_write) = os.pipe(), os.pipe()
    # Chromium reads from 3 and writes to 4, which the pipes must not be themselves.
    read, write = (
        fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (their_read, their_write)
    )
    nowhere = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
    process = os.posix_spawn(
        BINARY,
        [BINARY, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        {**os.environ, "HOME": str(folder)},
        file_actions=[
            *nowhere,
            (os.POSIX_SPAWN_DUP2, read, 3),
            (os.POSIX_SPAWN_DUP2, write, 4),
        ],
    )
    for one in (their_read, their_write, read, write):
        os.close(one)
    try:
        yield Page(our_read, our_write)
    finally:
        os.close(our_write)  # At which it ends.
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
        os.close(our_read)

"""A headless Chromium, driven over a pipe by the DevTools protocol: enough to open a page, act on it and look at it."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_CODES = {
    "Tab": 9,
    "Enter": 13,
    "Backspace": 8,
    "Delete": 46,
    "End": 35,
    "ArrowDown": 40,
}  # of keys that are obeyed by number
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


@dataclass
class Tab:
    """One page, with what its console has said."""

    to: IO[bytes]
    from_: IO[bytes]
    session: str = ""
    number: int = 0
    errors: list[str] = field(default_factory=list)
    loaded: int = 0
    home: tuple[str, ...] = ("file:", "data:")  # beginnings of addresses that may be asked

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is noted."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.from_.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        answer: dict[str, Any] = json.loads(text)
        method, found = answer.get("method"), answer.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(found["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(f"{found['type']}: {found['args']}")
        elif method == "Network.requestWillBeSent" and not found["request"]["url"].startswith(self.home):
            self.errors.append(f"asks the network for {found['request']['url']}")
        elif method == "Page.loadEventFired":
            self.loaded += 1
        return answer

    def open(self, page: Path, width: int = 1280, height: int = 900) -> None:
        """Open a page of a file."""
        self.visit(page.resolve().as_uri(), width, height)

    def visit(self, address: str, width: int = 1280, height: int = 900) -> None:
        """Open the page of an address."""
        self.resize(width, height)
        before = self.loaded
        self.ask("Page.navigate", url=address)
        while self.loaded == before:
            self._next()

    def wait_for(self, script: str, most_s: float = 120.0) -> None:
        """Wait until an expression of JavaScript is true."""
        end_s = time.monotonic() + most_s
        while not self.value(script):
            assert time.monotonic() < end_s, f"not true after {most_s} s: {script}"
            time.sleep(0.05)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, script: str) -> Any:
        """Return what an expression of JavaScript gives."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point(self, selector: str, across: float = 0.5) -> str:
        """Move the pointer over an element, and return the text of the tip that shows."""
        place = json.dumps(selector)
        self.value(f"document.querySelector({place}).scrollIntoView({{block: 'center'}})")
        box = self.value(f"document.querySelector({place}).getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + across * box["width"], "y": box["y"] + box["height"] / 2}
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
        return self.value("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")

    def press(self, key: str) -> None:
        """Press a key on what has the focus."""
        text = key if len(key) == 1 else {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            code = {"windowsVirtualKeyCode": _CODES[key]} if key in _CODES else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "", **code)

    def picture(self, *, whole: bool = False) -> bytes:
        """Return what is seen as a PNG; the ``whole`` page, or as much as fits the window."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def printed(self) -> bytes:
        """Return the page as a PDF."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a browser with a profile of its own; end it with the block."""
    assert PROGRAM, "no Chromium is installed"
    there, to = os.pipe()
    from_, here = os.pipe()

    def place_pipes() -> None:
        ends = os.dup(there), os.dup(here)
        for end, number in zip(ends, (3, 4), strict=True):
            os.dup2(end, number)

    command = [PROGRAM, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, preexec_fn=place_pipes, close_fds=False, stdout=quiet, stderr=quiet)
    os.close(there)
    os.close(here)
    with os.fdopen(to, "wb") as writing, os.fdopen(from_, "rb", buffering=1 << 20) as reading:
        tab = Tab(writing, reading)
        try:
            target = next(one for one in tab.ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
            tab.session = tab.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.ask(f"{domain}.enable")
            yield tab
        finally:
            process.kill()
            process.wait()

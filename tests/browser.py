"""A real browser for tests: headless Chromium, driven over a pair of pipes with the messages of its developer tools.

    with Chromium() as browser:
        page = browser.page(url)
        page.until("document.querySelector('#turns li')")
        page.press("Enter")

The pipes take JSON messages that end with a zero byte, so nothing is needed beyond the standard library.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
    " --disable-extensions --disable-background-networking --disable-component-update --disable-sync"
    " --hide-scrollbars --lang=en --in-process-gpu --renderer-process-limit=2"
)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "k": (75, "")}
SHIFT, CONTROL = 8, 2


class Chromium:
    """One process, with many pages that share nothing."""

    def __init__(self, timeout: float = 60) -> None:
        assert BINARY is not None
        self.timeout = timeout
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()
        # Out of the way of 3 and 4, where Chromium looks for its ends.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (read, write)]
        self._process = subprocess.Popen(
            [BINARY, *FLAGS.split(), f"--user-data-dir={self._folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            start_new_session=True,
            preexec_fn=lambda: [os.dup2(end, at) for end, at in zip(theirs, (3, 4))],
        )
        for end in (read, write, *theirs):
            os.close(end)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its result; events that come in between are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + self.timeout
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {self.timeout} s"
            self._rest += os.read(self._from, 1 << 20)
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def page(self, url: str, width: int = 1200, height: int = 800, mobile: bool = False) -> Page:
        """A new page in a profile of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height, mobile)
        page.goto(url)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self.browser, self.session, self.context = browser, session, context

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def prefer(self, **features: str) -> None:
        """Media features, as color_scheme="dark"."""
        listed = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def run(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.call("Runtime.evaluate", **params)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, expression: str, timeout: float = 30) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + timeout
        while not self.run(f"!!({expression})"):
            assert time.monotonic() < end, f"not within {timeout} s: {expression}; {self.problems()}"
            time.sleep(0.03)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({selector!r}).click()")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        name = f"Key{key.upper()}" if len(key) == 1 else key
        common = {"key": key, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def problems(self) -> list[str]:
        """Exceptions of scripts, and what the browser logged as an error: a refused script or style among them."""
        self.run("1")
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

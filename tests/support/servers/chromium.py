"""A headless Chromium, driven over its debugging pipe: only the browser needs to be installed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
                 if path), None)


class Chromium:
    """One browser tab. Its log messages and every address that it requests are recorded."""

    def __init__(self, program: str, profile: Path) -> None:
        self.problems: list[str] = []  # uncaught errors, console errors, failed loads
        self.addresses: list[str] = []
        self._held = b""
        self._last_id = 0
        self._session: str | None = None
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        # Numbers above 3 and 4, where the browser expects its ends of the pipes.
        inside = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, events)]
        self._process = os.posix_spawn(
            program, [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], os.environ, setsid=True,
            file_actions=[(os.POSIX_SPAWN_DUP2, inside[0], 3), (os.POSIX_SPAWN_DUP2, inside[1], 4),
                          (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                          (os.POSIX_SPAWN_OPEN, 2, str(profile / "browser.log"), os.O_WRONLY | os.O_CREAT, 0o600)],
        )
        for end in (commands, events, *inside):
            os.close(end)
        target = next(t for t in self.call("Target.getTargets", seconds=60)["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    # Actions

    def open(self, address: str, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise AssertionError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait(self, expression: str, seconds: float = 15) -> Any:
        """Wait until an expression is true and return its value; a DOM node counts as true, but is not returned."""
        deadline = time.monotonic() + seconds
        while (value := self.evaluate(expression)) in (None, False, 0, ""):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true within {seconds} s: {expression}; problems: {self.problems}")
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def press(self, key: str) -> None:
        text = {"Enter": "\r", "Tab": "\t"}.get(key, key)
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else "",
                      windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))
        return path

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close", seconds=5)
        except (AssertionError, OSError):
            os.killpg(self._process, signal.SIGKILL)
        os.close(self._commands)
        os.close(self._events)
        deadline = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(self._process, signal.SIGKILL)
            time.sleep(0.05)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # The pipe: JSON messages, each terminated by a zero byte

    def call(self, method: str, seconds: float = 30, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._held:
            if not select.select([self._events], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"the browser did not answer {method}")
            piece = os.read(self._events, 1 << 20)
            if not piece:
                raise AssertionError(f"the browser has gone, asked for {method}")
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

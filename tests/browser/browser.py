"""A headless Chromium, driven by its DevTools protocol over two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium")
TIMEOUT_S = 30.0
_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    ),
    *("--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"),
)


def find_chromium() -> str | None:
    """Return the path of Debian's Chromium, or of the one that TROIKA_CHROMIUM names."""
    named = os.environ.get("TROIKA_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process; the context ends it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(
            prefix="troika-chromium-", ignore_cleanup_errors=True
        )
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [program, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        pipes = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Send one command and return its result; events that arrive meanwhile are kept."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last_id:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def page(self) -> "Page":
        """Open a tab with storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        target_id = target["targetId"]
        session = self.call("Target.attachToTarget", targetId=target_id, flatten=True)["sessionId"]
        return Page(self, session, target_id)

    def _read(self) -> Any:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT_S)
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 2**20)
            assert piece, "the browser has ended"
            self._received += piece
        found, _, self._received = self._received.partition(b"\0")
        return json.loads(found)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target_id: str) -> None:
        self._browser = browser
        self._session = session
        self._target_id = target_id
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target_id)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description", done))
        return done["result"].get("value")

    def wait(self, condition: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not in time: {condition}\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}[key]
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        fields["modifiers"] = 8 if shift else 0
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **fields, **down)
        self.call("Input.dispatchKeyEvent", **fields, type="keyUp")

    def click(self, text: str, number: int = 0) -> None:
        """Click the visible button with this text."""
        find = (
            "[...document.querySelectorAll('button')].filter(button => button.offsetParent"
            f" && button.textContent === {json.dumps(text)}).at({number})"
        )
        self.wait(f"Boolean({find})")
        self.run(f"{find}.click()")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    def unnamed_controls(self) -> list[str]:
        """Return the roles of controls without a name for screen readers."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "combobox", "image", "spinbutton", "link", "dialog", "log"}
        return [
            node["role"]["value"]
            for node in nodes
            if not node["ignored"]
            and node["role"]["value"] in roles
            and not node.get("name", {}).get("value")
        ]

    def problems(self) -> list[str]:
        """Return uncaught exceptions and the browser's complaints, such as a violated policy."""
        self.run("0")  # events before this have arrived
        found = []
        for event in self._own_events():
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    found.append(entry["text"])
        return found

    def requested_urls(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self._own_events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _own_events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

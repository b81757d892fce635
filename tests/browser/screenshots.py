"""Takes the pictures of docs/page.md: `python -m tests.browser.screenshots`."""

import os
import signal
import sys
import threading
import time

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.browser.browser import Browser, Page, find_chromium
from tests.paths import DOCS

PROMPT = "class Stack:\n    def __init__(self, items):\n"
LOAD_S = 40.0


def load(engine: Engine, stop: threading.Event) -> None:
    """Send requests that share a prefix until `stop`."""
    number = 0
    while not stop.is_set():
        number += 1
        prompt = "import os\n" * 30 + f"def f{number % 7}(self, "
        engine.post("/v1/completions", prompt=prompt, max_tokens=64, seed=number)


def prepare(page: Page, url: str, width: int, height: int, *, dark: bool) -> None:
    page.resize(width, height, dark=dark)
    page.goto(url)
    settings = '{"mode": "completion", "max_tokens": "220", "seed": "5", "temperature": "0.6"}'
    page.run(f"localStorage.setItem('troika.settings', '{settings}')")
    page.goto(url)


def main() -> int:
    program = find_chromium()
    if program is None:
        print("chromium-headless-shell is not installed", file=sys.stderr)
        return 1
    stop = threading.Event()
    with EngineFactory() as factory, Browser(program) as browser:
        engine = factory(model="demo")
        url = engine.url()
        engine.readiness()
        desktop, phone = browser.page(), browser.page()
        prepare(desktop, url, 1200, 740, dark=False)
        prepare(phone, url, 375, 640, dark=True)
        threads = [threading.Thread(target=load, args=(engine, stop)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(LOAD_S)
        for page in (phone, desktop):
            page.run("document.getElementById('prompt').focus()")
            page.type(PROMPT)
            page.press("Enter")
        desktop.wait(
            "parseInt(document.querySelector('article.assistant .metrics').textContent) > 40"
        )
        os.kill(engine.pid(Role.WORKER), signal.SIGKILL)
        desktop.wait("document.getElementById('events').children.length > 1")
        time.sleep(3)
        desktop.screenshot(DOCS / "page-desktop.png")
        phone.wait("!document.getElementById('send').hidden")
        phone.screenshot(DOCS / "page-phone.png")
        stop.set()
        for thread in threads:
            thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())

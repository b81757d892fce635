"""Takes the picture of a tool call for docs/page.md: `python -m tests.browser.tools_screenshot`."""

import json
import sys

from scripts.testing import EngineFactory
from tests.browser.browser import Browser, find_chromium
from tests.paths import DOCS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
RESULT = '{"temperature": 21, "condition": "sunny"}'
IS_DONE = "document.getElementById('send').hidden === false"


def main() -> int:
    program = find_chromium()
    if program is None:
        print("chromium-headless-shell is not installed", file=sys.stderr)
        return 1
    with EngineFactory() as factory, Browser(program) as browser:
        engine = factory(model="demo-chat")
        url = engine.url()
        engine.readiness()
        page = browser.page()
        page.resize(720, 760)
        page.goto(url)
        settings = json.dumps({"temperature": "0", "tools": json.dumps(TOOLS)})
        page.run(f"localStorage.setItem('troika.settings', {json.dumps(settings)})")
        page.goto(url)
        page.run("document.getElementById('prompt').focus()")
        page.type("How is the weather in Lisbon?")
        page.press("Enter")
        page.wait(f"document.querySelector('article form textarea') && {IS_DONE}")
        page.run("document.querySelector('article form textarea').focus()")
        page.type(RESULT)
        page.click("Send results")
        page.wait(f"document.querySelectorAll('article').length === 4 && {IS_DONE}")
        page.screenshot(DOCS / "page-tools.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

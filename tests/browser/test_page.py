"""The page in Debian's headless Chromium: chat, live view, safety, keyboard, small screens.

`apt-get install chromium-headless-shell`, then `scripts/test tests/browser -m slow`.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import ByteTokenizer
from protocol.config.settings import configure
from protocol.lifecycle import Role
from scripts.testing import EngineFactory
from tests.api.fake_engine import FakeClient, LiveServer, emitting, ids_of
from tests.browser.browser import Browser, Page, find_chromium

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium-headless-shell is not installed"),
]
HOSTILE = """<img src=x onerror="document.title='run'"> <script>document.title='run'</script>

**bold** [x](javascript:document.title='run') ![y](https://other.example/z.png)

```html
<img src=x onerror="document.title='run'">
```

| <svg/onload="document.title='run'"> | b |
|---|---|
| 1 | <iframe src="javascript:parent.document.title='run'"> |
"""
LAST = "[...document.querySelectorAll('article')].at(-1)"
DONE = "!document.getElementById('send').hidden && document.querySelector('article.assistant')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.page()
    yield page
    assert page.problems() == []
    page.close()


def served(text: str = "Hello. ", **settings: object) -> LiveServer:
    config = configure(**({"model": "null"} | settings))
    return LiveServer(config, FakeClient(script=emitting(ids_of(text))))


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


def body_of(page: Page) -> str:
    page.wait(DONE)
    return str(page.run(f"{LAST}.querySelector('.body').innerText"))


def test_output_of_a_model_never_runs_as_a_script(page: Page) -> None:
    """The user's text does not either, nor what is restored after a reload."""
    with served(HOSTILE) as live:
        page.goto(live.url)
        ask(page, HOSTILE[:50])
        for _ in range(2):
            text = body_of(page)
            assert '<img src=x onerror="document.title=' in text
            assert "<script>" in text
            tags = page.run(
                "[...new Set([...document.querySelectorAll('.body *')].map(e => e.localName))]"
            )
            assert not {"img", "script", "svg", "iframe"} & set(tags)
            assert {"strong", "code", "table"} <= set(tags)
            assert page.run("document.title") == "Troika"
            page.goto(live.url)
        assert all(url.startswith(live.url) for url in page.requested_urls())


def test_policy_forbids_markup_and_inline_scripts(browser: Browser) -> None:
    page = browser.page()
    with served() as live:
        page.goto(live.url)
        with pytest.raises(RuntimeError, match="TrustedHTML"):
            page.run("document.body.innerHTML = '<p>x'")
        with pytest.raises(RuntimeError, match="TrustedScript"):
            page.run("document.body.setAttribute('onclick', 'document.title = 1')")
        page.run(
            "{const script = document.createElement('script'); script.append('document.title = 1');"
            "document.body.append(script);}"
        )
        page.run("new Promise(resolve => setTimeout(resolve, 200))")
        assert page.run("document.title") == "Troika"
    page.close()


def test_a_conversation_by_keyboard_survives_a_reload(page: Page) -> None:
    """Send, see the figures, edit, send again, regenerate; all of it survives a reload."""
    with served("Hello *you*. ") as live:
        page.goto(live.url)
        ask(page, "first\nline")
        assert body_of(page).strip() == "Hello you."
        figures = page.run(f"{LAST}.querySelector('.metrics').textContent")
        assert "13 tokens" in figures
        assert "first token" in figures
        assert "cached" in figures
        page.click("Edit")
        assert page.run("document.activeElement.value") == "first\nline"
        page.run("document.activeElement.select()")
        page.type("second")
        page.click("Send again")
        page.wait("document.querySelectorAll('article').length === 2")
        body_of(page)
        page.click("Regenerate")
        body_of(page)
        assert page.run("document.querySelector('article.user .body').innerText") == "second"
        assert len(live.client.requests) == 3
        page.goto(live.url)
        assert page.run("document.querySelectorAll('article').length") == 2
        page.click("New chat")
        assert page.run("document.querySelectorAll('article').length") == 0
        assert page.run("document.activeElement.id") == "prompt"


def test_escape_stops_an_answer(page: Page) -> None:
    client = FakeClient()
    with LiveServer(configure(model="null"), client) as live:
        page.goto(live.url)
        live.call(setattr, client, "is_paused", True)
        ask(page, "go")
        page.wait("document.querySelector('article.late')")
        assert "waiting for the engine" in page.text()
        page.press("Escape")
        page.wait(DONE)
        assert "stopped" in page.run(f"{LAST}.querySelector('.metrics').textContent")
        page.wait("true")
        live.call(setattr, client, "is_paused", False)


def test_key_is_asked_for_once_and_kept_for_the_tab(page: Page) -> None:
    with served(api_key="sk-ünïque") as live:
        page.goto(live.url)
        page.wait("document.getElementById('key-dialog').open")
        assert page.unnamed_controls() == []
        page.type("wrong")
        page.press("Enter")
        page.wait("document.getElementById('key-text').textContent.includes('not accept')")
        page.wait("document.getElementById('key-dialog').open")
        page.type("sk-ünïque")
        page.press("Enter")
        page.wait("document.getElementById('model').value === 'null'")
        page.wait("document.getElementById('state').textContent === 'ready'")
        ask(page, "hi")
        assert "Hello" in body_of(page)
        page.goto(live.url)
        page.wait("document.getElementById('model').value === 'null'")
        assert not page.run("document.getElementById('key-dialog').open")


def test_model_without_a_template_continues_the_text(page: Page) -> None:
    text = TextProcessor(ByteTokenizer())
    client = FakeClient(script=emitting(ids_of(" *and* so on")))
    with LiveServer(configure(model="null"), client, text) as live:
        page.goto(live.url)
        ask(page, "Once")
        assert body_of(page) == " *and* so on"
        live.call(setattr, client, "is_paused", True)
        ask(page, " upon")
        page.wait("document.querySelectorAll('article').length === 4")
        page.wait("document.querySelector('article.streams pre[data-part=text]')")
        live.call(setattr, client, "is_paused", False)
        body_of(page)
        prompt = bytes(i - ids_of("\0")[0] for i in client.requests[-1].prompt_token_ids)
        assert prompt == b"Once *and* so on upon"
        assert "continues the whole text" in page.text()


def test_settings_are_sent_and_kept(page: Page) -> None:
    with served() as live:
        page.goto(live.url)
        page.click("Settings")
        assert page.unnamed_controls() == []
        for name, value in {"temperature": "0.5", "seed": "9", "max_tokens": "3"}.items():
            page.run(f"document.querySelector('[name={name}]').value = '{value}'")
        page.run("document.querySelector('[name=system]').value = 'be brief'")
        page.click("Save")
        page.goto(live.url)
        ask(page, "hi")
        assert body_of(page) == "Hel"
        params = live.client.requests[-1].sampling_params
        assert (params.temperature, params.seed, params.max_tokens) == (0.5, 9, 3)


def test_reasoning_and_tool_calls_are_shown_and_answered(page: Page) -> None:
    """The answers are scripted in the page: the deltas are those of other servers."""
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add"}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    deltas = [
        {"reasoning_content": "I must *add*."},
        {"tool_calls": [call]},
        {"tool_calls": [more]},
    ]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    first = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    last = 'data: {"choices": [{"index": 0, "delta": {"content": "It is 3."}}]}\n\ndata: [DONE]\n\n'
    with served() as live:
        page.goto(live.url)
        page.run(
            f"window.bodies = []; const answers = {json.dumps([first, last])}; const real = fetch;"
            "window.fetch = async (url, options) => { if (!String(url).includes('/chat/'))"
            " return real(url, options); bodies.push(JSON.parse(options.body));"
            " return new Response(answers.shift()); }; 0"
        )
        ask(page, "1 + 2")
        page.wait("document.querySelector('.call')")
        body_of(page)
        assert page.run("document.querySelector('.call').innerText").split() == (
            ["Calls", "add", "{", '"a":', "1", "}"]
        )
        assert page.run("document.querySelector('details em').textContent") == "add"
        page.run("document.querySelector('article form textarea').focus()")
        page.type("3")
        page.click("Send results")
        page.wait("document.querySelectorAll('article').length === 4")
        assert body_of(page) == "It is 3."
        messages = page.run("bodies[1].messages")
        assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "c1"}


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_every_width_shows_everything(page: Page, width: int, dark: bool) -> None:
    with served("A `word` " + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n") as live:
        page.resize(width, 700, dark=dark)
        page.goto(live.url)
        ask(page, "z" * 300)
        body_of(page)
        assert page.run("document.documentElement.scrollWidth") <= width
        is_narrow = page.run("Boolean(document.querySelector('nav').offsetParent)")
        assert is_narrow == (width < 900)
        if is_narrow:
            assert not page.run("Boolean(document.querySelector('canvas').offsetParent)")
            page.click("Engine")
        assert page.run("document.querySelector('canvas').getBoundingClientRect().width") > 100
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.unnamed_controls() == []
        luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128"
        assert page.run(luminance) == dark


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE, Role.API])
def test_kill_9_can_be_watched(
    page: Page, start_engine: EngineFactory, role: Role, tmp_path: Path
) -> None:
    """The answer continues exactly, and the replaced process is highlighted."""
    engine = start_engine("--null-step-ms", "20", "--journal-dir", str(tmp_path))
    url = engine.url()
    engine.readiness()
    page.resize(1280, 800)
    page.goto(url)
    page.click("Settings")
    page.run("document.querySelector('[name=max_tokens]').value = '200'")
    page.run("document.querySelector('[name=seed]').value = '5'")
    page.click("Save")
    page.wait(f"document.querySelector('tr[data-process={role}][data-state=ready]')")
    undisturbed = engine.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=200,
        seed=5,
    )["choices"][0]["message"]["content"]
    ask(page, "hi")
    page.wait(f"parseInt({LAST}.querySelector('.metrics').textContent) >= 20")
    old = engine.pid(role)
    os.kill(old, signal.SIGKILL)
    page.wait(f"document.querySelector('tr.changed[data-process={role}]')")
    page.wait(f"document.getElementById('events').textContent.includes('pid {old}')")
    body_of(page)
    stored = page.run("JSON.parse(localStorage.getItem('troika.conversation')).at(-1)")
    assert stored.get("error") is None
    assert stored["content"] == undisturbed
    assert stored["metrics"]["tokens"] == 200
    assert engine.row(role).epoch > 3

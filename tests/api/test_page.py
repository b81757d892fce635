"""The page's files and headers, the route of its live view, and its scripts under node."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from api_proc.app import openai_app
from api_proc.page import process_list
from api_proc.page.process_list import ProcessList
from api_proc.page.routes import CONTENT_SECURITY_POLICY, OPEN_PATHS
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from protocol.api_core import EngineState
from protocol.config.settings import configure
from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer

STATIC = Path(process_list.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.mjs"))
NODE_TESTS = sorted((Path(__file__).parent / "page").glob("*.test.mjs"))
REPLY = StatusReply(
    [ProcessStatus(Role.WORKER, 0, 77, 4, ProcessState.READY, 2**20, 1, "worker")], True, "http://x"
)


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_every_file_is_served_with_the_policy(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    kinds = {"mjs": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "/": "text/html"}
    assert response.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_files_refer_to_served_files_only(http: httpx.Client) -> None:
    """The page works offline: no file names another host, and every name leads to a file."""
    page = http.get("/").text
    references = re.findall(r'(?:src|href)="([^"#]+)"', page)
    for script in SCRIPTS:
        references += ["page/" + name for name in re.findall(r'from "(.*?)"', script.read_text())]
    assert "page/main.mjs" in references
    for reference in references:
        assert http.get("/" + reference.replace("./", "")).status_code == 200, reference
    for path in STATIC.iterdir():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(https?:)?//[\w.-]+\.\w|@import|url\(", text), path


def test_no_text_can_become_markup() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\("
    for script in SCRIPTS:
        assert not re.search(markup, script.read_text()), script
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=)", page)


def test_controls_have_labels() -> None:
    page = (STATIC / "index.html").read_text()
    labelled = set(re.findall(r'for="([\w-]+)"', page))
    without_labels = re.sub(r"<label.*?</label>", "", page, flags=re.DOTALL)
    for control in re.findall(r"<(?:input|select|textarea)[^>]*>", without_labels):
        [name] = re.findall(r'id="([\w-]+)"', control)
        assert name in labelled
    for name in re.findall(r'aria-labelledby="([\w-]+)"', page):
        assert f'id="{name}"' in page


@pytest.mark.parametrize("path", ["/", "/page/main.mjs", "/debug/engine"])
def test_page_can_be_switched_off(make_server: MakeServer, path: str) -> None:
    live = make_server(enable_page=False)
    assert httpx.get(live.url + path).status_code == 404


@pytest.mark.parametrize(
    "path", ["/page/", "/page/routes.py", "/page/../routes.py", "/page/%2e%2e"]
)
def test_other_files_are_not_served(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_page_needs_no_key_and_its_data_does(make_server: MakeServer) -> None:
    live = make_server(api_key="secret")
    assert httpx.get(live.url + "/").status_code == 200
    assert httpx.get(live.url + "/page/main.mjs").status_code == 200
    assert httpx.get(live.url + "/debug/engine").status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert httpx.get(live.url + "/debug/engine", headers=headers).status_code == 200


def test_the_page_is_served_below_a_path() -> None:
    config = configure(model="null", api_key="secret")
    state = ApiState(FakeClient(), config, TextProcessor.load(config.model))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/llm", openai_app(state))]))

    async def get(path: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(get("/llm/")) == 200
    assert asyncio.run(get("/llm/page/main.mjs")) == 200


# The route of the live view ----------------------------------------------------------------------


class PlayedSupervisor:
    """Answers at once, in the server's event loop, unless its answers are lost."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_silent = False
        self.processes = ProcessList(self._ask)

    def _ask(self) -> bool:
        self.num_asked += 1
        if not self.is_silent:
            asyncio.get_running_loop().call_soon(self.processes.receive, REPLY)
        return True


def supervised(live: LiveServer) -> PlayedSupervisor:
    played = PlayedSupervisor()
    live.state.processes = played.processes
    return played


def test_view_has_processes_and_load(make_server: MakeServer) -> None:
    client = FakeClient()
    load = {"num_running_reqs": 3, "generation_tokens": 40, "kv_cache_usage": 0.5}
    client.report(EngineState.READY, **load, state_cache_usage=0.25)
    live = make_server(client)
    supervised(live)
    view = httpx.get(live.url + "/debug/engine").json()
    assert (view["model"], view["state"], view["is_ready"]) == ("null", "ready", True)
    assert view["processes"] == [
        {
            **{"role": "worker", "rank": 0, "pid": 77, "epoch": 4, "state": "ready"},
            **{"rss_bytes": 2**20, "num_restarts": 1, "name": "worker"},
        }
    ]
    load["state_cache_usage"] = 0.25
    assert {name: view["load"][name] for name in load} == load
    assert abs(view["load_age_s"]) < 1


def test_the_view_is_answered_without_engine_and_supervisor(make_server: MakeServer) -> None:
    live = make_server(FakeClient(facts=None))
    view = httpx.get(live.url + "/debug/engine").json()
    assert (view["state"], view["is_ready"]) == ("starting", False)
    assert view["processes"] is view["load"] is view["load_age_s"] is None


def test_the_view_is_answered_although_the_supervisor_is_silent(make_server: MakeServer) -> None:
    live = make_server()
    played = supervised(live)
    played.is_silent = True
    assert httpx.get(live.url + "/debug/engine").json()["processes"] is None
    played.is_silent = False
    assert httpx.get(live.url + "/debug/engine").json()["processes"] is not None
    assert played.num_asked == 2


def test_any_number_of_readers_share_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_list, "FRESH_S", 60.0)
    monkeypatch.setattr(process_list, "TIMEOUT_S", 60.0)

    async def play() -> int:
        played = PlayedSupervisor()
        replies = await asyncio.gather(*(played.processes.latest() for _ in range(1000)))
        assert replies == [REPLY] * 1000
        return played.num_asked

    assert asyncio.run(play()) == 1


def test_a_list_is_not_older_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_list, "FRESH_S", 60.0)

    async def play() -> int:
        played = PlayedSupervisor()
        await played.processes.latest()
        await played.processes.latest()
        monkeypatch.setattr(process_list, "FRESH_S", 0.0)
        await played.processes.latest()
        played.is_silent = True
        assert await played.processes.latest() is None
        return played.num_asked

    assert asyncio.run(play()) == 3


# Scripts -----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("path", NODE_TESTS, ids=lambda path: str(path.stem))
def test_scripts_pass_their_tests_under_node(path: Path) -> None:
    done = subprocess.run(
        ["node", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

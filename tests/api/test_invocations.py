"""POST /invocations: the fields of a body choose the route, whose answer and errors it has."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from api_proc.http.connection import Connection
from api_proc.http.scope import REQUEST_ID_KEY
from api_proc.peers.forwarding import note_session
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer, embed
from tests.api.scored_prompts import headed, labels, score

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
_UNLIKE = ("id", "created")


def invoke(live: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(live.url + "/invocations", json=body)


@pytest.mark.parametrize(
    ("client", "path", "body"),
    [
        (FakeClient, "/v1/chat/completions", CHAT),
        (FakeClient, "/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        (lambda: FakeClient(script=embed), "/v1/embeddings", {"input": "hi"}),
        (lambda: FakeClient(headed(3), labels), "/classify", {"input": "hi"}),
        (lambda: FakeClient(headed(1), score), "/score", {"queries": "a", "documents": "b"}),
        (lambda: FakeClient(headed(1), score), "/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_each_body_gets_the_answer_of_its_route(
    make_server: MakeServer, client: Any, path: str, body: dict[str, Any]
) -> None:
    live = make_server(client())
    if "prompt" in body or "messages" in body:
        body = body | {"seed": 1}
    answers = [httpx.post(live.url + path, json=body), invoke(live, **body)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    direct, invoked = (answer.json() for answer in answers)
    assert direct.keys() == invoked.keys()
    assert {key for key in direct if direct[key] != invoked[key]} <= set(_UNLIKE)


def test_streams_are_streams_and_errors_name_the_fields_of_the_route(
    make_server: MakeServer,
) -> None:
    live = make_server(FakeClient(), max_body_bytes=3000)
    streamed = invoke(live, **CHAT, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    for body, param in (({"prompt": "hi", "max_tokens": -1}, "max_tokens"), ({"n": 1}, "body")):
        refused = invoke(live, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert invoke(live, prompt="a" * 3000).status_code == 413
    assert httpx.post(live.url + "/invocations", content=b"[").status_code == 400


def test_what_counts_a_request_is_noted_once() -> None:
    """Another request may have its id by the time at which the route of its body begins."""
    sessions = SimpleNamespace(lease_of=lambda _: object())
    state: Any = SimpleNamespace(sessions=sessions, peers=None)
    connection = Connection({"type": "http", REQUEST_ID_KEY: "a"}, unused, unused)
    note_session(state, connection)
    noted = connection.lease.session
    assert noted is not None
    connection.unread(b"{}")
    note_session(state, connection)
    assert connection.lease.session is noted


async def unused(*_: object) -> Any:
    raise AssertionError


def test_a_body_is_charged_once(make_server: MakeServer) -> None:
    """Nothing of it stays charged, or a server would refuse all requests after some time."""
    live = make_server(FakeClient(), max_open_requests=2)
    for _ in range(5):
        assert invoke(live, **CHAT).status_code == 200

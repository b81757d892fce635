"""Errors of the routes below /v1/messages: their shape, their types, and the names of fields."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api_proc.anthropic.bodies import MessagesBody
from api_proc.anthropic.chat import FOREIGN_NAMES
from api_proc.bodies import ChatBody
from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed
from protocol.config.settings import configure
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer
from tests.api.message_bodies import COUNT, PATH, TOOLS, USER, body_of
from tests.message_stream import parse

REQUEST_ID = "trace-1"


def check(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """Check the shape of an error, and return what it contains."""
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"]
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def content(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {"type": "object"}} | fields]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "limit of zero": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "other role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "empty message": ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    "no blocks": (content(), "messages[0].content"),
    "image": (content({"type": "text", "text": "x"}, IMAGE), "messages[0].content[1].type"),
    "document": (content({"type": "document", "source": {}}), "messages[0].content[0].type"),
    "image in a result": (
        content(RESULT | {"content": [IMAGE]}),
        "messages[0].content[0].content[0].type",
    ),
    "unknown block": (content({"type": "server_tool_use"}), "messages[0].content[0].type"),
    "text without text": (content({"type": "text"}), "messages[0].content[0].text"),
    "call by the user": (content(CALL), "messages[0].content[0].type"),
    "result of the assistant": (content(RESULT, role="assistant"), "messages[0].content[0].type"),
    "input that is a list": (
        content(CALL | {"input": []}, role="assistant"),
        "messages[0].content[0].input",
    ),
    "call at the end": (
        {"messages": [USER, {"role": "assistant", "content": [CALL]}]},
        "messages[1].content",
    ),
    "image in the system prompt": ({"system": [IMAGE]}, "system[0].type"),
    "server tool": ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    "tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "tool of another kind": (tool(input_schema={"type": "array"}), "tools[0].input_schema.type"),
    "properties": (tool(input_schema={"properties": 1}), "tools[0].input_schema.properties"),
    "odd name": (tool(name="a b"), "tools[0].name"),
    "deferred tool": (tool(defer_loading=True), "tools[0].defer_loading"),
    "examples": (tool(input_examples=[{}]), "tools[0].input_examples"),
    "other callers": (tool(allowed_callers=["x"]), "tools[0].allowed_callers[0]"),
    "choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "unknown choice": ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    "choice without a name": (tool() | {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "choice of another tool": (
        tool() | {"tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name",
    ),
    "thinking": ({"thinking": {"type": "on"}}, "thinking.type"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    "effort": ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    "task budget": (
        {"output_config": {"task_budget": {"total": 1}}},
        "output_config.task_budget",
    ),
    "empty schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format.schema",
    ),
    "older empty schema": (
        {"output_format": {"type": "json_schema", "schema": {}}},
        "output_format.schema",
    ),
    "other format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    "stop": ({"stop_sequences": [""]}, "stop_sequences[0]"),
    "hot": ({"temperature": 3}, "temperature"),
    "context edits": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type",
    ),
    "fast": ({"speed": "fast"}, "speed"),
    "servers": ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
    "container": ({"container": "c"}, "container"),
    "region": ({"inference_geo": "eu"}, "inference_geo"),
    "tier": ({"service_tier": "priority"}, "service_tier"),
    "user": ({"metadata": {"user_id": "x" * 1025}}, "metadata.user_id"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields_are_named(http: httpx.Client, case: str) -> None:
    fields, param = BAD[case]
    error = check(http.post(PATH, json=body_of(**fields)), 400, "invalid_request_error")
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert len(error["message"]) < 300


def test_the_kinds_of_a_block_are_named(http: httpx.Client) -> None:
    error = check(http.post(PATH, json=body_of(system=[IMAGE])), 400, "invalid_request_error")
    assert error["message"] == "system[0].type: 'image' is not one of text"


def test_names_of_other_routes_are_refused(http: httpx.Client) -> None:
    names = FOREIGN_NAMES.keys() - MessagesBody.__struct_fields__
    for name in sorted(names):
        error = check(
            http.post(PATH, json=body_of(**{name: {"x": 1}})), 400, "invalid_request_error"
        )
        assert error["param"] == name
    assert set(ChatBody.__struct_fields__) <= set(FOREIGN_NAMES)
    unset = dict.fromkeys(FOREIGN_NAMES) | body_of(max_tokens=1)
    assert http.post(PATH, json=unset).status_code == 200
    ignored = http.post(COUNT, json={name: {} for name in names} | body_of())
    assert (ignored.status_code, "x-unknown-fields" in ignored.headers) == (200, False)


def test_a_grammar_that_cannot_be_compiled_is_named(make_server: MakeServer) -> None:
    failure = RequestFailed(RequestError(ErrorCode.INVALID, "no such type", "grammar"))

    def script(add: AddRequest) -> Iterator[RequestOutput]:
        client.receivers[add.request_id].fail(failure)
        return iter(())

    client = FakeClient(script=script)
    live = make_server(client)
    form = {"type": "json_schema", "schema": {"type": "x"}}
    for fields, param in (
        ({"output_config": {"format": form}}, "output_config.format"),
        ({"output_format": form}, "output_format.schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tools"),
    ):
        response = httpx.post(live.url + PATH, json=body_of(**fields))
        error = check(response, 400, "invalid_request_error")
        assert (error["param"], error["message"]) == (param, f"{param}: no such type")


def test_errors_have_anthropics_types(http: httpx.Client) -> None:
    headers = {"x-request-id": REQUEST_ID}
    cases = [
        (http.post(PATH, content=b"{"), 400, "invalid_request_error"),
        (http.post(PATH, json=body_of(model="claude")), 404, "not_found_error"),
        (http.post(COUNT, json=body_of(model="claude")), 404, "not_found_error"),
        (http.post(PATH + "/batches", json={}), 404, "not_found_error"),
        (http.get(PATH), 405, "invalid_request_error"),
        (http.post(PATH, content=b" " * 300_001), 413, "request_too_large"),
        (http.post(COUNT, content=b" " * 300_001), 413, "request_too_large"),
    ]
    for response, status, kind in cases:
        check(response, status, kind)
    response = http.post(PATH, json={}, headers=headers)
    assert check(response, 400, "invalid_request_error")["code"] == "missing_required_parameter"
    assert response.json()["request_id"] == REQUEST_ID
    assert http.get("/v1/messagesX").json()["error"]["type"] == "invalid_request_error"
    assert "request-id" not in http.get("/livez").headers


def test_an_engine_that_cannot_serve(make_server: MakeServer) -> None:
    overloaded = FakeClient()
    overloaded.refusal = RequestFailed(RequestError(ErrorCode.OVERLOADED, "many wait"))
    busy = make_server(overloaded)
    check(httpx.post(busy.url + PATH, json=body_of()), 429, "rate_limit_error")
    failed = FakeClient()
    failed.refusal = RequestFailed(RequestError(ErrorCode.COMPUTATION_FAILED, "it failed"))
    broken = make_server(failed)
    check(httpx.post(broken.url + PATH, json=body_of()), 500, "api_error")
    leaving = make_server()
    leaving.call(leaving.state.drain)
    response = httpx.post(leaving.url + PATH, json=body_of())
    check(response, 503, "overloaded_error")
    assert response.headers["retry-after"] == "1"


def test_a_stream_that_fails_ends_with_an_error(make_server: MakeServer) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client, keep_alive_interval_s=0.05)
    with httpx.stream("POST", live.url + PATH, json=body_of(stream=True)) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: ping"
        live.call(live.state.fail_open)
        *_, last = parse("event: ping\n" + "\n".join(lines))
    assert last.name == "error"
    assert last.data["error"]["type"] == "overloaded_error"
    assert last.data["request_id"] == response.headers["request-id"]


def test_a_message_is_aborted_by_its_id(make_server: MakeServer) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client, keep_alive_interval_s=0.05)
    headers = {"x-request-id": REQUEST_ID}
    options: Any = {"json": body_of(stream=True), "headers": headers}
    with httpx.stream("POST", live.url + PATH, **options) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: ping"
        asked = {"request_ids": [f"msg_{REQUEST_ID}"]}
        aborted = httpx.post(live.url + "/abort_requests", json=asked)
        assert aborted.status_code == 200
        *_, last = parse("event: ping\n" + "\n".join(lines))
    assert last.data["error"]["code"] == "request_aborted"


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer(configure(model="null", api_key=["a", "b"]), FakeClient()) as live:
        yield live


def test_a_key_may_be_in_either_header_and_each_given_key_must_be_right(locked: LiveServer) -> None:
    for headers, status in (
        ({}, 401),
        ({"x-api-key": "a"}, 200),
        ({"x-api-key": "c"}, 401),
        ({"authorization": "Bearer a"}, 200),
        ({"authorization": "Bearer a", "x-api-key": "a"}, 200),
        ({"authorization": "Bearer a", "x-api-key": "b"}, 401),
        ({"authorization": "Bearer a", "x-api-key": "c"}, 401),
    ):
        more = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", **headers}
        response = httpx.post(locked.url + PATH + "?beta=true", json=body_of(), headers=more)
        assert response.status_code == status, headers
        if status == 401:
            check(response, 401, "authentication_error")
        else:
            assert re.fullmatch("[0-9a-f]{32}", response.headers["request-id"])

"""POST /v1/responses: the same chats in another form, typed events, conversations, bad input."""

import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest

from api_proc.bodies import ChatBody, ChatMessage, CompletionBody
from api_proc.responses.body import ResponseDecoder, ResponsesBody
from api_proc.responses.items import InputItem, messages_of
from api_proc.responses.reply import ResponseReply
from api_proc.text.output_sequence import Delta
from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed
from protocol.config.settings import configure
from protocol.core_worker import ModelFacts
from protocol.sampling import FinishReason
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer, emitting, ids_of, wait_until
from tests.api.responses import (
    BODY,
    CONTENT,
    EXPECTED,
    HTTP,
    NOW,
    PATH,
    REASONING,
    TOOLS,
    WEATHER,
    answering,
    check_events,
    content_of,
    create,
    stream,
)
from tests.api.test_chat_tools import ARGUMENTS, TEXT, prompt_of
from tests.api.test_streaming import failing_after
from tests.timing import within

CHAT_PATH = "/v1/chat/completions"
MODEL = "null"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A server whose model reasons and calls two tools in every answer."""
    config = configure(model="null", reasoning_parser="qwen3", max_body_bytes=2_000_000)
    with LiveServer(config, answering(per_output=5)) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    """A server whose model writes text, without reasoning."""
    client = FakeClient(ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID]))
    with LiveServer(configure(model="null"), client) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


# Answers ----------------------------------------------------------------------------------------


def test_whole_response(live: LiveServer) -> None:
    response = create(live, metadata={"a": "b"}, max_output_tokens=900, temperature=0.5)
    assert content_of(response["output"]) == EXPECTED
    assert {item["status"] for item in response["output"]} == {"completed"}
    ids = [item["id"] for item in response["output"]]
    assert [item_id.partition("_")[0] for item_id in ids] == ["rs", "msg", "fc", "fc"]
    assert len(set(ids)) == 4
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    assert len(set(calls)) == 2
    assert re.fullmatch(r"resp_[0-9a-f]{32}", response["id"])
    assert (response["object"], response["status"], response["error"]) == (
        "response",
        "completed",
        None,
    )
    assert (response["metadata"], response["max_output_tokens"]) == ({"a": "b"}, 900)
    assert (response["temperature"], response["store"], response["tool_choice"]) == (
        0.5,
        True,
        "auto",
    )
    assert response["text"]["format"] == {"type": "text"}
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "now"]
    usage = response["usage"]
    num_reasoning = len('<think>\nWhich "city"?')
    assert usage["output_tokens"] == len(TEXT.encode()) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert abs(usage["output_tokens_details"]["reasoning_tokens"] - num_reasoning) <= 10
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert cached == usage["input_tokens"] // 16 * 16


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_events_build_the_whole_response(make_server: MakeServer, per_output: int) -> None:
    live = make_server(answering(per_output=per_output), reasoning_parser="qwen3")
    events = stream(live)
    items = check_events(events)
    assert content_of(items) == EXPECTED
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    final = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    whole = create(live)
    for response in (final, whole):
        assert response["status"] == "completed"
    assert final.keys() == whole.keys()
    same = ("usage", "tools", "text", "tool_choice", "model", "reasoning", "truncation")
    assert {name: final[name] for name in same} == {name: whole[name] for name in same}


def test_text_alone(plain: LiveServer) -> None:
    """Without tools and reasoning there is no parser."""
    fields: dict[str, Any] = {"tools": None, "max_output_tokens": 9}
    whole = create(plain, **fields)
    assert content_of(whole["output"]) == [("message", "The quick")]
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    events = stream(plain, **fields)
    assert content_of(check_events(events)) == [("message", "The quick")]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    kinds = [event["type"] for event in stream(plain, stop="quick", stream_interval=2, tools=None)]
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("num_cut", "statuses"),
    [
        (15, ["incomplete"]),
        (TEXT.index("look"), ["completed", "incomplete"]),
        (TEXT.index('"days"'), ["completed", "completed", "incomplete"]),
        (TEXT.rindex("<tool_call>"), ["completed", "completed", "completed"]),
    ],
)
def test_an_output_that_is_cut(make_server: MakeServer, num_cut: int, statuses: list[str]) -> None:
    """Within reasoning, text and the arguments of a call, and between two calls."""
    live = make_server(answering(), reasoning_parser="qwen3")
    events = stream(live, max_output_tokens=num_cut)
    items = check_events(events)
    assert events[-1]["type"] == "response.incomplete"
    assert [item["status"] for item in items] == statuses
    assert create(live, max_output_tokens=num_cut)["status"] == "incomplete"


def test_an_empty_output_has_an_empty_message(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=emitting([EOS_ID])))
    assert content_of(create(live, tools=None)["output"]) == [("message", "")]
    assert content_of(check_events(stream(live, tools=None))) == [("message", "")]


@pytest.mark.parametrize("with_parser", [False, True])
def test_logprobs_belong_to_the_text(
    live: LiveServer, plain: LiveServer, with_parser: bool
) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if not with_parser:
        fields |= {"tools": None, "max_output_tokens": 9}
    server = live if with_parser else plain
    events = stream(server, **fields)
    items = check_events(events)
    [message] = [item for item in items if item["type"] == "message"]
    [part] = message["content"]
    text = "".join(entry["token"] for entry in part["logprobs"])
    assert part["text"] in text
    assert len(text) <= len(part["text"]) + len("\n<tool_call>\n") + 12
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    assert create(server, tools=fields.get("tools", TOOLS))["output"][0].get("logprobs") is None


# OpenAI's client ----------------------------------------------------------------------------------


def test_official_client(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", tools=TOOLS)
    assert response.output_text == CONTENT
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [
        ("get_weather", ARGUMENTS),
        ("now", "{}"),
    ]
    reasoning = response.output[0]
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == REASONING
    assert client.responses.retrieve(response.id) == response
    items = client.responses.input_items.list(response.id).data
    assert [item.type for item in items] == ["message"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        client.responses.retrieve(response.id)


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == CONTENT
    assert [item.type for item in final.output] == [kind for kind, _ in EXPECTED]


class Place(pydantic.BaseModel):
    city: str


def test_parse(make_server: MakeServer) -> None:
    fake = answering('{"city": "Rome"}')
    live = make_server(fake)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        parsed = client.responses.parse(model=MODEL, input="hi", text_format=Place)
    assert parsed.output_parsed == Place(city="Rome")
    grammar = fake.requests[-1].sampling_params.grammar
    assert grammar is not None
    assert json.loads(grammar.source)["required"] == ["city"]


# The chat that a request stands for ---------------------------------------------------------------


CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "now", "arguments": '{"a": 1}'},
}
CHATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "text": ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
    "instructions": (
        {"instructions": "be brief", "input": "hi"},
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    ),
    "two system messages": (
        {
            "instructions": "be brief",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
                {"type": "message", "role": "user", "content": "hi"},
            ],
        },
        [
            {"role": "system", "content": "be brief\n\nbe kind"},
            {"role": "user", "content": "hi"},
        ],
    ),
    "parts": (
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_text", "text": "b"},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "c", "annotations": []},
                        {"type": "refusal", "refusal": "d"},
                    ],
                },
                {"role": "user", "content": "e"},
            ]
        },
        [
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c\nd"},
            {"role": "user", "content": "e"},
        ],
    ),
    "call and result": (
        {"input": [{"role": "user", "content": "hi"}, THOUGHT, CALL, RESULT]},
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [CHAT_CALL],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ],
    ),
    "text before a call": (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "I look."},
                CALL,
                CALL | {"call_id": "call_2"},
                RESULT,
                RESULT | {"call_id": "call_2", "output": [{"type": "input_text", "text": "x"}]},
            ]
        },
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_2"}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
            {"role": "tool", "tool_call_id": "call_2", "content": "x"},
        ],
    ),
}


@pytest.mark.parametrize("case", CHATS)
def test_the_prompt_is_that_of_the_chat(live: LiveServer, case: str) -> None:
    fields, messages = CHATS[case]
    create(live, **fields)
    chat_tools = [{"type": "function", "function": tool | {"type": None}} for tool in TOOLS]
    for tool in chat_tools:
        del tool["function"]["type"]
    body = {"messages": messages, "tools": chat_tools}
    assert HTTP.post(live.url + CHAT_PATH, json=body).status_code == 200
    prompts = [prompt_of(add) for add in live.client.requests[-2:]]
    assert prompts[0] == prompts[1]
    request = ResponseDecoder()(json.dumps(fields).encode()).request
    assert isinstance(request.input, list)
    made = [item.for_template() for item in messages_of(request.instructions, request.input)]
    given = msgspec.convert(messages, list[ChatMessage])
    assert made == [item.for_template() for item in given], "also what this template leaves out"


SHARED: dict[str, Any] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"70": 2.0},
    "stop_token_ids": [70],
    "ignore_eos": True,
    "min_tokens": 3,
    "allowed_token_ids": [70, 71],
    "bad_words": ["fox"],
    "structured_outputs": {"regex": "[a-z]+"},
    "priority": -2,
    "cache_salt": "salt",
    "user": "tenant",
}


def test_fields_reach_the_engine_as_in_a_chat(plain: LiveServer) -> None:
    """Each parameter that both routes have, and those with another name or place."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({name: value}, {name: value}) for name, value in SHARED.items()),
        ({"max_output_tokens": 11}, {"max_completion_tokens": 11}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema},
                }
            },
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
    ]
    for fields, chat_fields in pairs:
        create(plain, **{"tools": None, "seed": 5, "max_output_tokens": 3} | fields)
        body = {"messages": [{"role": "user", "content": "hi"}], "seed": 5, "max_tokens": 3}
        body |= chat_fields
        assert HTTP.post(plain.url + CHAT_PATH, json=body).status_code == 200
        response, chat = plain.client.requests[-2:]
        assert same(response) == same(chat), fields


def same(add: AddRequest) -> tuple[Any, ...]:
    return add.prompt_token_ids, add.sampling_params, add.priority, add.cache_salt, add.tenant


def test_tools_are_enforced_as_in_a_chat(live: LiveServer) -> None:
    strict = WEATHER | {"strict": True}
    some = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    cases: list[tuple[dict[str, Any], list[str] | None]] = [
        ({}, None),
        ({"tool_choice": "required"}, ["get_weather", "now"]),
        ({"tool_choice": {"type": "function", "name": "now"}}, ["now"]),
        ({"tool_choice": some}, ["get_weather"]),
        ({"tools": [strict, NOW]}, ["get_weather", "now"]),
        ({"tools": [strict], "tool_choice": "none"}, None),
    ]
    for fields, names in cases:
        create(live, **fields)
        grammar = live.client.requests[-1].sampling_params.grammar
        assert (grammar is None) == (names is None)
        source = "" if grammar is None else grammar.source
        found = [name for name in ("get_weather", "now") if f'\\"{name}\\"' in source]
        assert found == (names or [])


def test_effort_reaches_the_template() -> None:
    for effort, thinking in (("none", False), ("high", None)):
        body = json.dumps({"input": "x", "reasoning": {"effort": effort, "summary": "auto"}})
        variables = ResponseDecoder()(body.encode()).template_variables
        assert variables["reasoning_effort"] == effort
        assert variables.get("enable_thinking") is thinking


# Conversations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_continued(live: LiveServer, streamed: bool) -> None:
    """The prompt has all turns; instructions are those of the last request only."""
    first = create(live, instructions="be brief")
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    fields = {"previous_response_id": first["id"], "input": results, "instructions": "be kind"}
    second = stream(live, **fields)[-1]["response"] if streamed else create(live, **fields)
    assert second["previous_response_id"] == first["id"]
    empty: list[Any] = [None, "", []]
    for nothing in empty:
        create(live, previous_response_id=second["id"], input=nothing)
        assert prompt_of(live.client.requests[-1]).endswith("</tool_call>\nassistant: ")
    create(live, previous_response_id=second["id"], input="thanks")
    spread = [
        {"role": "user", "content": "hi"},
        *first["output"],
        *results,
        *second["output"],
        {"role": "user", "content": "thanks"},
    ]
    create(live, input=spread)
    continued, sent = live.client.requests[-2:]
    assert prompt_of(continued) == prompt_of(sent)
    prompt = prompt_of(continued)
    assert "be kind" not in prompt
    assert prompt.count("<tool_call>") == 4
    assert prompt.count("tool: sun") == 2
    assert prompt.rindex("user: thanks") > prompt.rindex("tool: sun")


def test_a_response_that_was_not_stored_cannot_be_continued(live: LiveServer) -> None:
    response = create(live, store=False)
    assert response["store"] is False
    for unknown in (response["id"], "resp_x", "x" * 200):
        found = HTTP.get(f"{live.url}{PATH}/{unknown}")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "response_not_found")
        assert "restart of the server loses" in found.json()["error"]["message"]
        body = BODY | {"previous_response_id": unknown}
        error = HTTP.post(live.url + PATH, json=body)
        assert error.status_code == 404
        assert error.json()["error"]["param"] == "previous_response_id"
        assert error.json()["error"]["code"] == "previous_response_not_found"


def test_the_last_turns_are_kept_where_truncation_is_auto(make_server: MakeServer) -> None:
    live = make_server(FakeClient(ModelFacts("null", 1000, 200, 16, 200, [EOS_ID])))
    turns = [
        {"role": role, "content": f"{role[0]}{number} " + "x" * 20}
        for number in range(10)
        for role in ("user", "assistant")
    ]
    fields: dict[str, Any] = {
        "tools": None,
        "instructions": "brief",
        "input": [*turns, {"role": "user", "content": "end"}],
        "max_output_tokens": 20,
    }
    refused = HTTP.post(live.url + PATH, json=BODY | fields)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input"
    rendered = [f"{turn['role']}: {turn['content']}\n" for turn in turns]
    fixed = len("system: brief\nuser: end\nassistant: ")
    for num_output in range(1, 140, 9):
        create(live, **fields | {"truncation": "auto", "max_output_tokens": num_output})
        kept = next(
            rendered[first:]
            for first in range(2, len(turns) + 1, 2)
            if fixed + sum(map(len, rendered[first:])) <= 200 - num_output
        )
        prompt = prompt_of(live.client.requests[-1])
        assert prompt == f"system: brief\n{''.join(kept)}user: end\nassistant: "
    error = HTTP.post(
        live.url + PATH, json=BODY | fields | {"input": "x" * 300, "truncation": "auto"}
    )
    assert error.json()["error"]["code"] == "context_length_exceeded"


def test_input_items(live: LiveServer) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(4)]
    items.append({"role": "assistant", "content": "4"})
    response = create(live, input=items)
    url = f"{live.url}{PATH}/{response['id']}/input_items"
    whole = HTTP.get(url, params={"order": "asc"}).json()
    kinds = [*["input_text"] * 4, "output_text"]
    assert [item["content"] for item in whole["data"]] == [
        [{"type": kind, "text": text}] for kind, text in zip(kinds, "01234", strict=True)
    ]
    assert {item["type"] for item in whole["data"]} == {"message"}
    assert whole["has_more"] is False
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 5
    page = HTTP.get(url, params={"limit": "2", "after": ids[3]}).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    for name, value in (
        ("limit", "0"),
        ("limit", "9" * 5000),
        ("limit", "x"),
        ("order", "up"),
        ("after", "y"),
    ):
        bad = HTTP.get(url, params={name: value})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, name)


# The end of a response ----------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_read_and_cancelled_while_it_runs(
    make_server: MakeServer, streamed: bool
) -> None:
    fake = FakeClient(ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID]), endless)
    live = make_server(fake)
    with httpx.Client(base_url=live.url) as http, httpx.Client(base_url=live.url) as other:
        body = {"input": "hi", "stream": True}
        with http.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            response_id = next(
                json.loads(line[6:])["response"]["id"]
                for line in lines
                if line.startswith("data: ")
            )
            next(line for line in lines if "output_text.delta" in line)
            url = f"{PATH}/{response_id}"
            running = other.get(url).json()
            assert running["status"] == "in_progress"
            assert running["output"][0]["status"] == "incomplete"
            assert other.delete(url).status_code == 409
            if streamed:
                cancelled = other.post(f"{url}/cancel").json()
                assert cancelled["status"] == "cancelled"
            else:
                ids = {"request_ids": [response_id]}
                found = other.post("/abort_requests", json=ids).json()
                assert found == {"aborted": [response_id]}
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "cancelled"
        wait_until(lambda: len(fake.cancelled) == 1)
        stored = other.get(url).json()
        assert stored == last["response"]
        assert stored["output"][0]["content"][0]["text"].startswith("xx")
        assert other.post(f"{url}/cancel").json() == stored, "it has already been cancelled"


def endless(add: AddRequest) -> Iterator[RequestOutput]:
    for index in range(1_000_000):
        yield RequestOutput(add.request_id, index, ids_of("x"))


def test_a_response_that_has_ended_cannot_be_cancelled(live: LiveServer) -> None:
    response = create(live)
    error = HTTP.post(f"{live.url}{PATH}/{response['id']}/cancel")
    assert error.status_code == 400
    assert "completed" in error.json()["error"]["message"]
    assert HTTP.post(f"{live.url}{PATH}/resp_x/cancel").status_code == 404


def test_a_response_that_is_being_kept_is_not_cancelled(live: LiveServer) -> None:
    """Its client will receive the end, while the record is written."""
    counts = {"num_prompt_tokens": 1, "num_output_tokens": 1, "num_cached_tokens": 0}
    sequence = SimpleNamespace(**counts, finish_reason="stop", reasoning=None)
    generation: Any = SimpleNamespace(
        **{"secret": None, "created": 1, "position": None, "is_resumable": False},
        sequences=[sequence],
        abort=lambda: True,
    )
    body = ResponseDecoder()(b'{"input": "x"}')
    reply = ResponseReply(live.state, SimpleNamespace(), body, generation)  # type: ignore[arg-type]
    assert reply.frames(sequence, Delta("x", [5], None, (), "stop"))  # type: ignore[arg-type]
    assert b"response.completed" in reply.last_frames()
    assert json.loads(live.call(reply.cancel))["status"] == "completed"


def test_a_failure_within_the_stream_is_an_event(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=failing_after(2)))
    events = stream(live, tools=None)
    check_events(events)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert "engine ended the request" in last["response"]["error"]["message"]
    stored = HTTP.get(f"{live.url}{PATH}/{last['response']['id']}").json()
    assert stored == last["response"]


def test_a_failure_before_the_stream_is_a_status(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=failing_after(0)))
    response = HTTP.post(live.url + PATH, json={"input": "hi", "stream": True})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("stream_it", [False, True])
def test_a_timeout_ends_the_response(make_server: MakeServer, stream_it: bool) -> None:
    fake = FakeClient()
    fake.is_paused = True
    live = make_server(fake, keep_alive_interval_s=0.05)
    body = {"input": "x", "timeout": 0.3, "stream": stream_it}
    response = HTTP.post(live.url + PATH, json=body, timeout=10)
    if stream_it:
        lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line[6:]) for line in lines]
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert events[-1]["response"]["error"]["code"] == "deadline_exceeded"
    else:
        assert response.status_code == 504


# Bad input ----------------------------------------------------------------------------------------


def message(**part: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [part]}]}


def test_many_instructions_take_a_time_in_proportion_to_their_length() -> None:
    """Joining them one by one would copy the text for each."""
    items = [InputItem("message", role="system", content="🙂" + "x" * 1000) for _ in range(4096)]

    def measure() -> dict[str, float]:
        began = time.thread_time()
        [message] = messages_of("Be brief.", items)
        assert isinstance(message.content, str)
        assert len(message.content) == len("Be brief.") + 4096 * (2 + 1001)
        return {"join_s": time.thread_time() - began}

    within(3, measure, join_s=0.1)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "empty text": ({"input": ""}, "input"),
    "number": ({"input": 5}, "input"),
    "item": ({"input": [5]}, "input[0]"),
    "item type": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "role": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "no role": ({"input": [{"content": "x"}]}, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "image": (message(type="input_image", image_url="x"), "input[0].content[0].type"),
    "no text": (message(type="input_text"), "input[0].content[0].text"),
    "no name": ({"input": [CALL | {"name": None}]}, "input[0].name"),
    "large arguments": (
        {"input": [CALL | {"arguments": '{"a":[%s0]}' % ("0," * 70_000)}, RESULT]},
        "input",
    ),
    "no output": ({"input": [RESULT | {"output": None}]}, "input[0].output"),
    "image in a result": (
        {"input": [RESULT | {"output": [{"type": "input_image"}]}]},
        "input[0].output[0].type",
    ),
    "encrypted": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
    ),
    "too many items": ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "web search": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "custom tool": ({"tools": [WEATHER, {"type": "custom", "name": "x"}]}, "tools[1].type"),
    "tool name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    "unnamed tool": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "parameters": (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
        "tools[0].parameters.type",
    ),
    "chosen tool": ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    "unnamed choice": ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    "hosted choice": ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    "allowed tools": (
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}},
        "tool_choice.tools",
    ),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "empty schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
        "text.format.schema",
    ),
    "format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    "two constraints": (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "x"}},
        "structured_outputs",
    ),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "include": ({"include": ["file_search_call.results"]}, "include[0]"),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    "stream options": ({"stream_options": {}}, "stream_options"),
    "metadata": ({"metadata": {"a": 1}}, "metadata[...]"),
    "long metadata": ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
    "truncation": ({"truncation": "left"}, "truncation"),
    "output limit": ({"max_output_tokens": 0}, "max_output_tokens"),
    "too long": ({"max_output_tokens": 2_000_000}, "max_output_tokens"),
    "template": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
}


@pytest.mark.parametrize(
    ("value", "reason"), [([], "is empty"), ("", "is empty"), (None, "the field is missing")]
)
def test_an_empty_input_is_not_called_missing(
    live: LiveServer, value: list[str] | str | None, reason: str
) -> None:
    response = HTTP.post(live.url + PATH, json=BODY | {"input": value})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"input: {reason}"


@pytest.mark.parametrize("case", BAD)
def test_bad_fields_are_named(live: LiveServer, case: str) -> None:
    fields, param = BAD[case]
    response = HTTP.post(live.url + PATH, json=BODY | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param.replace("[...]", "")
    assert error["message"].startswith(error["param"])
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    "name",
    sorted(
        (set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__))
        - set(ResponsesBody.__struct_fields__)
    ),
)
def test_fields_of_other_routes_are_refused(live: LiveServer, name: str) -> None:
    """They constrain the answer there, and would have no effect here."""
    response = HTTP.post(live.url + PATH, json=BODY | {name: 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    create(live, **{name: None})


def test_errors_of_the_engine_name_the_fields_of_this_route(make_server: MakeServer) -> None:
    fake = FakeClient()
    live = make_server(fake)
    fake.refusal = RequestFailed(RequestError(ErrorCode.INVALID, "too complex", "prompt"))
    response = HTTP.post(live.url + PATH, json={"input": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


def test_a_conversation_is_bounded(make_server: MakeServer) -> None:
    """A small request cannot ask for the work of many large ones."""
    live = make_server(
        FakeClient(ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID])), max_body_bytes=5000
    )
    fields: dict[str, Any] = {"tools": None, "input": "x" * 3000, "max_output_tokens": 1}
    first = create(live, **fields)
    fields["previous_response_id"] = first["id"]
    fields["previous_response_id"] = create(live, **fields)["id"]
    refused = HTTP.post(live.url + PATH, json=BODY | fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")


def test_the_finish_reason_of_a_stop_string_is_completed(plain: LiveServer) -> None:
    response = create(plain, tools=None, stop=["brown"])
    assert response["status"] == "completed"
    assert content_of(response["output"]) == [("message", "The quick ")]
    assert FinishReason.LENGTH not in response["status"]


# The number of input tokens -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"instructions": "be kind", "tools": TOOLS}, {"previous": True, "max_output_tokens": 3}],
)
def test_the_count_of_input_tokens_is_that_of_the_response(
    live: LiveServer, fields: dict[str, Any]
) -> None:
    fields = dict(fields)
    if fields.pop("previous", False):
        fields["previous_response_id"] = create(live)["id"]
    counted = HTTP.post(live.url + PATH + "/input_tokens", json=BODY | fields)
    num_tokens = create(live, **fields)["usage"]["input_tokens"]
    expected = {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert (counted.status_code, counted.json()) == (200, expected)


def test_prompts_beyond_the_context_are_counted_and_bad_ones_are_refused(
    make_server: MakeServer,
) -> None:
    live = make_server(FakeClient(ModelFacts("null", 1000, 200, 16, 70_000, [EOS_ID])))

    def count(**fields: Any) -> httpx.Response:
        return HTTP.post(live.url + PATH + "/input_tokens", json=fields)

    turns = [{"role": "user", "content": "a" * 150}] * 2
    assert count(input=turns).json()["input_tokens"] > 200
    assert count(input=turns, truncation="auto").json()["input_tokens"] < 200
    for fields, param in (
        ({}, "input"),
        ({"input": "a", "max_tokens": 1}, "max_tokens"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        refused = count(**fields)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == param
    assert live.client.requests == []

"""The answers of /v1/responses, whole and as typed events, also through OpenAI's client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer, emitting
from tests.api.responses.tool_model import (
    CONTENT,
    EXPECTED,
    REASONING,
    TOOLS,
    answering,
    check_events,
    content_of,
    create,
    stream,
)
from tests.api.tool_answers import ARGUMENTS, TEXT

MODEL = "null"


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def test_a_whole_response_has_all_items(live: LiveServer) -> None:
    response = create(
        live, metadata={"a": "b"}, max_output_tokens=900, temperature=0.5, frequency_penalty=0.5
    )
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
    assert (response["frequency_penalty"], response["presence_penalty"]) == (0.5, 0.0)
    assert response["service_tier"] == "default"
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


def test_text_alone_is_one_message(plain: LiveServer) -> None:
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
def test_an_output_that_is_cut_is_incomplete(
    make_server: MakeServer, num_cut: int, statuses: list[str]
) -> None:
    """The cut is in reasoning, in text, in the arguments of a call, or between two calls."""
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


@pytest.mark.parametrize(("per_output", "interval"), [(7, 1), (1000, 1), (3, 20)])
def test_logprobs_of_the_text_do_not_depend_on_the_tokens_that_arrive_together(
    live: LiveServer, make_server: MakeServer, per_output: int, interval: int
) -> None:
    """After a reconnection they arrive together. Those of reasoning and calls are left out."""
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    other = make_server(answering(per_output=per_output), reasoning_parser="qwen3")

    def names(items: list[dict[str, Any]]) -> list[str]:
        [message] = [item for item in items if item["type"] == "message"]
        return [entry["token"] for entry in message["content"][0]["logprobs"]]

    one = names(check_events(stream(live, **fields)))
    assert CONTENT in "".join(one)
    assert one == names(check_events(stream(other, stream_interval=interval, **fields)))
    assert one == names(create(other, **fields)["output"])


def test_the_official_client_reads_a_response(client: openai.OpenAI) -> None:
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


def test_the_stream_helper_accumulates_a_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == CONTENT
    assert [item.type for item in final.output] == [kind for kind, _ in EXPECTED]


class Place(pydantic.BaseModel):
    city: str


def test_the_parser_of_the_official_client_reads_a_text_format(make_server: MakeServer) -> None:
    fake = answering('{"city": "Rome"}')
    live = make_server(fake)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        parsed = client.responses.parse(model=MODEL, input="hi", text_format=Place)
    assert parsed.output_parsed == Place(city="Rome")
    grammar = fake.requests[-1].sampling_params.grammar
    assert grammar is not None
    assert json.loads(grammar.source)["required"] == ["city"]

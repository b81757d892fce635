"""Responses of a real engine: OpenAI's client, exact streams through kill -9, stored responses."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.api.responses import check_events, content_of
from tests.system.api.test_tool_calls import ARGUMENTS, MESSAGES, REASONING, TEMPLATE, TEXT
from tests.system.api.test_tool_calls import TOOLS as CHAT_TOOLS
from tests.system.scripted_model import write_scripted_model
from tests.system.streams import Event, Stream

PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
INPUT = MESSAGES[0]["content"]
BODY = {"input": INPUT, "tools": TOOLS, "temperature": 0, "stream": True}
EXPECTED = [
    ("reasoning", REASONING),
    ("message", "I call it."),
    ("function_call", ("write", ARGUMENTS)),
    ("function_call", ("now", "{}")),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a journal and a model that reasons and calls two tools."""
    directory = tmp_path_factory.mktemp("scripted")
    added = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    template = TEMPLATE.replace("in tools %", "in tools or [] %")
    write_scripted_model(directory, template, MESSAGES, CHAT_TOOLS, text=TEXT, added_tokens=added)
    with EngineFactory() as factory:
        flags = ("--num-gpu-blocks-override", "256", "--journal-dir", f"{factory.base}/journal")
        started = factory(*flags, "--served-model-name", "m", model=str(directory))
        started.ready()
        yield started


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="x", max_retries=0) as client:
        yield client


class Answer(pydantic.BaseModel):
    color: Literal["green", "red"]


def test_official_client(client: openai.OpenAI) -> None:
    """Whole and streamed responses, and a conversation."""
    options: Any = {"model": "m", "tools": TOOLS, "temperature": 0}
    whole = client.responses.create(input=INPUT, **options)
    with client.responses.stream(input=INPUT, **options) as stream:
        streamed = stream.until_done().get_final_response()
    for response in (whole, streamed):
        assert content_of([item.to_dict() for item in response.output]) == EXPECTED
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == len(REASONING) + 2
    assert client.responses.retrieve(streamed.id).output_text == "I call it."
    calls = [item for item in whole.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for call in calls
    ]
    options |= {"max_output_tokens": 20}
    continued = client.responses.create(previous_response_id=whole.id, input=results, **options)
    history: Any = [
        {"role": "user", "content": INPUT},
        *(item.to_dict() for item in whole.output),
        *results,
    ]
    sent = client.responses.create(input=history, **options)
    assert continued.status == "incomplete"
    assert continued.usage is not None
    assert sent.usage is not None
    assert continued.usage.input_tokens == sent.usage.input_tokens > whole.usage.input_tokens
    contents = [content_of([i.to_dict() for i in r.output]) for r in (continued, sent)]
    assert contents[0] == contents[1]


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    """The grammar confines the content only: the model reasons before it."""
    parsed = client.responses.parse(model="m", input="color?", text_format=Answer, temperature=0)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.color in ("green", "red")


def decoded(events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events]


def read_until_arguments(stream: Stream) -> list[Event]:
    """Read until the first call has some of its arguments, and not all."""
    events: list[Event] = []
    num_characters = 0
    while num_characters < 20:
        event = stream.next()
        assert event is not None
        events.append(event)
        found = json.loads(event.data)
        if found["type"] == "response.function_call_arguments.delta":
            num_characters += len(found["delta"])
    assert num_characters < len(ARGUMENTS) - 50
    return events


def test_a_stream_is_exact_through_the_death_of_worker_and_core(engine: Engine) -> None:
    stream = Stream(engine.url(), BODY, path=PATH)
    events = read_until_arguments(stream)
    epochs = [engine.kill(role).epoch for role in (Role.WORKER, Role.CORE)]
    events += stream.events()
    assert all(epoch > 1 for epoch in epochs)
    assert content_of(check_events(decoded(events))) == EXPECTED
    assert decoded(events)[-1]["type"] == "response.completed"


def test_a_stream_and_stored_responses_survive_the_death_of_the_api(
    engine: Engine, client: openai.OpenAI
) -> None:
    options: Any = {"model": "m", "input": INPUT, "temperature": 0, "max_output_tokens": 60}
    first = client.responses.create(tools=TOOLS, **options)
    named = {"X-Request-Id": "story"}
    body = BODY | {"previous_response_id": first.id, "max_output_tokens": 100, "tools": []}
    stream = Stream(engine.url(), body, path=PATH, headers=named)
    assert stream.read_head() == 200
    events = [event for event in (stream.next() for _ in range(6)) if event is not None]
    engine.kill(Role.API)
    stream.close()
    assert events[-1].id is not None
    headers = named | {"Last-Event-ID": events[-1].id}
    events += Stream(engine.url(), body, path=PATH, headers=headers).events()
    items = check_events(decoded(events))
    last = decoded(events)[-1]["response"]
    assert last["output"] == items
    assert client.responses.retrieve(first.id) == first
    stored = client.responses.retrieve(last["id"])
    assert [item.to_dict() for item in stored.output] == items
    again = Stream(engine.url(), body, path=PATH, headers=named).events()
    assert decoded(again)[-1]["response"]["id"] == last["id"]

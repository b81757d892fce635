"""Tool calls of a real engine, in chats and responses: official client, streams through kill -9."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.api.responses.tool_model import check_events, content_of
from tests.system.api.tool_calls import ARGUMENTS, MESSAGES, REASONING, TEMPLATE, TEXT, TOOLS
from tests.system.scripted_model import write_scripted_model
from tests.system.streams import Event, Stream

PATH = "/v1/chat/completions"
BODY = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a journal and a model that calls two tools."""
    directory = tmp_path_factory.mktemp("scripted")
    added = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    write_scripted_model(directory, TEMPLATE, MESSAGES, TOOLS, text=TEXT, added_tokens=added)
    with EngineFactory() as factory:
        flags = ("--num-gpu-blocks-override", "256", "--journal-dir", f"{factory.base}/journal")
        started = factory(*flags, "--served-model-name", "m", model=str(directory))
        started.ready()
        yield started


def test_official_client(engine: Engine) -> None:
    """Whole answers and the stream helper give equal calls, whose arguments are parsed."""
    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="x", max_retries=0) as client:
        options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
        whole = client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I call it."
        calls: Any = choice.message.tool_calls
        arguments = [call.function.arguments for call in calls]
        assert arguments == [ARGUMENTS, "{}"]
        assert [call.function.name for call in calls] == ["write", "now"]
    assert whole.message.model_extra is not None
    assert whole.message.model_extra["reasoning_content"] == REASONING


def message_of(events: list[Event]) -> tuple[str, str, list[list[str]], str | None]:
    """Return reasoning, content, calls without ids, and finish reason."""
    reasoning = content = ""
    finish_reason = None
    calls: list[list[str]] = []
    for event in events:
        if event.data == "[DONE]":
            continue
        assert finish_reason is None
        choice = json.loads(event.data)["choices"][0]
        finish_reason = choice["finish_reason"]
        reasoning += choice["delta"].get("reasoning_content", "")
        content += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return reasoning, content, calls, finish_reason


EXPECTED = (REASONING, "I call it.", [["write", ARGUMENTS], ["now", "{}"]], "tool_calls")


def arguments_of(events: list[Event]) -> str:
    calls = message_of(events)[2]
    return calls[0][1] if calls else ""


def read_until_arguments(stream: Stream, num_characters: int) -> list[Event]:
    """Read until the first call has some of its arguments, and not all."""
    events: list[Event] = []
    while len(arguments_of(events)) < num_characters:
        event = stream.next()
        assert event is not None
        events.append(event)
    assert len(arguments_of(events)) < len(ARGUMENTS) - 50
    return events


def test_a_stream_of_calls_is_exact_through_the_death_of_worker_and_core(engine: Engine) -> None:
    stream = Stream(engine.url(), BODY, path=PATH)
    events = read_until_arguments(stream, 20)
    epochs = [engine.kill(role).epoch for role in (Role.WORKER, Role.CORE)]
    events += stream.events()
    assert all(epoch > 1 for epoch in epochs)
    assert message_of(events) == EXPECTED
    assert events[-1].data == "[DONE]"


@pytest.mark.slow  # tests/api/test_chat_tools.py resumes such streams after every event
def test_a_stream_of_calls_is_exact_through_the_death_of_the_api(engine: Engine) -> None:
    """The parser continues within a string of the arguments; ids stay the same."""
    named = {"X-Request-Id": "story"}
    stream = Stream(engine.url(), BODY, path=PATH, headers=named)
    events = read_until_arguments(stream, 30)
    ids = [event.id for event in events]
    engine.kill(Role.API)
    stream.close()
    assert ids[-1] is not None
    headers = named | {"Last-Event-ID": ids[-1]}
    rest = Stream(engine.url(), BODY, path=PATH, headers=headers).events()
    assert message_of(events + rest) == EXPECTED
    again = Stream(engine.url(), BODY, path=PATH, headers=named).events()
    assert call_ids(again) == call_ids(events + rest)


def call_ids(events: list[Event]) -> list[str]:
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    return [call["id"] for call in calls if "id" in call]


def test_required_calls_are_generated_and_survive_the_death_of_worker_and_core(
    start_engine: EngineFactory,
) -> None:
    """The null model chooses at random; the grammar makes a valid call of it."""
    engine = start_engine("--null-step-ms", "3")
    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="x", max_retries=0) as client:
        options: Any = {
            "model": "null",
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "write"}},
            "max_tokens": 400,
        }
        whole: Any = client.chat.completions.create(**options).choices[0].message.tool_calls
        with client.chat.completions.stream(**options) as stream:
            for number, _ in enumerate(stream):
                if number == 5:
                    engine.kill(Role.WORKER)
                    engine.kill(Role.CORE)
            streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [call.function.name for call in streamed] == ["write"]
    assert streamed[0].function.arguments == whole[0].function.arguments
    assert set(json.loads(whole[0].function.arguments)) <= {"text"}


# Responses ----------------------------------------------------------------------------------------

RESPONSES = "/v1/responses"
RESPONSE_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
INPUT = MESSAGES[0]["content"]
RESPONSE_BODY = {"input": INPUT, "tools": RESPONSE_TOOLS, "temperature": 0, "stream": True}
RESPONSE_ITEMS = [
    ("reasoning", REASONING),
    ("message", "I call it."),
    ("function_call", ("write", ARGUMENTS)),
    ("function_call", ("now", "{}")),
]


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="x", max_retries=0) as client:
        yield client


class Answer(pydantic.BaseModel):
    color: Literal["green", "red"]


def test_official_client_of_responses(client: openai.OpenAI) -> None:
    """It gets whole and streamed responses, and continues a conversation."""
    options: Any = {"model": "m", "tools": RESPONSE_TOOLS, "temperature": 0}
    whole = client.responses.create(input=INPUT, **options)
    with client.responses.stream(input=INPUT, **options) as stream:
        streamed = stream.until_done().get_final_response()
    for response in (whole, streamed):
        assert content_of([item.to_dict() for item in response.output]) == RESPONSE_ITEMS
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


def test_reasoning_precedes_a_parsed_answer(client: openai.OpenAI) -> None:
    """The grammar confines the content only: the model reasons before it."""
    parsed = client.responses.parse(model="m", input="color?", text_format=Answer, temperature=0)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.color in ("green", "red")


def decoded(events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events]


def read_response_until_arguments(stream: Stream) -> list[Event]:
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


def test_a_response_is_exact_through_the_death_of_worker_and_core(engine: Engine) -> None:
    stream = Stream(engine.url(), RESPONSE_BODY, path=RESPONSES)
    events = read_response_until_arguments(stream)
    epochs = [engine.kill(role).epoch for role in (Role.WORKER, Role.CORE)]
    events += stream.events()
    assert all(epoch > 1 for epoch in epochs)
    assert content_of(check_events(decoded(events))) == RESPONSE_ITEMS
    assert decoded(events)[-1]["type"] == "response.completed"


def test_a_response_and_stored_responses_survive_the_death_of_the_api(
    engine: Engine, client: openai.OpenAI
) -> None:
    options: Any = {"model": "m", "input": INPUT, "temperature": 0, "max_output_tokens": 60}
    first = client.responses.create(tools=RESPONSE_TOOLS, **options)
    named = {"X-Request-Id": "story"}
    body = RESPONSE_BODY | {"previous_response_id": first.id, "max_output_tokens": 100, "tools": []}
    stream = Stream(engine.url(), body, path=RESPONSES, headers=named)
    assert stream.read_head() == 200
    events = [event for event in (stream.next() for _ in range(6)) if event is not None]
    engine.kill(Role.API)
    stream.close()
    assert events[-1].id is not None
    headers = named | {"Last-Event-ID": events[-1].id}
    events += Stream(engine.url(), body, path=RESPONSES, headers=headers).events()
    items = check_events(decoded(events))
    last = decoded(events)[-1]["response"]
    assert last["output"] == items
    assert client.responses.retrieve(first.id) == first
    stored = client.responses.retrieve(last["id"])
    assert [item.to_dict() for item in stored.output] == items
    again = Stream(engine.url(), body, path=RESPONSES, headers=named).events()
    assert decoded(again)[-1]["response"]["id"] == last["id"]

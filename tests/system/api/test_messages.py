"""Anthropic's Messages API on real engines: its client, and exact streams through kill -9."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.message_stream import MessageEvent, message_of
from tests.system.api.tool_calls import ARGUMENTS, MESSAGES, REASONING, TEMPLATE, TEXT
from tests.system.api.tool_calls import TOOLS as CHAT_TOOLS
from tests.system.scripted_model import write_scripted_model
from tests.system.streams import Event, Stream

PATH = "/v1/messages"
TOOLS: Any = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in CHAT_TOOLS
]
BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0}
BODIES = {
    "text": BODY | {"max_tokens": 300},
    "call": BODY
    | {"max_tokens": 400, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "write"}},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine without a model, with a journal."""
    with EngineFactory() as factory:
        yield factory("--null-step-ms", "3", "--journal-dir", f"{factory.base}/journal")


def decoded(event: Event | None) -> MessageEvent:
    assert event is not None
    data = json.loads(event.data)
    return MessageEvent(data["type"], data, event.id)


def read_deltas(stream: Stream, count: int) -> list[MessageEvent]:
    """Read some pieces of the first block, or all of it where they are merged to fewer."""
    events: list[MessageEvent] = []
    while sum(event.name == "content_block_delta" for event in events) < count:
        events.append(decoded(stream.next()))
        if events[-1].name == "content_block_stop":
            break
    return events


def outcome(message: dict[str, Any]) -> Any:
    """Return what equal requests have in common."""
    blocks = [
        {name: value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    return blocks, message["stop_reason"], message["usage"]["output_tokens"]


def test_streams_of_text_and_calls_are_exact_through_the_death_of_worker_and_core(
    engine: Engine,
) -> None:
    whole = {name: engine.post(PATH, **body) for name, body in BODIES.items()}
    assert [block["type"] for block in whole["text"]["content"]] == ["text"]
    assert [block["type"] for block in whole["call"]["content"]] == ["tool_use"]
    assert set(whole["call"]["content"][0]["input"]) <= {"text"}
    streams = {
        name: Stream(engine.url(), body | {"stream": True}, path=PATH)
        for name, body in BODIES.items()
    }
    events = {name: read_deltas(stream, 5) for name, stream in streams.items()}
    for role in (Role.WORKER, Role.CORE):
        assert engine.kill(role).epoch > 1
    for name, stream in streams.items():
        events[name] += map(decoded, stream.events())
        assert outcome(message_of(events[name])) == outcome(whole[name])


@pytest.mark.slow  # tests/api/test_messages.py resumes such streams after every event
@pytest.mark.parametrize("name", BODIES)
def test_a_stream_is_exact_through_the_death_of_the_api(engine: Engine, name: str) -> None:
    body, named = BODIES[name] | {"stream": True}, {"X-Request-Id": f"r-{name}"}
    whole = outcome(engine.post(PATH, **BODIES[name]))
    stream = Stream(engine.url(), body, path=PATH, headers=named)
    events = read_deltas(stream, 9)
    engine.kill(Role.API)
    stream.close()
    assert events[-1].id is not None
    headers = named | {"Last-Event-ID": events[-1].id}
    rest = Stream(engine.url(), body, path=PATH, headers=headers).events()
    events += map(decoded, rest)
    assert outcome(message_of(events)) == whole


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose model reasons, writes text and calls two tools."""
    directory = tmp_path_factory.mktemp("scripted")
    added = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    write_scripted_model(directory, TEMPLATE, MESSAGES, CHAT_TOOLS, text=TEXT, added_tokens=added)
    with EngineFactory() as factory:
        flags = ("--num-gpu-blocks-override", "256", "--api-key", "secret")
        started = factory(*flags, "--served-model-name", "m", model=str(directory))
        started.ready()
        yield started


@pytest.mark.slow  # needs the package anthropic
def test_official_client(scripted: Engine) -> None:
    anthropic = pytest.importorskip("anthropic")
    options: Any = {
        "model": "m",
        "max_tokens": 2000,
        "messages": MESSAGES,
        "tools": TOOLS,
        "extra_body": {"temperature": 0},  # version 2 has no argument for it
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    expected = [
        ("thinking", REASONING),
        ("text", "I call it."),
        ("tool_use", json.loads(ARGUMENTS)),
        ("tool_use", {}),
    ]
    with anthropic.Anthropic(base_url=scripted.url(), api_key="secret", max_retries=0) as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            names = [event.type for event in stream]
            streamed = stream.get_final_message()
            assert stream.request_id
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            values = [block_value(block) for block in message.content]
            assert values == expected
        assert {"text", "thinking", "input_json", "message_stop"} <= set(names)
        assert whole._request_id
        prompt = {name: options[name] for name in ("model", "messages", "tools", "thinking")}
        usage = whole.usage
        counted = client.messages.count_tokens(**prompt).input_tokens
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type"):
            client.messages.create(**options | {"thinking": {"type": "on"}})
        with pytest.raises(anthropic.NotFoundError, match="'gpt' does not exist"):
            client.messages.create(**options | {"model": "gpt"})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**options)
        assert [model.id for model in client.models.list()] == ["m"]


def block_value(block: Any) -> tuple[str, Any]:
    names = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return block.type, getattr(block, names[block.type])

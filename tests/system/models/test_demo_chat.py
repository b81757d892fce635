"""The demo-chat model end to end: chats, reasoning, tool calls and their results, kill -9."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.system.streams import Event, Stream

PATH = "/v1/chat/completions"
MAX_TRIALS = 5
CITY = "Grimsel"
"""A name that is not in the training data."""


def tool(name: str, *parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"} for parameter in parameters},
        "required": [*parameters],
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER, MESSAGE = tool("get_weather", "city"), tool("send_message", "to", "text")
PACK = tool("pack", "items")
PACK["function"]["parameters"]["properties"]["items"] = {
    "type": "array",
    "items": {"type": "string", "minLength": 3, "maxLength": 12},
    "minItems": 14,
    "maxItems": 14,
}
"""A tool whose calls are long."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with EngineFactory() as factory:
        flags = ("--num-gpu-blocks-override", "256", "--num-threads", "1")
        started = factory(*flags, model="demo-chat")
        started.ready()
        yield started


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="x", max_retries=0) as client:
        yield client


def body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    fields = {"temperature": 0, "max_tokens": 160, **fields}
    return {"model": "demo-chat", "messages": messages, **fields}


def test_reasoning_is_switched_by_the_request(client: openai.OpenAI) -> None:
    question = "What is the capital of Italy?"
    messages = []
    for enable_thinking in (True, False):
        extra = {"enable_thinking": enable_thinking}
        answer = client.chat.completions.create(**body(question), extra_body=extra)
        messages.append(answer.choices[0].message)
        assert answer.choices[0].finish_reason == "stop"
    thinking, plain = messages
    assert thinking.content == plain.content == "The capital of Italy is Rome."
    assert "Italy" in (thinking.model_extra or {})["reasoning_content"]
    assert "reasoning_content" not in (plain.model_extra or {})


def test_streamed_call_and_the_answer_to_its_result(client: openai.OpenAI) -> None:
    request = body(f"How is the weather in {CITY}?", tools=[WEATHER])
    whole = client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": CITY}
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"temperature": 21, "condition": "sunny"}',
    }
    request["messages"] += [streamed.message.to_dict(), result]
    answer = client.chat.completions.create(**request).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == f"It is 21 degrees and sunny in {CITY}."


def test_calls_that_are_required(client: openai.OpenAI) -> None:
    """A call instead of a greeting, and of the tool that the request names."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for question, tools, choice, arguments in (
        ("Hello!", [WEATHER], "required", {"city"}),
        (f"How is the weather in {CITY}?", [WEATHER, MESSAGE], named, {"city"}),
    ):
        request = body(question, tools=tools, tool_choice=choice)
        [call] = client.chat.completions.create(**request).choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == arguments


def arguments_of(events: list[Event]) -> str:
    choices = [json.loads(event.data)["choices"][0] for event in events if event.data != "[DONE]"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    return "".join(call["function"].get("arguments", "") for call in calls)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_a_call_continues_exactly_after_kill_9(engine: Engine, role: Role) -> None:
    """The process dies while the arguments are streamed."""
    fields = {"tools": [PACK], "tool_choice": "required", "max_tokens": 400, "stream": True}
    request = body("Pack green apples and dark bread.", **fields)
    undisturbed = arguments_of(Stream(engine.url(), request, path=PATH).events())
    assert len(json.loads(undisturbed)["items"]) == 14
    for _ in range(MAX_TRIALS):
        epoch = engine.row(role).epoch
        stream = Stream(engine.url(), request, path=PATH)
        events: list[Event] = []
        while not arguments_of(events):
            event = stream.next()
            assert event is not None
            events.append(event)
        assert engine.kill(role).epoch > epoch
        num_before = len(arguments_of(events))
        events += stream.events()
        assert arguments_of(events) == undisturbed
        assert events[-1].data == "[DONE]"
        if num_before < len(undisturbed) / 2:
            return
    raise TimeoutError(f"half of the arguments came before a kill, {MAX_TRIALS} times")


def test_demo_chat_model_has_its_size_and_a_description() -> None:
    directory = Path(__file__).resolve().parents[3] / "scripts" / "demo_chat_model"
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 25_000_000
    text = (directory / "README.md").read_text().lower()
    for word in ("licence", "loss", "held-out", "limits"):
        assert word in text

"""Tools and reasoning over HTTP: OpenAI's client, streams, history, bad input, resumption."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api_proc.app import start_sessions
from protocol.config.settings import configure
from protocol.sampling import GrammarKind
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer, emitting, ids_of
from tests.api.tool_answers import ARGUMENTS, FACTS, PARAMETERS, TEXT, prompt_of

MODEL = "null"
PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
USER: Any = {"role": "user", "content": "hi"}


def answering(text: str = TEXT, *, per_output: int = 1) -> FakeClient:
    return FakeClient(FACTS, emitting([*ids_of(text), EOS_ID], per_output=per_output))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A server whose model reasons and calls two tools in every answer."""
    config = configure(model="null", reasoning_parser="qwen3", max_body_bytes=2_000_000)
    with LiveServer(config, answering()) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def test_a_whole_answer_has_content_reasoning_and_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], tools=TOOLS)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == 'Which "city"?'
    assert choice.message.model_extra["reasoning"] == 'Which "city"?'
    calls: Any = choice.message.tool_calls
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("function", "get_weather", ARGUMENTS),
        ("function", "now", "{}"),
    ]
    assert len({call.id for call in calls}) == 2


def test_the_stream_helper_accumulates_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[USER], tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    pieces: Any = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(p.arguments_delta for p in pieces if p.index == 0) == ARGUMENTS
    done: Any = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert [(e.index, e.name) for e in done] == [(0, "get_weather"), (1, "now")]
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    calls: Any = message.tool_calls
    assert [c.function.arguments for c in calls] == [ARGUMENTS, "{}"]


def chunks_of(live: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [USER], "tools": TOOLS, "stream": True} | fields
    lines = httpx.post(live.url + PATH, json=body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_chunks_have_each_field_where_clients_expect_it(live: LiveServer) -> None:
    """The first chunk has the role, a call's first its id, type and name, the last the reason."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(live)]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for index in (0, 1):
        first, *others = [call for call in calls if call["index"] == index]
        assert first["type"] == "function"
        assert first["id"].startswith("call_")
        assert first["function"]["name"] == ("get_weather", "now")[index]
        for piece in (first, *others):
            assert isinstance(piece["function"]["arguments"], str)
        assert all(set(piece) == {"index", "function"} for piece in others)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks_of(live)]
    assert [reason for reason in reasons if reason is not None] == ["tool_calls"]
    assert reasons[-1] == "tool_calls"


def test_reasoning_can_be_left_out(live: LiveServer) -> None:
    with_it, without = chunks_of(live), chunks_of(live, include_reasoning=False)
    assert message_of(with_it)[0] == 'Which "city"?'
    assert message_of(without)[0] == ""
    assert message_of(without)[1] == message_of(with_it)[1]
    assert all(chunk["choices"][0]["delta"] for chunk in with_it[:-1] + without[:-1])


def test_each_sequence_has_its_calls_and_logprobs(live: LiveServer) -> None:
    chunks = chunks_of(live, n=2, logprobs=True)
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        calls = [call for c in choices for call in c["delta"].get("tool_calls", [])]
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == 0]
        assert "".join(pieces) == ARGUMENTS
        entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert len(entries) == len(TEXT.encode()) + 1


def test_without_tools_calls_are_text(client: openai.OpenAI, live: LiveServer) -> None:
    cases: list[Any] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for fields in cases:
        answer = client.chat.completions.create(model=MODEL, messages=[USER], **fields)
        [choice] = answer.choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == TEXT.partition("</think>\n\n")[2]
        assert "tools" not in prompt_of(live.client.requests[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_was_held_back_comes_at_the_end(make_server: MakeServer, stream: bool) -> None:
    live = make_server(answering("if a <tool_c"))
    body = {"messages": [USER], "tools": TOOLS, "stream": stream}
    if stream:
        assert message_of(chunks_of(live))[1] == "if a <tool_c"
        return
    [choice] = httpx.post(live.url + PATH, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("if a <tool_c", "stop")


HISTORY: Any = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
]


def test_history_and_tools_reach_the_template(client: openai.OpenAI, live: LiveServer) -> None:
    client.chat.completions.create(model=MODEL, messages=HISTORY, tools=[WEATHER])  # type: ignore[list-item]
    prompt = prompt_of(live.client.requests[-1])
    tools, rest = prompt.removeprefix("tools: ").split("\n", 1)
    assert json.loads(tools) == [WEATHER]
    assert rest == (
        "user: hi\nassistant: \n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        "tool: sunny\nassistant: "
    )


def test_arguments_that_are_not_an_object_stay_text(live: LiveServer) -> None:
    """The model may have written them; the chat must be able to go on."""
    broken = json.loads(json.dumps(HISTORY))
    broken[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Ro'
    assert httpx.post(live.url + PATH, json={"messages": broken}).status_code == 200
    assert '"arguments": "{\\"city' in prompt_of(live.client.requests[-1])


@pytest.mark.parametrize(
    ("arguments", "num_calls", "status"),
    [
        ('{"a": [' + "{}," * 70_000 + "{}]}", 1, 400),
        ('{"a": [' + "1," * 40_000 + "1]}", 2, 400),
        (json.dumps({"text": 'a, "b" [' * 60_000}), 1, 200),
    ],
)
def test_arguments_have_a_bound_on_their_values(
    live: LiveServer, arguments: str, num_calls: int, status: int
) -> None:
    """A template gets them decoded, at many times their size; long strings do not count."""
    history = json.loads(json.dumps(HISTORY))
    [call] = history[1]["tool_calls"]
    call["function"]["arguments"] = arguments
    history[1]["tool_calls"] *= num_calls
    body = {"messages": history, "truncate_prompt_tokens": 5}
    response = httpx.post(live.url + PATH, json=body, timeout=30)
    assert response.status_code == status, response.text
    if status == 400:
        where = f"messages[1].tool_calls[{num_calls - 1}].function.arguments"
        assert response.json()["error"]["param"] == where


def grammar_of(live: LiveServer) -> str | None:
    grammar = live.client.requests[-1].sampling_params.grammar
    assert grammar is None or grammar.kind is GrammarKind.LARK
    return None if grammar is None else grammar.source


def test_required_and_strict_calls_have_a_grammar(live: LiveServer) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "function", "function": {"name": "get_weather"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [allowed]}}
    for fields, names in (
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "auto"}, None),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ["get_weather", "now"]),
        ({"tools": TOOLS, "tool_choice": "required"}, ["get_weather", "now"]),
        ({"tools": TOOLS, "tool_choice": named}, ["now"]),
        ({"tools": TOOLS, "tool_choice": some}, ["get_weather"]),
        ({"tools": [strict, NOW]}, ["get_weather", "now"]),
        ({"tools": [strict], "tool_choice": "none"}, None),
    ):
        assert httpx.post(live.url + PATH, json={"messages": [USER]} | fields).status_code == 200
        source = grammar_of(live)
        assert (source is None) == (names is None)
        found = [name for name in ("get_weather", "now") if f'\\"{name}\\"' in (source or "")]
        assert found == (names or [])


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"tools": [tool()] * 1025}, "tools"),
    "long name": ({"tools": [tool(name="x" * 2**20)]}, "tools[0].function.name"),
    "odd name": ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    "newline": ({"tools": [tool(name="a\n")]}, "tools[0].function.name"),
    "text": ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
    "no object": (
        {"tools": [tool(), tool(parameters={"type": "array"})]},
        "tools[1].function.parameters.type",
    ),
    "properties": (
        {"tools": [tool(parameters={"properties": [1]})]},
        "tools[0].function.parameters.properties",
    ),
    "property": (
        {"tools": [tool(parameters={"properties": {"a": 1}})]},
        "tools[0].function.parameters.properties.a",
    ),
    "required": (
        {"tools": [tool(parameters={"required": "a"})]},
        "tools[0].function.parameters.required",
    ),
    "other type": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "unknown name": (
        {"tools": [tool()], "tool_choice": tool(name="g")},
        "tool_choice.function.name",
    ),
    "no such choice": ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
    "no tools": ({"tool_choice": tool()}, "tool_choice"),
    "large schema": (
        {"tools": [tool(parameters={"description": "x" * 300_000})], "tool_choice": "required"},
        "tools",
    ),
    "large together": (
        {"tools": [tool(description="x" * 20_000)] * 60},
        "tools",
    ),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tools_are_named(live: LiveServer, case: str) -> None:
    fields, param = BAD[case]
    began = time.process_time()  # of the server, too, which is a thread
    response = httpx.post(live.url + PATH, json={"messages": [USER]} | fields, timeout=30)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000
    assert time.process_time() - began < 1


def test_a_name_of_another_form_is_answered_with_the_form(live: LiveServer) -> None:
    body = {"messages": [USER], "tools": [tool(), tool(name="a b")]}
    error = httpx.post(live.url + PATH, json=body).json()["error"]
    assert error["message"] == "tools[1].function.name: must be 1 to 256 of A-Z a-z 0-9 _ . : / -"


def test_a_model_without_a_format_refuses_tools(make_server: MakeServer) -> None:
    live = make_server(answering("x"), tool_call_parser="off")
    response = httpx.post(live.url + PATH, json={"messages": [USER], "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "--tool-call-parser" in response.json()["error"]["message"]


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_a_stream_resumed_after_any_event_is_exact(
    make_server: MakeServer, tmp_path: Path, per_output: int
) -> None:
    """The parser's state is rebuilt from the outputs, also with other pieces of text."""
    live = make_server(
        answering(per_output=per_output), journal_dir=str(tmp_path), reasoning_parser="qwen3"
    )
    live.call(start_sessions, live.state)
    body = {"messages": [USER], "tools": TOOLS, "stream": True}
    with httpx.Client(base_url=live.url, headers={"X-Request-Id": "r"}) as http:

        def ask(**headers: str) -> list[tuple[dict[str, Any], str | None]]:
            blocks = http.post(PATH, json=body, headers=headers).text.split("\n\n")
            found: list[tuple[dict[str, Any], str | None]] = []
            for block in blocks:
                fields = dict(line.split(": ", 1) for line in block.splitlines())
                if fields.get("data", "[DONE]") != "[DONE]":
                    found.append((json.loads(fields["data"]), fields.get("id")))
            return found

        whole = ask()
        expected = message_of([chunk for chunk, _ in whole])
        assert [call[2] for call in expected[2]] == [ARGUMENTS, "{}"]
        for count, (_, event_id) in enumerate(whole, start=1):
            assert event_id is not None
            rest = ask(**{"Last-Event-ID": event_id})
            chunks = [chunk for chunk, _ in [*whole[:count], *rest]]
            assert message_of(chunks) == expected
    assert len(live.client.requests) == 1
    live.call(live.state.sessions.close)  # type: ignore[union-attr]


def message_of(chunks: list[dict[str, Any]]) -> tuple[str, str, list[list[str]], list[str]]:
    """Return reasoning, content, calls and finish reasons of a stream."""
    reasoning = content = ""
    calls: list[list[str]] = []
    reasons = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        reasoning += choice["delta"].get("reasoning_content", "")
        content += choice["delta"].get("content", "")
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
    return reasoning, content, calls, reasons

"""A body of /v1/responses stands for a chat: its prompt, its parameters and its tools."""

import json
from typing import Any

import msgspec
import pytest

from api_proc.generation.messages import ChatMessage
from api_proc.responses.body import ResponseDecoder
from api_proc.responses.items import messages_of
from protocol.api_core import AddRequest
from tests.api.fake_engine import LiveServer
from tests.api.responses.tool_model import CALL, HTTP, NOW, RESULT, TOOLS, WEATHER, create
from tests.api.tool_answers import prompt_of

CHAT_PATH = "/v1/chat/completions"


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
    for effort, thinking in (("none", False), ("high", True)):
        body = json.dumps({"input": "x", "reasoning": {"effort": effort, "summary": "auto"}})
        variables = ResponseDecoder()(body.encode()).template_variables
        assert variables["reasoning_effort"] == effort
        assert variables.get("enable_thinking") is thinking

"""Bad bodies of /v1/responses are refused, and the field is named."""

import time
from typing import Any

import pytest

from api_proc.bodies import ChatBody, CompletionBody
from api_proc.responses.body import ResponsesBody
from api_proc.responses.items import InputItem, messages_of
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed
from protocol.model_facts import ModelFacts
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer
from tests.api.responses.tool_model import BODY, CALL, HTTP, PATH, RESULT, WEATHER, create
from tests.timing import within


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
    "stream options": (
        {"stream_options": {"include_obfuscation": False}},
        "stream_options",
    ),
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

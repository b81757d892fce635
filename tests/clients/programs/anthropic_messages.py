"""Anthropic's client: messages, streams, tools and the count of tokens."""

from typing import Any

import anthropic
from checks import MODEL, URL, check, error_of, main, require_route

PATH = "/v1/messages"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SHORT: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12}
SHORT["extra_body"] = {"temperature": 0}  # the client has no such argument any more
TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
        },
    }
]

client = anthropic.Anthropic(base_url=URL, max_retries=0, timeout=60)


@check
def messages() -> None:
    require_route(PATH)
    answer: Any = client.messages.create(**SHORT, system="Be brief.")
    assert answer.role == "assistant"
    assert answer.content[0].text
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 12


@check
def content_blocks() -> None:
    require_route(PATH)
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    answers: list[Any] = [
        client.messages.create(**SHORT | {"messages": form}) for form in (MESSAGES, blocks)
    ]
    assert answers[0].content[0].text == answers[1].content[0].text


@check
def stream() -> None:
    require_route(PATH)
    whole: Any = client.messages.create(**SHORT)
    with client.messages.stream(**SHORT) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


@check
def tools() -> None:
    """A call, its result in the history, and the answer to that."""
    require_route(PATH)
    answer: Any = client.messages.create(
        **SHORT | {"max_tokens": 300},
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert all(call.input["city"] in ("Rome", "Oslo") for call in calls)
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    final: Any = client.messages.create(**SHORT | {"messages": history}, tools=TOOLS)
    assert final.content


@check
def tool_stream() -> None:
    require_route(PATH)
    with client.messages.stream(
        **SHORT | {"max_tokens": 300},
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "weather"},
    ) as events:
        kinds = [event.type for event in events]
        final: Any = events.get_final_message()
    assert "input_json" in kinds
    [call] = [block for block in final.content if block.type == "tool_use"]
    assert call.input["days"] in (1, 2, 3)


@check
def stop_sequences() -> None:
    require_route(PATH)
    text = client.messages.create(**SHORT).content[0].text  # type: ignore[union-attr]
    stop = text.strip()[3:6]
    answer = client.messages.create(**SHORT, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@check
def count_tokens() -> None:
    require_route(PATH + "/count_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens == client.messages.create(**SHORT).usage.input_tokens


@check
def errors() -> None:
    require_route(PATH)
    create = client.messages.create
    body = error_of(
        anthropic.BadRequestError, create, **SHORT | {"extra_body": {"temperature": 9}}
    ).body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


if __name__ == "__main__":
    main()

"""OpenAI's client for Python, in the versions 2 and 3."""

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
from checks import MODEL, URL, check, error_of, main, require_route

BASE_URL = URL + "/v1"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SHORT: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
LONG: Any = SHORT | {"max_tokens": 300}
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}

client = openai.OpenAI(base_url=BASE_URL, max_retries=0, timeout=60)


class Colour(pydantic.BaseModel):
    """What structured answers contain."""

    name: Literal["red", "green", "blue"]
    shade: Literal[1, 2, 3]


class Weather(pydantic.BaseModel):
    """What a tool takes."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": Weather.model_json_schema()},
    }
]


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def completions() -> None:
    """Two prompts, two sequences of each, with log-probabilities."""
    answer: Any = client.completions.create(
        model=MODEL, prompt=["def a(", "def b("], max_tokens=5, n=2, logprobs=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.token_logprobs) == 5 for choice in answer.choices)
    assert answer.usage.completion_tokens == 20
    assert answer._request_id


@check
def completion_stream() -> None:
    options: Any = {"model": MODEL, "prompt": "def a(", "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


@check
def chat() -> None:
    answer: Any = client.chat.completions.create(**SHORT, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == 12


@check
def chat_stream() -> None:
    whole = client.chat.completions.create(**SHORT)
    chunks: Any = list(client.chat.completions.create(**SHORT, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


@check
def stream_helper() -> None:
    body = {"guided_choice": ["a fine day"]}
    with client.chat.completions.stream(**SHORT, extra_body=body) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == "a fine day"


@check
def parse() -> None:
    parsed = client.chat.completions.parse(**LONG, response_format=Colour)
    assert isinstance(parsed.choices[0].message.parsed, Colour)


@check
def stream_helper_with_parse() -> None:
    with client.chat.completions.stream(**LONG, response_format=Colour) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Colour)


@check
def json_object() -> None:
    answer = client.chat.completions.create(
        **LONG | {"max_tokens": 100}, response_format={"type": "json_object"}
    )
    choice = answer.choices[0]
    assert str(choice.message.content).lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(str(choice.message.content)), dict)


@check
def tools() -> None:
    """A call, its result in the history, and the answer to that."""
    answer: Any = client.chat.completions.create(**LONG, tools=TOOLS, **ONE_CALL)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    call = message.tool_calls[0]
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    history: Any = [*MESSAGES, message, *results]
    final = client.chat.completions.create(**SHORT | {"messages": history}, tools=TOOLS)
    assert final.choices[0].message.content


@check
def tool_stream() -> None:
    """The helper collects the pieces of the arguments."""
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**LONG, tools=TOOLS, tool_choice=named) as stream:
        events: Any = list(stream)
        final: Any = stream.get_final_completion().choices[0]
    pieces = [
        event.arguments_delta
        for event in events
        if event.type == "tool_calls.function.arguments.delta"
    ]
    arguments = final.message.tool_calls[0].function.arguments
    assert "".join(pieces) == arguments
    Weather.model_validate_json(arguments)


@check
def parsed_tools() -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    parsed: Any = client.chat.completions.parse(**LONG, tools=[tool], **ONE_CALL)
    call = parsed.choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Weather)


@check
def embeddings() -> None:
    batch = client.embeddings.create(model=MODEL, input=["a text", "another"]).data
    alone = client.embeddings.create(model=MODEL, input="a text", encoding_format="float").data
    assert [item.index for item in batch] == [0, 1]
    assert alone[0].embedding == batch[0].embedding != batch[1].embedding


@check
def errors() -> None:
    create = client.chat.completions.create
    refused = error_of(openai.BadRequestError, create, **SHORT | {"temperature": 9})
    assert refused.param == "temperature"
    assert refused.request_id
    unknown = error_of(openai.NotFoundError, create, **SHORT | {"model": "other"})
    assert unknown.code == "model_not_found"


@check
def asynchronous() -> None:
    async def gather() -> list[str]:
        async with openai.AsyncOpenAI(base_url=BASE_URL, max_retries=0, timeout=60) as api:

            async def answer() -> str:
                stream = await api.chat.completions.create(**SHORT, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[answer() for _ in range(8)])

    assert len(set(asyncio.run(gather()))) == 1


@check
def responses() -> None:
    """An answer, the next turn of the conversation, and the stored answer."""
    require_route("/v1/responses")
    options: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(**options, input="Hello", instructions="Be brief.")
    assert first.output_text
    assert first.usage is not None
    assert first.usage.output_tokens == 12
    second = client.responses.create(**options, input="More", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text


@check
def response_stream() -> None:
    require_route("/v1/responses")
    options: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "input": "Hello"}
    with client.responses.stream(**options) as stream:
        events: Any = list(stream)
    final = events[-1].response
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"  # at the limit
    assert "".join(pieces) == final.output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))


@check
def response_parse() -> None:
    require_route("/v1/responses")
    options: Any = {"model": MODEL, "max_output_tokens": 300, "temperature": 0, "input": "Hello"}
    parsed = client.responses.parse(**options, text_format=Colour)
    assert isinstance(parsed.output_parsed, Colour)


@check
def response_tools() -> None:
    require_route("/v1/responses")
    tool: Any = {
        "type": "function",
        "name": "weather",
        "parameters": Weather.model_json_schema(),
        "strict": False,
    }
    options: Any = {"model": MODEL, "max_output_tokens": 300, "temperature": 0, "tools": [tool]}
    first: Any = client.responses.create(**options, input="Hello", **ONE_CALL)
    [call] = [item for item in first.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        **options | {"max_output_tokens": 12},
        input=[result],
        previous_response_id=first.id,
        tool_choice="none",
    )
    assert second.output_text


if __name__ == "__main__":
    main()

"""LiteLLM, through its providers `openai` and `hosted_vllm`."""

from typing import Any, Literal

import litellm
import pydantic
from checks import MODEL, URL, check, error_of, main

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
OPTIONS: Any = {"api_base": URL + "/v1", "api_key": "none", "temperature": 0, "num_retries": 0}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
            },
        },
    }
]
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}
PROVIDERS = ("openai/", "hosted_vllm/")


class Colour(pydantic.BaseModel):
    """What structured answers contain."""

    name: Literal["red", "green", "blue"]


def complete(provider: str, **options: Any) -> Any:
    return litellm.completion(
        **{"model": provider + MODEL, "messages": MESSAGES, "max_tokens": 12} | OPTIONS | options
    )


@check
def chat() -> None:
    answers = [complete(provider) for provider in PROVIDERS]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].usage.completion_tokens == 12


@check
def stream() -> None:
    for provider in PROVIDERS:
        whole = complete(provider)
        chunks = list(complete(provider, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        rebuilt: Any = litellm.stream_chunk_builder(chunks)
        assert rebuilt.usage.completion_tokens == 12


@check
def text_completion() -> None:
    answer: Any = litellm.text_completion(
        **{"model": f"text-completion-openai/{MODEL}", "prompt": "def a(", "max_tokens": 5}
        | OPTIONS
    )
    assert answer.choices[0].text


@check
def tools() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, tools=TOOLS, max_tokens=300, **ONE_CALL)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        call = message.tool_calls[0]
        assert call.function.name == "weather"
        history = [
            *MESSAGES,
            message,
            *(
                {"role": "tool", "tool_call_id": item.id, "content": "sunny"}
                for item in message.tool_calls
            ),
        ]
        final = complete(provider, messages=history, tools=TOOLS)
        assert final.choices[0].message.content


@check
def tool_stream() -> None:
    for provider in PROVIDERS:
        named = {"type": "function", "function": {"name": "weather"}}
        chunks = list(
            complete(provider, tools=TOOLS, tool_choice=named, max_tokens=300, stream=True)
        )
        rebuilt: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert rebuilt.choices[0].message.tool_calls[0].function.name == "weather"


@check
def response_format() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, response_format=Colour, max_tokens=300)
        Colour.model_validate_json(answer.choices[0].message.content)


@check
def embeddings() -> None:
    for provider in PROVIDERS:
        answer: Any = litellm.embedding(
            model=provider + MODEL, input=["a", "b"], api_base=URL + "/v1", api_key="none"
        )
        assert len(answer.data) == 2


@check
def errors() -> None:
    error = error_of(litellm.BadRequestError, complete, provider="openai/", temperature=9)
    assert "temperature" in str(error)


if __name__ == "__main__":
    main()

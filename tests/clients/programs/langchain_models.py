"""LangChain's models for OpenAI's API: chat, tools, structured output and embeddings."""

from typing import Any, Literal

import pydantic
from checks import MODEL, URL, check, main
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

BASE_URL = URL + "/v1"
ONE_CALL: Any = {"tool_choice": "any", "parallel_tool_calls": False}


def model(max_tokens: int = 300, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=BASE_URL,
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
        max_tokens=max_tokens,
        **options,
    )


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    shade: Literal[1, 2, 3]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


@check
def invoke() -> None:
    answer = model(12).invoke("Hello")
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12


@check
def stream() -> None:
    chunks = list(model(12, stream_usage=True).stream("Hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == model(12).invoke("Hello").content
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == 12


@check
def batch() -> None:
    answers = model(12).batch(["Hello"] * 4)
    assert len({str(answer.content) for answer in answers}) == 1


@check
def bind_tools() -> None:
    """A call, its result in the history, and the answer to that."""
    question = HumanMessage("Hello")
    answer = model().bind_tools([weather], **ONE_CALL).invoke([question])
    assert [call["name"] for call in answer.tool_calls][:1] == ["weather"]
    results = [weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    final = model(12).bind_tools([weather]).invoke([question, answer, *results])
    assert final.content


@check
def tool_stream() -> None:
    bound = model().bind_tools([weather], tool_choice="weather")
    chunks = list(bound.stream("Hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")


@check
def with_structured_output() -> None:
    """By response format, by a tool, and by JSON mode."""
    for method in ("json_schema", "function_calling"):
        parsed = model().with_structured_output(Colour, method=method).invoke("Hello")
        assert isinstance(parsed, Colour), method


@check
def structured_stream() -> None:
    parts = list(model().with_structured_output(Colour, method="json_schema").stream("Hello"))
    assert isinstance(parts[-1], Colour)


@check
def completions() -> None:
    answer = OpenAI(
        model=MODEL,
        base_url=BASE_URL,
        api_key="none",  # type: ignore[arg-type]
        max_tokens=5,
        max_retries=0,
    ).invoke("def a(")
    assert isinstance(answer, str)


@check
def embeddings() -> None:
    embedder = OpenAIEmbeddings(
        model=MODEL,
        base_url=BASE_URL,
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,  # else it counts tokens with a downloaded vocabulary
        max_retries=0,
    )
    vectors = embedder.embed_documents(["a text", "another"])
    assert embedder.embed_query("a text") == vectors[0] != vectors[1]


if __name__ == "__main__":
    main()

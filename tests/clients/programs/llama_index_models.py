"""LlamaIndex, through its models for servers that are like OpenAI's."""

import asyncio
from typing import Any, Literal

import openai
import pydantic
from checks import MODEL, URL, check, error_of, main
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

HELLO = [ChatMessage(role="user", content="Hello")]


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


TOOL = FunctionTool.from_defaults(weather)


def model(max_tokens: int = 300, **options: Any) -> OpenAILike:
    settings: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True}
    settings |= {"api_base": URL + "/v1", "api_key": "none", "max_retries": 0, "temperature": 0.0}
    settings |= {"max_tokens": max_tokens, "context_window": 2048} | options
    return OpenAILike(model=MODEL, **settings)


@check
def complete() -> None:
    for is_chat_model in (True, False):
        assert model(12, is_chat_model=is_chat_model).complete("def a(").text


@check
def chat() -> None:
    answer = model(12).chat(HELLO)
    assert answer.message.content
    assert asyncio.run(model(12).achat(HELLO)).message.content == answer.message.content


@check
def stream() -> None:
    pieces = [piece.delta or "" for piece in model(12).stream_chat(HELLO)]
    assert "".join(pieces) == model(12).chat(HELLO).message.content
    texts = [piece.delta or "" for piece in model(12, is_chat_model=False).stream_complete("a = ")]
    assert "".join(texts)


@check
def tools() -> None:
    asked = model()
    answer = asked.chat_with_tools([TOOL], user_msg="Hello", tool_required=True)
    [call, *_] = asked.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert call.tool_kwargs["city"] in ("Rome", "Oslo")


@check
def tool_stream() -> None:
    asked = model()
    answers = list(asked.stream_chat_with_tools([TOOL], user_msg="Hello", tool_required=True))
    [call, *_] = asked.get_tool_calls_from_response(answers[-1])
    assert call.tool_kwargs["city"] in ("Rome", "Oslo")


@check
def structured_predict() -> None:
    """By a tool, and by a response format."""
    prompt = PromptTemplate("Hello")
    for options in ({}, {"should_use_structured_outputs": True}):
        found = model(**options).structured_predict(Colour, prompt, {"tool_choice": "required"})
        assert isinstance(found, Colour)


@check
def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=URL + "/v1", api_key="none")
    first, second = embedder.get_text_embedding_batch(["a text", "another"])
    assert embedder.get_query_embedding("a text") == first != second


@check
def errors() -> None:
    asked = model(additional_kwargs={"presence_penalty": 9.0})
    error = error_of(openai.BadRequestError, asked.chat, messages=HELLO)
    assert "presence_penalty" in str(error)


if __name__ == "__main__":
    main()

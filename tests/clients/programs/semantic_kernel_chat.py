"""Semantic Kernel's services for OpenAI's API."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Literal

import openai
import pydantic
from checks import MODEL, URL, check, error_of, main
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


class Sky:
    """A plugin with one function."""

    @kernel_function(description="The weather in a city.")
    def weather(self, city: Annotated[str, "The city."]) -> str:
        return f"sunny in {city}"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)


def service() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client())


def settings(**options: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(**{"temperature": 0.0, "max_tokens": 300} | options)


def history() -> ChatHistory:
    chat = ChatHistory()
    chat.add_user_message("Hello")
    return chat


async def ask(**options: Any) -> Any:
    return await service().get_chat_message_content(history(), settings(**options))


@check
def chat() -> None:
    assert run(ask(max_tokens=12)).content


@check
def stream() -> None:
    async def read() -> str:
        text = ""
        pieces = service().get_streaming_chat_message_content(history(), settings(max_tokens=12))
        async for piece in pieces:
            text += str(piece or "")
        return text

    assert run(read()) == run(ask(max_tokens=12)).content


@check
def response_format() -> None:
    Colour.model_validate_json(run(ask(response_format=Colour)).content)


@check
def functions() -> None:
    """A call that is required, whole and streamed; it is returned and not invoked."""

    async def call(streamed: bool) -> list[FunctionCallContent]:
        kernel = Kernel()
        kernel.add_plugin(Sky(), "sky")
        choice = FunctionChoiceBehavior.Required(auto_invoke=False)
        options: Any = {"function_choice_behavior": choice, "parallel_tool_calls": False}
        asked = settings(**options)
        if not streamed:
            answer: Any = await service().get_chat_message_content(history(), asked, kernel=kernel)
        else:
            answer = None
            async for piece in service().get_streaming_chat_message_content(
                history(), asked, kernel=kernel
            ):
                answer = piece if answer is None else answer + piece
        return [item for item in answer.items if isinstance(item, FunctionCallContent)]

    for streamed in (False, True):
        [found, *_] = run(call(streamed))
        assert found.name == "sky-weather"
        assert found.parse_arguments()


@check
def embeddings() -> None:
    async def embed() -> Any:
        asked = OpenAITextEmbedding(ai_model_id=MODEL, async_client=client())
        return await asked.generate_embeddings(["a text", "another"])

    first, second = run(embed())
    assert list(first) != list(second)


@check
def errors() -> None:
    error = error_of(ServiceResponseException, run, work=ask(logit_bias={"x": 1}))
    assert "logit_bias" in str(error)


if __name__ == "__main__":
    main()

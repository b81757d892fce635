"""Pydantic AI: agents with tools, outputs as models, and streams, over chats and responses."""

import asyncio
from typing import Any, Literal

import pydantic
from checks import MODEL, URL, check, error_of, main
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=URL + "/v1", api_key="none")
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
SETTINGS: Any = {"temperature": 0.0, "max_tokens": 200}


class Colour(pydantic.BaseModel):
    """What structured answers contain."""

    name: Literal["red", "green", "blue"]


def agent(model: Any = CHAT, **options: Any) -> Any:
    return Agent(model, model_settings=SETTINGS | {"max_tokens": 12}, **options)


@check
def chat() -> None:
    result = agent(instructions="Answer.").run_sync("Hello")
    assert result.output
    assert result.usage().output_tokens == 12


@check
def chat_stream() -> None:
    whole = agent().run_sync("Hello").output

    async def read() -> str:
        async with agent().run_stream("Hello") as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    assert asyncio.run(read()).strip() == whole.strip()


@check
def output_by_tool() -> None:
    asked = Agent(CHAT, output_type=Colour, model_settings=SETTINGS)
    assert asked.run_sync("A colour").output.name in ("red", "green", "blue")


@check
def output_by_schema() -> None:
    asked = Agent(CHAT, output_type=NativeOutput(Colour), model_settings=SETTINGS)
    assert asked.run_sync("A colour").output.name in ("red", "green", "blue")


@check
def output_stream() -> None:
    asked = Agent(CHAT, output_type=Colour, model_settings=SETTINGS)

    async def read() -> Colour:
        async with asked.run_stream("A colour") as stream:
            found = [each async for each in stream.stream_output()]
        return found[-1]

    assert asyncio.run(read()).name in ("red", "green", "blue")


@check
def tool_then_output() -> None:
    """The agent calls the tool until the model chooses the output; both are tools."""
    called: list[str] = []
    asked = Agent(CHAT, output_type=Colour, model_settings=SETTINGS)

    @asked.tool_plain
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Return the weather of a city."""
        called.append(city)
        return "sunny"

    assert asked.run_sync("The colour of the sky").output.name in ("red", "green", "blue")
    assert set(called) <= {"Rome", "Oslo"}


@check
def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=PROVIDER)
    assert agent(model).run_sync("Hello").output
    asked = Agent(model, output_type=NativeOutput(Colour), model_settings=SETTINGS)
    assert asked.run_sync("A colour").output.name in ("red", "green", "blue")


@check
def errors() -> None:
    def ask() -> None:
        Agent(CHAT, model_settings={"temperature": 9.0}).run_sync("Hello")

    error = error_of(ModelHTTPError, ask)
    assert error.status_code == 400
    assert "temperature" in str(error.body)


if __name__ == "__main__":
    main()

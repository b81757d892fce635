"""OpenAI's Agents SDK, over chats and over responses: runs, tools, typed outputs and streams."""

import asyncio
from typing import Any, Literal

import openai
import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, URL, check, error_of, main

MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
set_tracing_disabled(True)


class Colour(pydantic.BaseModel):
    """What structured answers contain."""

    name: Literal["red", "green", "blue"]


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def agent(kind: Any, settings: ModelSettings | None = None, **options: Any) -> Any:
    """Return an agent with a client of its own: its connections belong to one event loop."""
    client = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
    settings = settings or ModelSettings(temperature=0.0, max_tokens=200)
    return Agent(
        name="helper",
        instructions="Answer.",
        model=kind(MODEL, client),
        model_settings=settings,
        **options,
    )


def run(asked: Any, **options: Any) -> Any:
    return asyncio.run(Runner.run(asked, "Hello", **options))


@check
def runs() -> None:
    """Of chats: for responses that reach their bound the SDK raises an error."""
    assert run(agent(OpenAIChatCompletionsModel)).final_output


@check
def typed_output() -> None:
    for kind in MODELS:
        assert run(agent(kind, output_type=Colour)).final_output.name in ("red", "green", "blue")


@check
def tools() -> None:
    for kind in MODELS:
        settings = ModelSettings(
            temperature=0.0, max_tokens=300, tool_choice="required", parallel_tool_calls=False
        )
        asked = agent(kind, settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
        assert run(asked).final_output.startswith("sunny in ")


@check
def stream() -> None:
    async def read(kind: Any) -> tuple[str, Colour]:
        result = Runner.run_streamed(agent(kind, output_type=Colour), "Hello")
        text = ""
        async for event in result.stream_events():
            if getattr(event, "data", None) and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, result.final_output

    for kind in MODELS:
        text, final = asyncio.run(read(kind))
        assert Colour.model_validate_json(text) == final


@check
def errors() -> None:
    for kind in MODELS:
        settings = ModelSettings(temperature=9.0)
        error = error_of(openai.BadRequestError, run, asked=agent(kind, settings))
        assert "temperature" in str(error)


if __name__ == "__main__":
    main()

"""AutoGen's model client for OpenAI's API, and an agent with a tool."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import openai
import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_core.models import CreateResult, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import URL, check, error_of, main

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


TOOL = FunctionTool(get_weather, description="Get the weather in a city.")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def client(**options: Any) -> OpenAIChatCompletionClient:
    settings = {"temperature": 0.0, "max_tokens": 200, "max_retries": 0} | options
    return OpenAIChatCompletionClient(
        model="demo-chat", base_url=URL + "/v1", api_key="none", model_info=INFO, **settings
    )


def asked(text: str = "Hello!") -> list[UserMessage]:
    return [UserMessage(content=text, source="user")]


@check
def create() -> None:
    answer = run(client().create(asked()))
    assert answer.content == "Hello! How can I help you?"
    assert answer.usage.completion_tokens > 5


@check
def stream() -> None:
    async def read() -> list[Any]:
        options: Any = {"include_usage": True}
        return [item async for item in client(**options).create_stream(asked())]

    *pieces, result = run(read())
    assert "".join(pieces).endswith("Hello! How can I help you?")
    assert isinstance(result, CreateResult)
    assert result.content == "Hello! How can I help you?"


@check
def tools() -> None:
    """Whole and streamed."""

    async def read(**options: Any) -> Any:
        question = asked("How is the weather in Grimsel?")
        return [item async for item in client().create_stream(question, tools=[TOOL], **options)]

    question = asked("How is the weather in Grimsel?")
    whole = run(client().create(question, tools=[TOOL], tool_choice="required"))
    for result in (whole, run(read())[-1]):
        [call] = result.content
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Grimsel"}')


@check
def structured_output() -> None:
    answer = run(client().create(asked(), json_output=Colour))
    Colour.model_validate_json(answer.content)


@check
def agent() -> None:
    helper = AssistantAgent("helper", client(), tools=[get_weather], system_message=None)
    result = run(helper.run(task="How is the weather in Grimsel?"))
    events = [item for item in result.messages if isinstance(item, ToolCallExecutionEvent)]
    assert events[0].content[0].content == "sunny in Grimsel"


@check
def errors() -> None:
    work = client(temperature=9.0).create(asked())
    error = error_of(openai.BadRequestError, run, work=work)
    assert "temperature" in str(error)


if __name__ == "__main__":
    main()

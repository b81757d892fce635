"""CrewAI: its model, and an agent with a tool."""

from typing import Any, Literal

import pydantic
from checks import URL, check, main
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

HELLO: Any = [{"role": "user", "content": "Hello!"}]
GREETING = "Hello! How can I help you?"
called: list[str] = []


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


@tool("get_weather")
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    called.append(city)
    return f"sunny in {city}"


def model(**options: Any) -> LLM:
    settings = {"temperature": 0.0, "max_tokens": 200} | options
    return LLM(model="openai/demo-chat", base_url=URL + "/v1", api_key="none", **settings)


@check
def call() -> None:
    assert model().call(HELLO) == GREETING


@check
def stream() -> None:
    assert model(stream=True).call(HELLO) == GREETING
    print()


@check
def response_format() -> None:
    answer = model().call(HELLO, response_model=Colour)
    assert isinstance(answer, Colour) or Colour.model_validate_json(answer)
    print()


@check
def tools() -> None:
    """Whole and streamed."""
    question: Any = [{"role": "user", "content": "How is the weather in Grimsel?"}]
    schema = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    options: Any = {"enable_thinking": False}
    for streamed in (False, True):
        called.clear()
        asked = model(
            stream=streamed, additional_params={"extra_body": {"chat_template_kwargs": options}}
        )
        functions = {"get_weather": get_weather.run}
        asked.call(question, tools=[schema], available_functions=functions)
        assert called == ["Grimsel"]
    print()  # crewai ends no line after its boxes


@check
def crew() -> None:
    agent = Agent(role="helper", goal="Answer.", backstory="None.", llm=model(), verbose=False)
    task = Task(description="Hello!", expected_output="A greeting.", agent=agent)
    assert Crew(agents=[agent], tasks=[task], verbose=False).kickoff().raw


if __name__ == "__main__":
    main()

"""smolagents: its model for OpenAI's API, and an agent that calls tools."""

import json
from typing import Any

import openai
from checks import URL, check, error_of, main
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import agglomerate_stream_deltas

HELLO: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "colour", "schema": {"enum": ["red", "green", "blue"]}},
}


class GetWeather(Tool):
    """A tool in smolagents' form."""

    name = "get_weather"
    description = "Get the weather in a city."
    inputs = {"city": {"type": "string", "description": "The city."}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"sunny in {city}"


def model(**options: Any) -> OpenAIModel:
    settings = {"temperature": 0, "max_tokens": 200} | options
    client: Any = {"max_retries": 0}
    return OpenAIModel(
        "demo-chat", api_base=URL + "/v1", api_key="none", client_kwargs=client, **settings
    )


@check
def generate() -> None:
    answer = model().generate(HELLO)
    assert answer.content == "Hello! How can I help you?"
    assert answer.token_usage.output_tokens > 5


@check
def stream() -> None:
    pieces = list(model().generate_stream(HELLO))
    assert agglomerate_stream_deltas(pieces).content == "Hello! How can I help you?"


@check
def tools() -> None:
    """Whole and streamed."""
    question: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "How is the weather in Grimsel?"}],
        }
    ]
    asked = model()
    whole = asked.generate(question, tools_to_call_from=[GetWeather()])
    pieces = list(asked.generate_stream(question, tools_to_call_from=[GetWeather()]))
    for answer in (whole, agglomerate_stream_deltas(pieces)):
        [call] = answer.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Grimsel"}


@check
def agent() -> None:
    """It calls the tool and reads its result; the tiny model does not finish by itself."""
    prompts: Any = {
        "system_prompt": "Answer.",
        "planning": {"initial_plan": "", "update_plan_pre_messages": ""}
        | {"update_plan_post_messages": ""},
        "managed_agent": {"task": "", "report": ""},
        "final_answer": {"pre_messages": "Answer.", "post_messages": "{{task}}"},
    }
    asked = ToolCallingAgent([GetWeather()], model(), prompts, max_steps=1, verbosity_level=0)
    asked.run("How is the weather in Grimsel?")
    [step] = [step for step in asked.memory.steps if getattr(step, "tool_calls", None)]
    assert step.observations == "sunny in Grimsel"


@check
def response_format() -> None:
    answer = model().generate(HELLO, response_format=FORMAT)
    assert json.loads(answer.content) in ("red", "green", "blue")


@check
def errors() -> None:
    error = error_of(openai.BadRequestError, model(temperature=9).generate, messages=HELLO)
    assert "temperature" in str(error)


if __name__ == "__main__":
    main()

"""Haystack's generators and embedders for OpenAI's API."""

import json
from typing import Any, Literal

import openai
import pydantic
from checks import MODEL, URL, check, error_of, main
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import Tool
from haystack.utils import Secret

HELLO = [ChatMessage.from_user("Hello")]
TOOL = Tool(
    name="weather",
    description="Return the weather in a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
    function=lambda city: f"sunny in {city}",
)


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


def common() -> dict[str, Any]:
    return {"model": MODEL, "api_base_url": URL + "/v1", "api_key": Secret.from_token("none")}


def generator(max_tokens: int = 300, **more: Any) -> OpenAIChatGenerator:
    options = {"temperature": 0.0, "max_tokens": max_tokens} | more
    return OpenAIChatGenerator(**common(), generation_kwargs=options, max_retries=0)


@check
def chat() -> None:
    [reply] = generator(12).run(HELLO)["replies"]
    assert reply.text
    assert reply.meta["usage"]["completion_tokens"] == 12


@check
def stream() -> None:
    pieces: list[str] = []
    asked = generator(12)
    [reply] = asked.run(HELLO, streaming_callback=lambda chunk: pieces.append(chunk.content))[
        "replies"
    ]
    [whole] = asked.run(HELLO)["replies"]
    assert "".join(pieces) == reply.text == whole.text


@check
def tools() -> None:
    """A call, whole and streamed, and its result in the history."""
    asked = generator(tool_choice="required", parallel_tool_calls=False)
    for callback in (None, lambda _: None):
        [reply] = asked.run(HELLO, tools=[TOOL], streaming_callback=callback)["replies"]
        call = reply.tool_calls[0]
        assert call.tool_name == "weather"
        assert call.arguments["city"] in ("Rome", "Oslo")
        results = [ChatMessage.from_tool("sunny", origin=item) for item in reply.tool_calls]
        [final] = generator(12).run([*HELLO, reply, *results], tools=[TOOL])["replies"]
        assert final.text


@check
def structured_output() -> None:
    [reply] = generator(response_format=Colour).run(HELLO)["replies"]
    assert json.loads(reply.text)["name"] in ("red", "green", "blue")


@check
def pipeline() -> None:
    built = Pipeline()
    template = [ChatMessage.from_user("Hello {{ name }}")]
    built.add_component("prompt", ChatPromptBuilder(template=template, required_variables="*"))
    built.add_component("model", generator(12))
    built.connect("prompt.prompt", "model.messages")
    assert built.run({"prompt": {"name": "you"}})["model"]["replies"][0].text


@check
def embeddings() -> None:
    vector = OpenAITextEmbedder(**common()).run("a text")["embedding"]
    documents = [Document(content="a text"), Document(content="another")]
    first, second = OpenAIDocumentEmbedder(**common(), progress_bar=False).run(documents)[
        "documents"
    ]
    assert first.embedding == vector != second.embedding


@check
def errors() -> None:
    error = error_of(openai.BadRequestError, generator(temperature=9.0).run, messages=HELLO)
    assert "temperature" in str(error)


if __name__ == "__main__":
    main()

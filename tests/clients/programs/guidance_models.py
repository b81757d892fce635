"""Guidance, through its models for vLLM and for OpenAI's API."""

from typing import Any, Literal

import guidance
import pydantic
from checks import MODEL, URL, check, main
from guidance import assistant, gen, select, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel


class Colour(pydantic.BaseModel, extra="forbid"):
    """A colour."""

    name: Literal["red", "green", "blue"]


def model(kind: Any = VLLMModel) -> Any:
    asked = kind(MODEL, base_url=URL + "/v1", api_key="none", echo=False)
    # With logprobs, guidance adds the text of EOS where a chunk holds EOS and another token.
    asked._interpreter.logprobs = False
    return asked


def answered(part: Any, kind: Any = VLLMModel) -> Any:
    """Return the model after one question, whose answer is confined by `part`."""
    asked = model(kind)
    with user():
        asked += "Hello"
    with assistant():
        asked += part
    return asked


@check
def text() -> None:
    for kind in (VLLMModel, OpenAI):
        assert answered(gen("answer", max_tokens=12), kind)["answer"]


@check
def choices() -> None:
    answer = answered(select(["red", "green", "blue"], name="answer"))
    assert answer["answer"] in ("red", "green", "blue")


@check
def regular_expression() -> None:
    answer = answered(gen("answer", regex="[0-9]{3}"))
    assert len(answer["answer"]) == 3
    assert answer["answer"].isdigit()


@check
def grammar_with_captures() -> None:
    part = "The colour is " + select(["red", "green"], name="colour") + gen("rest", regex="[!?]")
    answer = answered(part)
    assert answer["colour"] in ("red", "green")
    assert answer["rest"] in ("!", "?")


@check
def json_schema() -> None:
    for kind in (VLLMModel, OpenAI):
        answer = answered(guidance.json("answer", schema=Colour), kind)
        Colour.model_validate_json(answer["answer"])


if __name__ == "__main__":
    main()

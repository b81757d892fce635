"""Instructor: models of pydantic, by tools and by response formats."""

from typing import Any, Literal

import instructor
import openai
import pydantic
from checks import MODEL, URL, check, main

OPTIONS: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 300,
    "temperature": 0,
    "max_retries": 0,
}


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    shade: Literal[1, 2, 3]


def client(mode: instructor.Mode) -> Any:
    api = openai.OpenAI(base_url=URL + "/v1", max_retries=0, timeout=60)
    return instructor.from_openai(api, mode=mode)


def creates(mode: instructor.Mode) -> None:
    colour = client(mode).chat.completions.create(response_model=Colour, **OPTIONS)
    assert isinstance(colour, Colour)


@check
def tools() -> None:
    creates(instructor.Mode.TOOLS)


@check
def strict_tools() -> None:
    creates(instructor.Mode.TOOLS_STRICT)


@check
def json_schema() -> None:
    creates(instructor.Mode.JSON_SCHEMA)


@check
def partial_stream() -> None:
    parts = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Colour, **OPTIONS
    )
    *_, last = parts
    assert last.name in ("red", "green", "blue")


if __name__ == "__main__":
    main()

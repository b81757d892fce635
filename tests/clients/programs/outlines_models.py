"""Outlines, through its model for vLLM's server: types, regular expressions and grammars."""

import asyncio
import re
from typing import Any, Literal

import openai
import outlines
import pydantic
from checks import MODEL, URL, check, error_of, main
from outlines.types import CFG, Regex

BASE = URL + "/v1"
OPTIONS: Any = {"temperature": 0, "max_tokens": 200}


class Colour(pydantic.BaseModel):
    """What structured answers contain."""

    name: Literal["red", "green", "blue"]


def model() -> Any:
    return outlines.from_vllm(openai.OpenAI(base_url=BASE, api_key="none"), MODEL)


@check
def chat() -> None:
    assert model()("Hello", temperature=0, max_tokens=12)


@check
def stream() -> None:
    pieces = list(model().stream("Hello", temperature=0, max_tokens=12))
    assert "".join(pieces) == model()("Hello", temperature=0, max_tokens=12)


@check
def pydantic_model() -> None:
    Colour.model_validate_json(model()("A colour", Colour, **OPTIONS))


@check
def choices() -> None:
    assert model()("A colour", Literal["red", "green"], **OPTIONS) in ("red", "green")


@check
def numbers() -> None:
    int(model()("A number", int, temperature=0, max_tokens=5))


@check
def regular_expression() -> None:
    pattern = r"[0-9]{3}-[a-z]{2}"
    assert re.fullmatch(pattern, model()("A code", Regex(pattern), **OPTIONS))


@check
def grammar() -> None:
    text = model()("A sum", CFG('start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,3}/'), **OPTIONS)
    assert re.fullmatch(r"[0-9]{1,3}\+[0-9]{1,3}", text)


@check
def structured_stream() -> None:
    Colour.model_validate_json("".join(model().stream("A colour", Colour, **OPTIONS)))


@check
def asynchronous() -> None:
    async def ask() -> str:
        client = openai.AsyncOpenAI(base_url=BASE, api_key="none")
        return str(await outlines.from_vllm(client, MODEL)("A colour", Colour, **OPTIONS))

    Colour.model_validate_json(asyncio.run(ask()))


@check
def errors() -> None:
    def ask() -> None:
        model()("A code", Regex("("), **OPTIONS)

    assert "unclosed group" in str(error_of(Exception, ask))


if __name__ == "__main__":
    main()

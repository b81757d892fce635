"""Structured output over HTTP: every form, errors before the answer begins, and kill -9."""

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.system.constrained_gaps import measure
from tests.system.readers import TIMEOUT_S, finish, finish_as, start, start_and_kill

PROMPT = "# the numbers\nvalues = "
MANY = {"type": "array", "items": {"type": "integer"}, "minItems": 120}
SEEDED: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0.9,
    "seed": 11,
    "return_token_ids": True,
}
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True}
WORDS = "[a-z]{3,9}( [a-z]{3,9}){130}"
SPECIAL = r"([a-z]{2}\x3c\|endoftext\|\x3e){60}"
CASES: dict[str, dict[str, Any]] = {
    "schema, logprobs": {**GREEDY, "guided_json": MANY, "logprobs": 2},
    "regex, n=2": {**SEEDED, "guided_regex": WORDS, "n": 2, "logprobs": 1},
    "text of a special token": {**SEEDED, "guided_regex": SPECIAL},
    "lark, penalties": {
        **SEEDED,
        "structured_outputs": {"grammar": 'start: ("one" | "two" | " " | "\\n"){200}'},
        "frequency_penalty": 0.2,
    },
    "gbnf": {**SEEDED, "grammar": 'root ::= item+\nitem ::= [a-z]+ "=" [0-9]+ ";"'},
    "chat, schema": {
        "messages": [{"role": "user", "content": "count"}],
        "temperature": 0.7,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": MANY}},
    },
    "unconstrained": {**SEEDED},
}
KILL_AFTER = (8, 20)
"""Events that every open stream has received before each kill."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with the demo model and drafts, for all tests of this module."""
    flags = ("--num-gpu-blocks-override", "600", "--num-threads", "1")
    with EngineFactory() as factory:
        started = factory(*flags, "--num-speculative-tokens", "2", model="demo")
        started.ready()
        yield started


def post(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a completion, or the error."""
    data = json.dumps({"prompt": PROMPT, "max_tokens": 100, "temperature": 0, **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(engine.url() + "/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)["error"]}


def text_of(engine: Engine, **body: Any) -> str:
    answer = post(engine, body)
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return str(answer["choices"][0]["text"])


def test_every_form_confines_the_answer(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    choice = ["red", "green"]
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"guided_json": schema},
        {"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
        {"json_schema": schema},
    ):
        value = json.loads(text_of(engine, **body))
        assert set(value) == {"ok", "size"}, body
        assert value["size"] in (1, 2)
    assert text_of(engine, guided_choice=choice) in choice
    assert text_of(engine, structured_outputs={"choice": choice}) in choice
    assert re.fullmatch("[0-9]{3}", text_of(engine, guided_regex="[0-9]{3}"))
    assert text_of(engine, guided_grammar='start: "a" "b"') == "ab"
    assert text_of(engine, grammar='root ::= "a" ("b" | "c")') in ("ab", "ac")
    text = str(post(engine, {"response_format": tag, "prompt": "<f>"})["choices"][0]["text"])
    for content in re.findall("<f>(.*?)</f>", text, re.DOTALL):
        assert set(json.loads(content)) == {"ok", "size"}


def test_what_cannot_be_compiled_is_a_400_also_for_a_stream(engine: Engine) -> None:
    unsatisfiable = {"allOf": [{"type": "string"}, {"type": "number"}]}
    for body, param in (
        ({"guided_json": unsatisfiable}, "guided_json"),
        ({"guided_regex": "(", "stream": True}, "guided_regex"),
        ({"guided_grammar": "start: nowhere", "stream": True, "n": 2}, "guided_grammar"),
        ({"response_format": {"type": "json_schema", "schema": unsatisfiable}}, "response_format"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ):
        error = post(engine, body)
        assert (error["status"], error["param"]) == (400, param), error
        assert error["message"].startswith(f"{param}: ")
    assert text_of(engine, guided_choice=["fine"]) == "fine"


def test_the_official_client_parses_its_models(engine: Engine) -> None:
    class Colour(pydantic.BaseModel):
        name: Literal["red", "green"]
        dark: bool

    with openai.OpenAI(base_url=engine.url() + "/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "a colour"}],
            response_format=Colour,
            max_tokens=100,
            seed=1,
        )
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Colour)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("roles", [(Role.WORKER, Role.CORE)], ids=["worker-core"])
def test_killed_streams_equal_undisturbed_ones(engine: Engine, roles: tuple[Role, Role]) -> None:
    undisturbed = start(engine, CASES)
    finish(undisturbed)
    assert undisturbed["schema, logprobs"].choices[0].text.startswith("[")
    for choice in undisturbed["regex, n=2"].choices.values():
        assert re.fullmatch("[a-z ]+", choice.text)
    special = undisturbed["text of a special token"].choices[0].text
    assert re.match(r"[a-z]{2}<\|endoftext\|>[a-z]{2}<\|endo", special)
    streams = start_and_kill(engine, CASES, roles, KILL_AFTER, undisturbed)
    finish_as(streams, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slow_grammars_of_one_client_neither_refuse_nor_hold_up_those_of_another(
    start_engine: EngineFactory,
) -> None:
    """A client with 200 of them has some refused; the other's are answered before most of these."""
    engine = start_engine("--api-key", "many", "--api-key", "few", "--max-num-waiting", "2000")
    engine.readiness()
    url = engine.url() + "/v1/completions"

    async def complete(client: httpx.AsyncClient, key: str, names: list[str]) -> int:
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        body = {"prompt": "a", "max_tokens": 2, "guided_json": schema}
        headers = {"authorization": f"Bearer {key}"}
        return (await client.post(url, json=body, headers=headers)).status_code

    async def compete() -> tuple[list[int], int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            await complete(client, "few", ["first"])  # which starts the process that compiles
            slow = [
                asyncio.create_task(
                    complete(client, "many", [f"name {i} {j}" for j in range(1500)])
                )
                for i in range(200)
            ]
            await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            found = [await complete(client, "few", [f"{i}"]) for i in range(5)]
            num_open = sum(not task.done() for task in slow)
            for task in slow:
                task.cancel()
        return found, num_open

    statuses, num_open = asyncio.run(compete())
    assert statuses == [200] * 5
    assert num_open >= 20, "these were sent before"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_constrained_requests_widen_the_gaps_of_others_by_a_tenth_at_most() -> None:
    """A batch has 16 of each kind, or 32 without constraints; the timing is measured again."""
    growths: list[float] = []
    while not growths or (growths[-1] > 1.1 and len(growths) < 3):
        growths.append(asyncio.run(measure(16, num_rounds=5)).p99)
    assert growths[-1] <= 1.1, growths

"""Streams with long prompts are exact through kill -9 of any process, also of the tokenizer's."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually, is_alive
from tests.paths import DEMO_MODEL
from tests.system.readers import Reader, finish, finish_as, start, start_and_kill

TEXT = "def read(self, path):  # <|endoftext|>\n" * 600
BODY: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "seed": 7, "logprobs": 1}
CASES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": TEXT, "return_token_ids": True, **BODY},
    "chat": {
        "messages": [{"role": "user", "content": TEXT}],
        **BODY,
        "logprobs": True,
        "top_logprobs": 1,
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with EngineFactory() as factory:
        tokenizer = str(DEMO_MODEL)
        pace = ("--null-step-ms", "10")  # the second stream opens long before the first one ends
        yield factory("--tokenizer", tokenizer, "--max-model-len", "16384", *pace)


def helpers(engine: Engine) -> list[int]:
    """Return the processes for long texts that belong to the API."""
    pid = engine.pid(Role.API)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in children if Path(f"/proc/{p}/comm").read_text() == "troika-text\n"]


def undisturbed(engine: Engine) -> dict[str, Reader]:
    streams = start(engine, CASES)
    finish(streams)
    return streams


def test_streams_with_long_prompts_are_exact(engine: Engine) -> None:
    engine.readiness()
    assert helpers(engine) == [], "it starts when it is needed"
    expected = undisturbed(engine)
    assert all(stream.usage["prompt_tokens"] > 5000 for stream in expected.values())
    [helper] = helpers(engine)
    streams = start_and_kill(engine, CASES, [Role.WORKER, Role.CORE], (10, 30), expected)
    os.kill(helper, signal.SIGKILL)
    finish_as(streams, expected)
    finish_as(start(engine, CASES), expected)
    assert helper not in helpers(engine), "another one has tokenized the same texts"


def test_the_process_ends_with_the_api(engine: Engine) -> None:
    undisturbed(engine)
    [helper] = helpers(engine)
    engine.kill(Role.API)
    eventually(lambda: not is_alive(helper), "it has left")

"""Streams of every stateful feature equal undisturbed ones if processes are killed meanwhile.

Real processes with the demo model. Compared are: text, token ids, log-probabilities (bit for
bit, as they were sent), finish reason and usage, for every choice of every stream.
"""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually

MAX_TOKENS = 200
PROMPT = "class Reader:\n    def __init__(self, path):\n"
STREAM_TIMEOUT_S = 60.0
KILL_AFTER = (10, 30)
"""Events that every open stream has received before each kill, long before its end."""
STOP_TOKEN_ID = 5
"""A likely stop token, banned at first, so that min_tokens decides the end."""
MIN_TOKENS = 160

COMPLETION: dict[str, Any] = {"prompt": PROMPT, "return_token_ids": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {**COMPLETION, "temperature": 0, "logprobs": 2},
    "seeded, top_p, top_k": {**COMPLETION, **SEEDED, "top_p": 0.9, "top_k": 40, "logprobs": 0},
    "n=2, logprobs": {**COMPLETION, **SEEDED, "n": 2, "logprobs": 3},
    "penalties": {
        **COMPLETION,
        **SEEDED,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "min_p": 0.01,
        "logprobs": 1,
    },
    "logit_bias, echo": {
        **COMPLETION,
        **SEEDED,
        "logit_bias": {"77": 2.0, "90": -5.0},
        "echo": True,
        "logprobs": 1,
    },
    "bad_words, allowed_token_ids, logprob_token_ids": {
        **COMPLETION,
        **SEEDED,
        "bad_words": ["self", "return", "\n\n"],
        "allowed_token_ids": list(range(3, 600)),
        "logprob_token_ids": [77, 5, 90],
        "logprobs": 0,
    },
    "min_tokens, stop token": {
        **COMPLETION,
        "temperature": 0,
        "logit_bias": {str(STOP_TOKEN_ID): 100.0},
        "stop_token_ids": [STOP_TOKEN_ID],
        "min_tokens": MIN_TOKENS,
    },
    "prompt_logprobs, not streamed": {
        **COMPLETION,
        **SEEDED,
        "prompt_logprobs": 2,
        "stream": False,
    },
    "chat, n=2, top_logprobs": {
        "messages": [{"role": "user", "content": "read a file"}],
        **SEEDED,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "presence_penalty": 0.5,
    },
}


@dataclass
class Choice:
    """The concatenated stream of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Add one event."""
        assert self.finish_reason is None, "nothing comes after the end"
        self.text += event.get("text") or event.get("delta", {}).get("content") or ""
        self.token_ids += event.get("token_ids") or []
        for name, values in (event.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(values or [])
        self.prompt_logprobs += event.get("prompt_logprobs") or []
        self.finish_reason = event.get("finish_reason")
        self.stop_reason = event.get("stop_reason")


class Stream(threading.Thread):
    """Reads one answer to its end."""

    def __init__(self, url: str, name: str, body: dict[str, Any]) -> None:
        super().__init__(name=name, daemon=True)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **body}
        self.is_streamed = body.get("stream", True)
        if self.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        self._request = urllib.request.Request(
            url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        self.choices: dict[int, Choice] = {}
        self.usage: dict[str, int] = {}
        self.num_events = 0
        self.is_done = False
        self.error: object = None

    def run(self) -> None:
        """Read."""
        try:
            with urllib.request.urlopen(self._request, timeout=STREAM_TIMEOUT_S) as response:
                if not self.is_streamed:
                    self._take(response.read())
                    self.is_done = True
                for line in response:
                    if line.startswith(b"data: "):
                        self._take(line[6:].strip())
        except Exception as error:
            self.error = error

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        assert "error" not in event, event
        for choice in event["choices"]:
            self.choices.setdefault(choice["index"], Choice()).add(choice)
        if event.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: event["usage"][name] for name in names}
        self.num_events += 1


def start(engine: Engine, cases: dict[str, dict[str, Any]]) -> dict[str, Stream]:
    """Open a stream for each case."""
    streams = {name: Stream(engine.url(), name, body) for name, body in cases.items()}
    for stream in streams.values():
        stream.start()
    return streams


def kill_in_turn(
    engine: Engine, roles: Sequence[Role], streams: dict[str, Stream], kill_after: Sequence[int]
) -> None:
    """Kill each role once every stream has a number of events, and none of them has ended."""
    for role, num_events in zip(roles, kill_after, strict=True):

        def all_have(num_events: int = num_events) -> bool:
            opened = [stream for stream in streams.values() if stream.is_streamed]
            return all(s.error is not None or s.num_events >= num_events for s in opened)

        eventually(all_have, f"every stream has {num_events} events", STREAM_TIMEOUT_S)
        os.kill(engine.pid(role), signal.SIGKILL)
        assert not any(stream.is_done for stream in streams.values()), "killed in the middle"


def finish(streams: dict[str, Stream]) -> None:
    """Wait for the ends of all streams."""
    for name, stream in streams.items():
        stream.join(STREAM_TIMEOUT_S)
        assert stream.error is None, (name, stream.error)
        assert stream.is_done, name


@pytest.fixture(scope="module")
def module_engines() -> Iterator[EngineFactory]:
    """Starts engines that serve all tests of this module."""
    with EngineFactory() as factory:
        yield factory


@pytest.fixture(scope="module")
def engine_and_undisturbed(
    module_engines: EngineFactory,
) -> tuple[Engine, dict[str, dict[str, Any]], dict[str, Stream]]:
    """An engine with the demo model, the cases, and their streams without faults."""
    engine = module_engines("--num-gpu-blocks-override", "512", "--num-threads", "1", model="demo")
    readiness = engine.readiness()
    assert readiness["exact_resume"], readiness
    cases = dict(CASES)
    first = start(engine, {"to be stopped": {**COMPLETION, **SEEDED}})
    finish(first)
    stop = late_string(first["to be stopped"].choices[0].text)
    cases["stop string"] = {**COMPLETION, **SEEDED, "stop": [stop, "never"]}
    undisturbed = start(engine, cases)
    finish(undisturbed)
    check_features(undisturbed)
    return engine, cases, undisturbed


def late_string(text: str) -> str:
    """Return a string that first occurs in the last quarter of a text."""
    first = len(text) * 3 // 4
    found = (text[place : place + 6] for place in range(first, len(text) - 6))
    return next(part for part in found if part not in text[: first + 5])


def check_features(streams: dict[str, Stream]) -> None:
    """Assert that the compared streams exercise every feature."""
    ends = {name: stream.choices[0].finish_reason for name, stream in streams.items()}
    stopped = {"stop string", "min_tokens, stop token"}
    assert ends == {name: "stop" if name in stopped else "length" for name in streams}
    assert len(streams["min_tokens, stop token"].choices[0].token_ids) == MIN_TOKENS + 1
    assert streams["logit_bias, echo"].choices[0].text.startswith(PROMPT)
    assert streams["prompt_logprobs, not streamed"].choices[0].prompt_logprobs
    for name in ("n=2, logprobs", "chat, n=2, top_logprobs"):
        one, two = streams[name].choices.values()
        assert one.text != two.text
        assert any(one.logprobs.values())
    for name, stream in streams.items():
        assert stream.usage["completion_tokens"] > MAX_TOKENS // 2, name


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "roles",
    [(Role.WORKER, Role.WORKER), (Role.CORE, Role.WORKER)],
    ids=["worker-worker", "core-worker"],
)
def test_killed_streams_equal_undisturbed_ones(
    roles: tuple[Role, Role],
    engine_and_undisturbed: tuple[Engine, dict[str, dict[str, Any]], dict[str, Stream]],
) -> None:
    engine, cases, undisturbed = engine_and_undisturbed
    streams = start(engine, cases)
    kill_in_turn(engine, roles, streams, KILL_AFTER)
    finish(streams)
    for name, want in undisturbed.items():
        got = streams[name]
        assert got.choices == want.choices, name
        assert got.usage == want.usage, name

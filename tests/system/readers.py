"""Threads that read whole answers, while the processes that compute them are killed."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.lifecycle import Role
from scripts.testing import Engine, eventually

MAX_TOKENS = 200
TIMEOUT_S = 60.0
_MAX_TRIALS = 5
Cases = dict[str, dict[str, Any]]
"""Bodies of requests by name."""


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


class Reader(threading.Thread):
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
            with urllib.request.urlopen(self._request, timeout=TIMEOUT_S) as response:
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


def start(engine: Engine, cases: Cases) -> dict[str, Reader]:
    """Send the request of each case."""
    readers = {name: Reader(engine.url(), name, body) for name, body in cases.items()}
    for reader in readers.values():
        reader.start()
    return readers


def start_and_kill(
    engine: Engine,
    cases: Cases,
    roles: Sequence[Role],
    kill_after: Sequence[int],
    undisturbed: dict[str, Reader],
) -> dict[str, Reader]:
    """Send the request of each case, and kill each role before any answer has ended.

    A role is killed once every stream has `kill_after` events. The outputs that the API has not
    read are merged, so a stream can end with few events on a busy machine; all cases are sent
    again then. The answers until then are those of `undisturbed`, too.
    """
    for _ in range(_MAX_TRIALS):
        readers = start(engine, cases)
        if all(_kill(engine, role, readers, n) for role, n in zip(roles, kill_after, strict=True)):
            return readers
        finish_as(readers, undisturbed)
    raise TimeoutError(f"an answer ended before a kill, {_MAX_TRIALS} times")


def _kill(engine: Engine, role: Role, readers: dict[str, Reader], num_events: int) -> bool:
    """Kill a role once every stream has a number of events; return whether all answers go on."""

    def reached() -> bool:
        ready = (not r.is_streamed or r.num_events >= num_events for r in readers.values())
        return any(r.is_done or r.error for r in readers.values()) or all(ready)

    eventually(reached, f"every stream has {num_events} events", TIMEOUT_S)
    os.kill(engine.pid(role), signal.SIGKILL)
    return not any(reader.is_done for reader in readers.values())


def finish(readers: dict[str, Reader]) -> None:
    """Wait for the ends of all answers."""
    for name, reader in readers.items():
        reader.join(TIMEOUT_S)
        assert reader.error is None, (name, reader.error)
        assert reader.is_done, name


def finish_as(readers: dict[str, Reader], undisturbed: dict[str, Reader]) -> None:
    """Wait for the ends of all answers, which must be those of other readers."""
    finish(readers)
    for name, want in undisturbed.items():
        assert readers[name].choices == want.choices, name
        assert readers[name].usage == want.usage, name

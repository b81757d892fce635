"""Helpers for tests of /v1/responses: a model that reasons, answers and calls, and its events."""

import json
from collections.abc import Iterable
from typing import Any

import httpx

from tests.api.fake_engine import EOS_ID, FakeClient, LiveServer, emitting, ids_of
from tests.api.tool_answers import ARGUMENTS, FACTS, PARAMETERS, TEXT

PATH = "/v1/responses"
HTTP = httpx.Client(timeout=30)
"""Shared, because each new client takes longer than most requests."""
REASONING = 'Which "city"?'
CONTENT = "Let me look."
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": PARAMETERS,
}
NOW: dict[str, Any] = {"type": "function", "name": "now"}
TOOLS: Any = [WEATHER, NOW]
BODY: dict[str, Any] = {"input": "hi", "tools": TOOLS}
CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
EXPECTED = [
    ("reasoning", REASONING),
    ("message", CONTENT),
    ("function_call", ("get_weather", ARGUMENTS)),
    ("function_call", ("now", "{}")),
]


def answering(text: str = TEXT, *, per_output: int = 1) -> FakeClient:
    return FakeClient(FACTS, emitting([*ids_of(text), EOS_ID], per_output=per_output))


def content_of(output: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return type and content of each item."""
    found: list[tuple[str, Any]] = []
    for item in output:
        if item["type"] == "function_call":
            found.append((item["type"], (item["name"], item["arguments"])))
        else:
            [part] = item["content"]
            found.append((item["type"], part["text"]))
    return found


def create(live: LiveServer, **fields: Any) -> dict[str, Any]:
    response = HTTP.post(live.url + PATH, json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def parse_events(text: str) -> list[tuple[dict[str, Any], str | None]]:
    """Return the events of a stream with their ids; the name of each is its type."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            event = json.loads(fields["data"])
            assert fields["event"] == event["type"]
            found.append((event, fields.get("id")))
    return found


def stream(live: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    response = HTTP.post(live.url + PATH, json=BODY | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    return [event for event, _ in parse_events(response.text)]


def check_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the rules of a whole stream; return the items as its events build them."""
    checker = _Checker()
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        checker.take(event)
    return checker.items


class _Checker:
    """Builds the items of a stream, as a client does."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = self._is_done = False

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.").replace(".", "_")
        if kind in ("created", "in_progress"):
            assert event["sequence_number"] == ("created", "in_progress").index(kind)
            assert event["response"]["status"] == "in_progress"
            assert event["response"]["output"] == []
        elif kind in ("completed", "incomplete"):
            assert not self._is_open
            assert event["response"]["output"] == self.items
        elif kind == "output_item_added":
            self._begin(event)
        elif kind != "failed":
            assert self._is_open
            item = self.items[-1]
            assert event["output_index"] == len(self.items) - 1
            assert event.get("item_id", item["id"]) == item["id"]
            assert event.get("content_index", 0) == 0
            getattr(self, f"_{kind}")(event, item)

    def _begin(self, event: dict[str, Any]) -> None:
        assert not self._is_open
        assert event["output_index"] == len(self.items)
        item = dict(event["item"])
        assert item["status"] == "in_progress"
        assert item.get("content", []) == []
        assert item.get("arguments", "") == ""
        self.items.append(item)
        self._is_open, self._is_done = True, False

    def _content_part_added(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert event["part"]["text"] == ""
        item["content"] = [dict(event["part"])]

    def _output_text_delta(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert not self._is_done
        assert event["delta"]
        [part] = item["content"]
        part["text"] += event["delta"]
        if "logprobs" in event:
            part["logprobs"] = part["logprobs"] + event["logprobs"]

    _reasoning_text_delta = _output_text_delta

    def _output_text_done(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert event["text"] == item["content"][0]["text"]
        self._is_done = True

    _reasoning_text_done = _output_text_done

    def _content_part_done(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert self._is_done
        assert event["part"] == item["content"][0]

    def _function_call_arguments_delta(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert event["delta"]
        item["arguments"] += event["delta"]

    def _function_call_arguments_done(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        self._is_done = True

    def _output_item_done(self, event: dict[str, Any], item: dict[str, Any]) -> None:
        assert self._is_done
        item["status"] = event["item"]["status"]
        assert event["item"] == item
        assert item["status"] in ("completed", "incomplete")
        self._is_open = False

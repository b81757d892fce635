"""Reads the events of /v1/messages as a strict client does."""

import json
from typing import Any, NamedTuple

TEXT_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
KINDS = {"text": {"text_delta"}, "tool_use": {"input_json_delta"}}


class MessageEvent(NamedTuple):
    name: str
    data: dict[str, Any]
    id: str | None


def parse(text: str) -> list[MessageEvent]:
    """Return the events of a whole stream."""
    return [parse_one(block) for block in text.split("\n\n") if block]


def parse_one(block: str) -> MessageEvent:
    fields = dict(line.split(": ", 1) for line in block.splitlines())
    assert fields.keys() <= {"event", "data", "id"}
    event = MessageEvent(fields["event"], json.loads(fields["data"]), fields.get("id"))
    assert event.data["type"] == event.name
    return event


def message_of(events: list[MessageEvent], *, is_whole: bool = True) -> dict[str, Any]:
    """Return the message that the events add up to; fails if their order is not the API's."""
    first, *rest = [event.data for event in events if event.name != "ping"]
    message: dict[str, Any] = json.loads(json.dumps(first["message"]))
    assert first["type"] == "message_start"
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_index = None
    inputs: dict[int, str] = {}
    for event in rest:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_index is None
            open_index = event["index"]
            assert open_index == len(message["content"])
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == open_index
            block, delta = message["content"][open_index], event["delta"]
            assert delta["type"] in KINDS.get(block["type"], {"thinking_delta", "signature_delta"})
            if delta["type"] == "input_json_delta":
                inputs[open_index] = inputs.get(open_index, "") + delta["partial_json"]
            else:
                name = TEXT_FIELDS[delta["type"]]
                block[name] = block.get(name, "") + delta[name]
        elif kind == "content_block_stop":
            assert event["index"] == open_index
            if open_index in inputs:
                message["content"][open_index]["input"] = json.loads(inputs[open_index])
            open_index = None
        elif kind == "message_delta":
            assert open_index is None
            message |= event["delta"]
            message["usage"] = event["usage"]
        else:
            assert kind == "message_stop"
            assert event is rest[-1]
    assert not is_whole or rest[-1]["type"] == "message_stop"
    return message

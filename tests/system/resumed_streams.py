"""The body of a request that is resumed, and the content of its stream."""

import json
from typing import Any

from tests.system.streams import Event

TOKENS = 120


def body(**fields: Any) -> dict[str, Any]:
    return {
        "prompt": [5, 6, 7],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "seed": 3,
        "return_token_ids": True,
    } | fields


def ids_of(events: list[Event]) -> dict[int, list[int]]:
    """Return token ids by choice."""
    found: dict[int, list[int]] = {}
    for event in events:
        for choice in json.loads(event.data)["choices"] if event.data != "[DONE]" else []:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return found


def content(events: list[Event]) -> list[tuple[Any, ...]]:
    """Return the content of a stream, however it was cut into events."""
    texts: dict[int, str] = {}
    finishes = []
    logprobs: dict[int, list[Any]] = {}
    usage = None
    for event in events:
        if event.data == "[DONE]":
            continue
        chunk = json.loads(event.data)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {})  # /inference/v1/generate returns no text
            piece = choice["text"] if "text" in choice else delta.get("content") or ""
            texts[index] = texts.get(index, "") + piece
            if choice["finish_reason"]:
                finishes.append((index, choice["finish_reason"], choice.get("stop_reason")))
            if choice["logprobs"]:
                entries = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
                logprobs.setdefault(index, []).extend(entries)
    if usage is not None:
        usage.pop("prompt_tokens_details")
    exact = sorted(ids_of(events).items()), sorted(logprobs.items())
    return [*sorted(texts.items()), *sorted(finishes), *exact, (usage,)]

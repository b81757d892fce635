"""Stored responses: bounds, the journal, and streams that are resumed after any event."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.app import start_sessions
from api_proc.responses.store import ResponseStore, StoredResponse
from api_proc.resumption.session_log import KeepRecord, Replay
from protocol.message import Message, encode
from tests.api.conftest import MakeServer
from tests.api.fake_engine import LiveServer
from tests.api.responses.tool_model import (
    BODY,
    EXPECTED,
    HTTP,
    PATH,
    answering,
    check_events,
    content_of,
    create,
    parse_events,
)
from tests.api.session_server import play, until


def stored(num_bytes: int = 100) -> StoredResponse:
    return StoredResponse(b"x" * num_bytes, b"[]", None)


@play
async def test_responses_that_are_not_used_make_room() -> None:
    store = ResponseStore(3, 10**6)
    for name in "abc":
        await store.put(name, stored())
    assert store.get("a") == stored()
    await store.put("d", stored())
    assert [store.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert await store.delete("c")
    assert not await store.delete("c")
    assert len(store) == 2


@play
async def test_bytes_are_bounded() -> None:
    store = ResponseStore(10**6, 10_000)
    for number in range(100):
        await store.put(str(number), stored(1000))
        assert store.num_bytes <= 10_000
        await store.put(str(number), stored(2000))
        assert store.num_bytes <= 10_000
    assert len(store) >= 3
    assert not store.has_room(10_000)
    await store.put("large", stored(10_000))
    assert store.get("large") is None
    assert store.get("99") is not None
    for number in range(100):
        await store.delete(str(number))
    assert store.num_bytes == 0


@play
async def test_nothing_is_stored_without_room() -> None:
    store = ResponseStore(0, 10**6)
    await store.put("a", stored())
    assert len(store) == 0


class FakeJournaling:
    """Collects records."""

    is_recovered = True

    def __init__(self) -> None:
        self.records: list[Message] = []

    def write(self, message: Message) -> None:
        self.records.append(message)

    async def written(self, timeout_s: float) -> None:
        await asyncio.sleep(0)


@play
async def test_the_journal_restores_what_was_stored() -> None:
    """It has the same responses in the same order, even if a snapshot repeats them."""
    journaling = FakeJournaling()
    store = ResponseStore(3, 10**6)
    store.journaling = journaling  # type: ignore[assignment]
    for name in "abcde":
        await store.put(name, stored(len(name)))
    await store.delete("d")
    for records in (journaling.records, [*journaling.records, *store.records()]):
        successor = ResponseStore(3, 10**6)
        replayed = Replay()
        for record in records:
            replayed.apply(encode(record))
        successor.restore(replayed.kept)
        assert list(successor.records()) == list(store.records())
        assert successor.num_bytes == store.num_bytes


@play
async def test_a_snapshot_does_not_bring_back_what_is_deleted_meanwhile() -> None:
    store = ResponseStore(3, 10**6)
    for name in "abc":
        await store.put(name, stored())
    records = store.records()
    assert isinstance(next(records), KeepRecord)
    await store.delete("b")
    assert [record.key for record in records if isinstance(record, KeepRecord)] == ["c"]


def start(live: LiveServer) -> None:
    live.call(start_sessions, live.state)

    async def written() -> None:
        await until(lambda: not live.state.sessions.journaling.is_failed)  # type: ignore[union-attr]

    live.call(written)


def close(live: LiveServer) -> None:
    live.call(live.state.sessions.close)  # type: ignore[union-attr]


def test_responses_survive_the_death_of_the_api(make_server: MakeServer, tmp_path: Path) -> None:
    """Stored ones are read and continued; a deleted one stays deleted."""
    settings: dict[str, Any] = {"journal_dir": str(tmp_path), "reasoning_parser": "qwen3"}
    live = make_server(answering(), **settings)
    start(live)
    first, second, gone = (create(live) for _ in range(3))
    assert HTTP.delete(f"{live.url}{PATH}/{gone['id']}").status_code == 200
    third = create(live, previous_response_id=second["id"])
    close(live)
    for _ in range(2):  # the second reads the snapshot of the first
        successor = make_server(answering(), **settings)
        start(successor)
        for response in (first, second, third):
            found = HTTP.get(f"{successor.url}{PATH}/{response['id']}")
            assert found.json() == response
        missing = HTTP.get(f"{successor.url}{PATH}/{gone['id']}")
        assert missing.status_code == 404
        close(successor)
    fields = {"previous_response_id": third["id"]}
    create(live, **fields)
    create(successor, **fields)
    prompts = [server.client.requests[-1].prompt_token_ids for server in (live, successor)]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("per_output", "fields"),
    [
        (1, {}),
        (3, {}),
        (1000, {}),
        (1, {"stream_interval": 5}),
        (1, {"max_output_tokens": 100}),
        (2, {"stop": "look"}),
    ],
)
def test_a_stream_resumed_after_any_event_is_exact(
    make_server: MakeServer, tmp_path: Path, per_output: int, fields: dict[str, Any]
) -> None:
    """Each event comes once, with consecutive numbers; the last has the same response."""
    live = make_server(
        answering(per_output=per_output), journal_dir=str(tmp_path), reasoning_parser="qwen3"
    )
    start(live)
    body = BODY | {"stream": True} | fields
    with httpx.Client(base_url=live.url, headers={"X-Request-Id": "r"}) as http:

        def ask(**headers: str) -> list[tuple[dict[str, Any], str | None]]:
            return parse_events(http.post(PATH, json=body, headers=headers).text)

        whole = ask()
        expected = whole[-1][0]["response"]
        check_events(event for event, _ in whole)
        for count, (_, event_id) in enumerate(whole, start=1):
            assert event_id is not None
            rest = ask(**{"Last-Event-ID": event_id})
            events = [event for event, _ in [*whole[:count], *rest]]
            check_events(events)
            assert without_counts(events[-1]["response"]) == without_counts(expected)
        for wrong in ("r.5", "r.5-0", "r.9999999-0-5", "other.5-0-5", "r.5-0-5u"):
            error = http.post(PATH, json=body, headers={"Last-Event-ID": wrong})
            assert (error.status_code, error.json()["error"]["code"]) == (
                400,
                "invalid_last_event_id",
            )
        again = ask()
        assert again[0][0]["response"]["id"] == expected["id"]
    assert len(live.client.requests) == 1
    if not fields:
        assert content_of(expected["output"]) == EXPECTED
    close(live)


def without_counts(response: dict[str, Any]) -> dict[str, Any]:
    """Leave out the tokens of reasoning: without a token that ends it, steps are counted."""
    copied: dict[str, Any] = json.loads(json.dumps(response))
    if copied["usage"] is not None:
        del copied["usage"]["output_tokens_details"]
    return copied


def test_a_response_without_a_journal_has_no_event_ids(make_server: MakeServer) -> None:
    live = make_server(answering())
    text = HTTP.post(live.url + PATH, json=BODY | {"stream": True}).text
    assert {event_id for _, event_id in parse_events(text)} == {None}

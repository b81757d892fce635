"""The events of a response continue after any of them, however the rest of the text arrives."""

import json
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from api_proc.chat.events import ContentDelta, ReasoningDelta, ToolCallEnd, ToolCallStart
from api_proc.chat.families import find_dialect
from api_proc.chat.parser import OutputParser
from api_proc.errors import ApiError
from api_proc.openai.encoded_list import EncodedLists
from api_proc.responses.body import ResponseDecoder
from api_proc.responses.objects import OutputItem
from api_proc.responses.output import ResponseOutput
from api_proc.responses.positions import stream_position
from api_proc.responses.reply import ResponseReply
from api_proc.text.output_sequence import Delta
from protocol.config.settings import configure
from tests.api.fake_engine import FakeClient, LiveServer
from tests.api.responses.tool_model import EXPECTED, check_events, content_of, parse_events
from tests.api.test_message_reply import cut
from tests.api.tool_answers import TEXT

CHAT = ResponseDecoder()(b'{"input": "x"}')
Event = tuple[dict[str, Any], str | None]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer(configure(model="null"), FakeClient()) as server:
        yield server


def reply_of(live: LiveServer, last_id: str | None) -> tuple[ResponseReply, Any]:
    """Return the answer of a client that comes back, and its sequence."""
    sequence: Any = SimpleNamespace(
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=0,
        finish_reason=None,
        reasoning=None,
    )
    generation: Any = SimpleNamespace(
        secret="0" * 32,
        created=1,
        request_id="r",
        is_resumable=True,
        position=None if last_id is None else stream_position(last_id, "r", [len(TEXT)]),
        sequences=[sequence],
    )
    connection: Any = SimpleNamespace(last_event_id=last_id, request_id="r")
    return ResponseReply(live.state, connection, CHAT, generation), sequence


def play(live: LiveServer, seed: int, last_id: str | None = None) -> list[Event]:
    """Return the events after a position; each character of the text is a token."""
    reply, sequence = reply_of(live, last_id)
    num_sent = 0 if last_id is None else int(last_id.split(".")[1].split("-")[0])
    dialect = find_dialect(None, "hermes", "qwen3")
    assert dialect is not None
    parser = OutputParser(
        dialect, schemas={"get_weather": {}, "now": {}}, is_reasoning_open=False, make_id=str
    )
    frames = b""
    rest = [(num_sent + a, num_sent + b) for a, b in cut(len(TEXT) - num_sent, seed)]
    for start, end in [*cut(num_sent, seed), *rest]:
        is_last = end == len(TEXT)
        sequence.num_output_tokens = end
        sequence.finish_reason = reason = "stop" if is_last else None
        piece = TEXT[start:end]
        events = parser.push(piece, is_last=is_last)
        delta = Delta(piece, [0] * (end - start), finish_reason=reason, events=events)
        if end <= num_sent:
            reply.skip(sequence, delta)
        else:
            frames += b"".join(reply.frames(sequence, delta))
    return parse_events((frames + b"".join(reply.last_frames())).decode())


def test_a_stream_continues_after_any_event_in_other_pieces(live: LiveServer) -> None:
    for seed in range(3):
        whole = play(live, seed)
        items = check_events(event for event, _ in whole)
        assert content_of(items) == EXPECTED
        for count, (_, event_id) in enumerate(whole, start=1):
            rest = play(live, seed + count, event_id)
            assert check_events(event for event, _ in [*whole[:count], *rest]) == items, event_id


@pytest.mark.parametrize("position", [(0, 1, 0), (0, 2, 1), (0, 4, 3), (7, 0, 9), (7, 2, 11)])
def test_a_failure_continues_the_numbers(live: LiveServer, position: tuple[int, int, int]) -> None:
    """The client has the events up to this position, and none of them is sent again."""
    num_tokens, offset, number = position
    reply, _ = reply_of(live, f"r.{num_tokens}-{offset}-{number}")
    pieces = reply.failure(ApiError(500, "broken", code="internal"))
    frames = b"".join(pieces).decode()
    events = [json.loads(line[6:]) for line in frames.splitlines() if line.startswith("data: ")]
    first = number + 1
    types = ["response.in_progress"] * (first == 1) + ["response.failed"]
    assert [event["type"] for event in events] == types
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(first, first + len(types)))


def test_a_response_can_be_read_while_a_thread_adds_to_it() -> None:
    """Each line may be the last that the thread has computed: no item is missing or there twice."""
    output = ResponseOutput("x", EncodedLists(is_kept=True))
    seen: list[list[OutputItem]] = []

    def read(frame: FrameType, event: str, argument: Any) -> Any:
        seen.append(output.items())
        return read

    events = (ReasoningDelta("a"), ContentDelta("b"), ToolCallStart(0, "id", "f"), ToolCallEnd(0))
    sys.settrace(read)
    try:
        for event in events:
            output.push([event], [])
        output.finish(is_cut=False)
    finally:
        sys.settrace(None)
    ids = [item.id for item in output.items()]
    assert len(ids) == 3
    numbers = [len(items) for items in seen]
    assert numbers == sorted(numbers)
    assert all([item.id for item in items] == ids[: len(items)] for items in seen)

"""The events of a message do not depend on how its text arrives, nor on where a stream resumes."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from api_proc.anthropic.bodies import InputMessage, MessagesBody
from api_proc.anthropic.chat import chat_of
from api_proc.anthropic.positions import stream_position
from api_proc.anthropic.reply import MessageReply
from api_proc.chat.families import find_dialect
from api_proc.chat.parser import OutputParser
from api_proc.text.checkpoint import SamplingDefaults
from api_proc.text.output_sequence import Delta
from tests.api.tool_answers import TEXT
from tests.message_stream import MessageEvent, message_of, parse

CHAT = chat_of(MessagesBody(messages=[InputMessage("user", "hi")], max_tokens=5000))
DIALECTS = {"tools": find_dialect(None, "hermes", "qwen3"), "plain": None}


def cut(length: int, seed: int) -> Iterator[tuple[int, int]]:
    """Cut a text into random pieces."""
    draw = random.Random(seed)
    start = 0
    while start < length:
        end = min(length, start + draw.choice((1, 1, 2, 7, 40)))
        yield start, end
        start = end


def play(dialect_name: str, seed: int, last_id: str | None = None) -> list[MessageEvent]:
    """Return the events after a position; each character of the text is a token."""
    dialect = DIALECTS[dialect_name]
    position = None if last_id is None else stream_position(last_id, "r", [len(TEXT)])
    num_sent = 0 if position is None else position.num_sent[0] or 0
    parser = None
    if dialect is not None:
        parser = OutputParser(
            dialect, schemas={"get_weather": {}, "now": {}}, is_reasoning_open=False, make_id=str
        )
    sequence: Any = SimpleNamespace(
        num_prompt_tokens=20, num_cached_tokens=16, num_output_tokens=0, parser=parser
    )
    generation: Any = SimpleNamespace(
        sequences=[sequence], position=position, request_id="r", is_resumable=True
    )
    processor = SimpleNamespace(defaults=SamplingDefaults())
    state: Any = SimpleNamespace(shown_model=lambda name: "m", text=processor)
    connection: Any = SimpleNamespace(last_event_id=last_id)
    reply = MessageReply(state, connection, CHAT, generation)
    text = b""
    rest = [(num_sent + a, num_sent + b) for a, b in cut(len(TEXT) - num_sent, seed)]
    for start, end in [*cut(num_sent, seed), *rest]:
        is_last = end == len(TEXT)
        sequence.num_output_tokens = end
        piece = TEXT[start:end]
        events = None if parser is None else parser.push(piece, is_last=is_last)
        reason = "stop" if is_last else None
        delta = Delta(piece, [0] * (end - start), finish_reason=reason, events=events)
        if end <= num_sent:
            reply.skip(sequence, delta)
        else:
            text += b"".join(reply.frames(sequence, delta))
    return parse((text + b"".join(reply.last_frames())).decode())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_message_does_not_depend_on_its_pieces(dialect: str) -> None:
    messages = [message_of(play(dialect, seed)) for seed in range(20)]
    assert all(message == messages[0] for message in messages)
    kinds = [block["type"] for block in messages[0]["content"]]
    assert kinds == (["text"] if dialect == "plain" else ["thinking", "text", *["tool_use"] * 2])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_continues_after_any_event_in_other_pieces(dialect: str) -> None:
    expected = message_of(play(dialect, 0))
    for seed in (1, 2):
        whole = play(dialect, seed)
        for count, event in enumerate(whole, start=1):
            rest = play(dialect, seed + count, event.id)
            assert message_of([*whole[:count], *rest]) == expected, event.id

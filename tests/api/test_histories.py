"""Histories, journal records and event ids: tokens are matched by index."""

import asyncio
from typing import Any

import pytest

from api_proc.errors import ApiError
from api_proc.generation.pieces import pieces
from api_proc.resumption.event_ids import EventIds, parse_event_id
from api_proc.resumption.history import History, HistoryReader
from api_proc.resumption.session_log import (
    AcceptRecord,
    OutputRecord,
    RemoveRecord,
    Row,
    StopRecord,
    packed,
    resumed,
    unpacked,
)
from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.client.errors import EngineFailed, failure_of
from protocol.client.request_stream import merge
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.message import encode
from protocol.sampling import FinishReason, SamplingParams
from tests.api.fake_engine import logprobs_of
from tests.api.session_server import replay

STOP = FinishReason.STOP


def out(first: int, *ids: int, **rest: Any) -> RequestOutput:
    return RequestOutput(0, first, list(ids), **rest)


def ignore(history: History, output: RequestOutput | None) -> None:
    pass


def test_repeated_outputs_count_once() -> None:
    history = History(ignore)
    for output in (out(0, 5, 6), out(1, 6, 7), out(0, 5), out(9, 1), out(3, 8)):
        history.add(output)
    assert history.whole() == out(0, 5, 6, 7, 8)
    assert history.whole(2) == out(2, 7, 8)


def test_readers_read_all_from_the_beginning_and_wait_for_more() -> None:
    async def play() -> None:
        history = History(ignore)
        history.deliver(out(0, 5, num_cached_tokens=3, queue_time_s=0.5))
        early, late = (HistoryReader(history, lambda: None) for _ in range(2))
        assert await anext(early) == out(0, 5, num_cached_tokens=3, queue_time_s=0.5)
        waiting = asyncio.create_task(anext(early))
        await asyncio.sleep(0)
        history.deliver(out(1, 6, 7, finish_reason=STOP))
        assert await waiting == out(1, 6, 7, finish_reason=STOP)
        assert late.num_unread == 2  # tokens from before it began do not count
        assert await anext(late) == out(
            0, 5, 6, 7, finish_reason=STOP, num_cached_tokens=3, queue_time_s=0.5
        )
        for reader in (early, late):
            with pytest.raises(StopAsyncIteration):
                await anext(reader)

    asyncio.run(play())


def test_leave_ends_one_reader_and_a_failure_all() -> None:
    async def play() -> None:
        history = History(ignore)
        one, other = (HistoryReader(history, lambda: None) for _ in range(2))
        waits = [asyncio.create_task(anext(reader)) for reader in (one, other)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        one.leave()
        await asyncio.wait(waits[:1])
        assert isinstance(waits[0].exception(), StopAsyncIteration | RuntimeError)
        assert not waits[1].done()
        history.fail(failure_of(RequestError(ErrorCode.ENGINE_FAILED, "gone")))
        await asyncio.wait(waits[1:])
        assert isinstance(waits[1].exception(), EngineFailed)

    asyncio.run(play())


@pytest.mark.parametrize("num_first", [0, 1, 255, 256, 257, 600])
@pytest.mark.parametrize("num_tokens", [0, 1, 256, 600])
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_pieces_add_up_and_are_split_at_the_position(
    num_first: int, num_tokens: int, with_logprobs: bool
) -> None:
    ids = list(range(num_tokens))
    logprobs = [logprobs_of(i, 1) for i in ids] if with_logprobs and ids else None
    whole = RequestOutput(1, 10, ids, STOP, None, 4, logprobs)
    found = list(pieces(whole, num_first))
    assert merge(found) == whole
    assert [piece.finish_reason for piece in found] == [None] * (len(found) - 1) + [STOP]
    ends = [piece.first_index + len(piece.token_ids) - 10 for piece in found]
    assert num_first in (0, *ends) or num_first > num_tokens
    assert all(len(piece.token_ids) <= (16 if logprobs else 256) for piece in found[1:])


def add(number: int) -> AddRequest:
    return AddRequest(number, [1, 2], SamplingParams(seed=number))


def accepted(number: int, num_sequences: int = 1) -> AcceptRecord:
    return AcceptRecord(
        number, f"r{number}", "/p", b"{}", 7, [add(i) for i in range(num_sequences)]
    )


def test_replay_returns_open_requests_with_all_tokens() -> None:
    records = [
        accepted(1, 2),
        accepted(2),
        OutputRecord([Row(1, 0, out(0, 5)), Row(2, 0, out(0, 9)), Row(1, 1, out(0, 6))]),
        OutputRecord([Row(1, 0, out(1, 7, finish_reason=STOP)), Row(3, 0, out(0, 1))]),
        StopRecord(1, 1),
        RemoveRecord(2),
        RemoveRecord(0),
    ]
    bodies = [encode(record) for record in records]
    for journal in (
        bodies,
        [*bodies, bodies[0], bodies[2]],
        [*bodies, b"rubbish", encode(["New", 1])],
    ):
        (found,) = replay(journal)
        assert found.accepted == accepted(1, 2)
        assert [list(history.token_ids) for history in found.histories] == [[5, 7], [6]]
        assert [history.is_ended for history in found.histories] == [True, True]
        again = resumed(add(0), found.histories[0])
        assert again.output_token_ids == [5, 7]
        assert again.prompt_token_ids == [1, 2]


def test_any_end_of_a_journal_is_a_shorter_history() -> None:
    """Missing outputs are computed again; they have no other effect."""
    bodies = [encode(accepted(1))]
    bodies += [encode(OutputRecord([Row(1, 0, out(i, i + 3))])) for i in range(5)]
    for length in range(1, len(bodies) + 1):
        (found,) = replay(bodies[:length])
        assert list(found.histories[0].token_ids) == [3, 4, 5, 6, 7][: length - 1]
    (found,) = replay([*bodies[:2], *bodies[3:]])  # a gap
    assert list(found.histories[0].token_ids) == [3]


def test_event_ids_contain_the_position_of_the_stream() -> None:
    ids = EventIds("a.b", [None, None])
    first, second = ids.tag([b"data: role\n\n", b"data: x\n\n"], 0, 3)
    assert first == b"data: role\nid: a.b.0-\n\n"
    assert second == b"data: x\nid: a.b.3-\n\n"
    assert ids.tag([], 1, 2) == []
    assert ids.tag([b"data: y\n\n"], 1, 1) == [b"data: y\nid: a.b.3-3\n\n"]
    assert ids.tag_usage(b"data: u\n\n") == b"data: u\nid: a.b.3-3u\n\n"
    assert parse_event_id("a.b.0-", "a.b", [9, 9]) == ([0, None], False)
    assert parse_event_id("a.b.3-3u", "a.b", [9, 9]) == ([3, 3], True)
    for wrong in (
        "a.b",
        "a.b.",
        "a.3-3",
        "a.b.3",
        "a.b.3-3-3",
        "a.b.3-10",
        "a.b.-1",
        "a.b.3x",
        "",
        "é.1-1",
    ):
        if wrong in ("a.b.-1",):
            assert parse_event_id(wrong, "a.b", [9, 9]) == ([None, 1], False)
            continue
        with pytest.raises(ApiError):
            parse_event_id(wrong, "a.b", [9, 9])


def test_streams_of_very_many_sequences_have_no_ids() -> None:
    ids = EventIds("r", [None] * 17)
    assert ids.tag([b"data: x\n\n"], 0, 1) == [b"data: x\n\n"]


def test_prompts_are_written_once() -> None:
    """`n` copies of a long prompt would exceed the size of a record."""
    prompts = [[1] * 1000, [1] * 1000, [2], [2], [1] * 1000]
    adds = [AddRequest(i, prompt, SamplingParams(seed=i)) for i, prompt in enumerate(prompts)]
    whole = AcceptRecord(1, "r", "/p", b"{}", 7, adds)
    small = packed(whole)
    assert [len(item.prompt_token_ids) for item in small.adds] == [1000, 0, 1, 0, 1000]
    assert unpacked(small) == whole
    (found,) = replay([encode(small)])
    assert found.accepted == whole


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 4096, 5000])
def test_parts_and_outputs_between_them_add_up_to_the_history(
    num_tokens: int, with_logprobs: bool
) -> None:
    """A snapshot takes several turns, and new outputs are written between its parts."""

    def output(first: int, ids: list[int], **rest: Any) -> RequestOutput:
        logprobs = [logprobs_of(i, 1) for i in ids] if with_logprobs else None
        return RequestOutput(0, first, ids, logprobs=logprobs, **rest)

    history = History(ignore)
    history.add(
        output(
            0,
            list(range(num_tokens)),
            num_cached_tokens=4 if num_tokens else None,
            queue_time_s=0.5 if num_tokens else None,
        )
    )
    rows: list[OutputRecord | StopRecord] = []
    for i, part in enumerate(history.parts()):
        rows.append(OutputRecord([Row(1, 0, part)]))
        assert len(part.token_ids) <= 4096
        if i < 3:
            live = output(len(history.token_ids), [i])
            history.add(live)
            rows.append(OutputRecord([Row(1, 0, live)]))
            if i == 2:
                rows.append(StopRecord(1, 0))
    (found,) = replay([encode(accepted(1)), *map(encode, rows)])
    assert found.histories[0].whole() == history.whole()


def test_records_for_unknown_sequences_are_skipped() -> None:
    """The server starts with any content of the journal."""
    bodies = [
        accepted(1),
        OutputRecord([Row(1, 7, out(0, 5)), Row(1, -1, out(0, 5))]),
        StopRecord(1, 3),
    ]
    (found,) = replay([encode(body) for body in bodies])
    assert not found.histories[0].token_ids


def of_prompt(first: int, count: int) -> list[PromptLogprobs]:
    return [PromptLogprobs(0, first, [logprobs_of(i, 1) for i in range(first, first + count)])]


def by_position(history: History) -> list[tuple[int, TokenLogprobs]]:
    parts = history.prompt_logprobs
    return [(part.first_position + i, e) for part in parts for i, e in enumerate(part.entries)]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_prompt_logprobs_are_complete_with_outputs_between_parts(num_before: int) -> None:
    """Outputs between a snapshot's request and its parts are in the parts, too."""
    history = History(ignore)
    history.add(out(0, prompt_logprobs=of_prompt(1, 100), num_cached_tokens=1))
    live = [
        out(0, prompt_logprobs=of_prompt(101, 100)),
        out(0, 5, prompt_logprobs=of_prompt(201, 50), finish_reason=STOP),
    ]
    outputs = []
    for output in live[:num_before]:
        history.add(output)
        outputs.append(output)
    parts = history.parts()
    for output in live[num_before:]:
        outputs.append(next(parts))
        history.add(output)
        outputs.append(output)
    outputs += parts
    rows = [OutputRecord([Row(1, 0, output)]) for output in outputs]
    (found,) = replay([encode(accepted(1)), *map(encode, rows)])
    assert [position for position, _ in by_position(history)] == list(range(1, 251))
    assert by_position(found.histories[0]) == by_position(history)
    assert found.histories[0].whole(1) == history.whole(1) == out(1, finish_reason=STOP)
    assert found.histories[0].num_cached_tokens == 1


def test_parts_bound_the_prompt_logprobs() -> None:
    history = History(ignore)
    history.add(out(0, 5, 6, prompt_logprobs=of_prompt(1, 1000), num_cached_tokens=4))
    parts = list(history.parts())
    sizes = [sum(len(p.entries) for p in part.prompt_logprobs or []) for part in parts]
    assert max(sizes) <= 64
    again = History(ignore)
    for part in parts:
        again.add(part)
    assert by_position(again) == by_position(history)
    assert again.whole(1) == history.whole(1)
    assert again.num_cached_tokens == 4


OLD_JOURNAL = [
    bytes.fromhex(
        "97a8416363657074656401a172af2f76312f636f6d706c6574696f6e73c4077b226e223a327d07929aaa4164"
        "6452657175657374059203049f04cb3ff0000000000000cb3ff000000000000000cb000000000000000009cb"
        "0000000000000000cb0000000000000000cb3ff000000000000000c29080c0c09000cb0000000000000000a0"
        "c2a09aaa4164645265717565737406909f04cb3ff0000000000000cb3ff000000000000000cb000000000000"
        "00000acb0000000000000000cb0000000000000000cb3ff000000000000000c29080c0c09000cb0000000000"
        "000000a0c2a0"
    ),
    b"\x92\xa7Brought\x92\x93\x01\x00\x98\x05\x00\x92\x08\t\xc0\xc0\xc0\xc0\xc0\x93\x01\x01\x98"
    b"\x06\x00\x91\x07\xa6length\xc0\xc0\xc0\xc0",
    b"\x93\xa3Cut\x01\x00",
]
"""Written by version 0.1.0, before the records had their present names."""


def test_an_old_journal_still_reads() -> None:
    (found,) = replay(OLD_JOURNAL)
    assert (found.accepted.request_id, found.accepted.raw) == ("r", b'{"n":2}')
    assert [add.prompt_token_ids for add in found.accepted.adds] == [[3, 4], [3, 4]]
    assert [add.sampling_params.seed for add in found.accepted.adds] == [9, 10]
    assert [list(history.token_ids) for history in found.histories] == [[8, 9], [7]]
    assert found.histories[0].is_stopped
    assert found.histories[1].finish_reason is FinishReason.LENGTH
    assert not replay([*OLD_JOURNAL, b"\x92\xa9Forgotten\x01"])

"""What is kept of a request for clients that come back: by index, read from anywhere."""

import asyncio
from typing import Any

import pytest

from api_proc.errors import ApiError
from api_proc.event_ids import EventIds, parse_event_id
from api_proc.generation import _pieces
from api_proc.history import History, HistoryReader
from api_proc.session_log import (
    Accepted,
    Brought,
    Cut,
    Forgotten,
    Row,
    packed,
    resumed,
    unpacked,
)
from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.errors import EngineFailed, failure_of
from protocol.message import encode
from protocol.request_stream import merge
from protocol.sampling import FinishReason, SamplingParams
from tests.api.fake_engine import logprobs_of
from tests.api.session_server import replay

STOP = FinishReason.STOP


def out(first: int, *ids: int, **rest: Any) -> RequestOutput:
    return RequestOutput(0, first, list(ids), **rest)


def ignore(history: History, output: RequestOutput | None) -> None:
    pass


def test_outputs_count_once_whatever_comes_again() -> None:
    history = History(ignore)
    for output in (out(0, 5, 6), out(1, 6, 7), out(0, 5), out(9, 1), out(3, 8)):
        history.enter(output)
    assert history.whole() == out(0, 5, 6, 7, 8)
    assert history.whole(2) == out(2, 7, 8)


def test_readers_read_all_from_the_beginning_and_wait_for_more() -> None:
    async def play() -> None:
        history = History(ignore)
        history.deliver(out(0, 5, num_cached_tokens=3))
        early, late = (HistoryReader(history, lambda: None) for _ in range(2))
        assert await anext(early) == out(0, 5, num_cached_tokens=3)
        waiting = asyncio.create_task(anext(early))
        await asyncio.sleep(0)
        history.deliver(out(1, 6, 7, finish_reason=STOP))
        assert await waiting == out(1, 6, 7, finish_reason=STOP)
        assert late.num_unread == 2  # what was there when it began counts for nothing
        assert await anext(late) == out(0, 5, 6, 7, finish_reason=STOP, num_cached_tokens=3)
        for reader in (early, late):
            with pytest.raises(StopAsyncIteration):
                await anext(reader)

    asyncio.run(play())


def test_leaving_ends_one_reader_and_failure_all() -> None:
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
def test_pieces_add_up_and_are_cut_where_it_was_asked(
    num_first: int, num_tokens: int, with_logprobs: bool
) -> None:
    ids = list(range(num_tokens))
    logprobs = [logprobs_of(i, 1) for i in ids] if with_logprobs and ids else None
    whole = RequestOutput(1, 10, ids, STOP, None, 4, logprobs)
    pieces = list(_pieces(whole, num_first))
    assert merge(pieces) == whole
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [STOP]
    ends = [piece.first_index + len(piece.token_ids) - 10 for piece in pieces]
    assert num_first in (0, *ends) or num_first > num_tokens
    assert all(len(piece.token_ids) <= (16 if logprobs else 256) for piece in pieces[1:])


def add(number: int) -> AddRequest:
    return AddRequest(number, [1, 2], SamplingParams(seed=number))


def accepted(number: int, num_sequences: int = 1) -> Accepted:
    return Accepted(number, f"r{number}", "/p", b"{}", 7, [add(i) for i in range(num_sequences)])


def test_replay_finds_what_is_open_with_all_its_tokens() -> None:
    records = [
        accepted(1, 2),
        accepted(2),
        Brought([Row(1, 0, out(0, 5)), Row(2, 0, out(0, 9)), Row(1, 1, out(0, 6))]),
        Brought([Row(1, 0, out(1, 7, finish_reason=STOP)), Row(3, 0, out(0, 1))]),
        Cut(1, 1),
        Forgotten(2),
        Forgotten(0),
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
    """What was cut off is computed again: nothing else may follow from it."""
    bodies = [encode(accepted(1))]
    bodies += [encode(Brought([Row(1, 0, out(i, i + 3))])) for i in range(5)]
    for length in range(1, len(bodies) + 1):
        (found,) = replay(bodies[:length])
        assert list(found.histories[0].token_ids) == [3, 4, 5, 6, 7][: length - 1]
    (found,) = replay([*bodies[:2], *bodies[3:]])  # a gap
    assert list(found.histories[0].token_ids) == [3]


def test_event_ids_say_how_far_a_stream_has_come() -> None:
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
    """`n` copies of a long one would be more than any journal takes."""
    prompts = [[1] * 1000, [1] * 1000, [2], [2], [1] * 1000]
    adds = [AddRequest(i, prompt, SamplingParams(seed=i)) for i, prompt in enumerate(prompts)]
    whole = Accepted(1, "r", "/p", b"{}", 7, adds)
    small = packed(whole)
    assert [len(item.prompt_token_ids) for item in small.adds] == [1000, 0, 1, 0, 1000]
    assert unpacked(small) == whole
    (found,) = replay([encode(small)])
    assert found.accepted == whole


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 4096, 5000])
def test_a_history_in_parts_is_the_whole_whatever_comes_between(
    num_tokens: int, with_logprobs: bool
) -> None:
    """A snapshot takes several turns: what comes meanwhile is written between its parts."""

    def output(first: int, ids: list[int], **rest: Any) -> RequestOutput:
        logprobs = [logprobs_of(i, 1) for i in ids] if with_logprobs else None
        return RequestOutput(0, first, ids, logprobs=logprobs, **rest)

    history = History(ignore)
    history.enter(output(0, list(range(num_tokens)), num_cached_tokens=4 if num_tokens else None))
    rows: list[Brought | Cut] = []
    for i, part in enumerate(history.parts()):
        rows.append(Brought([Row(1, 0, part)]))
        assert len(part.token_ids) <= 4096
        if i < 3:
            live = output(len(history.token_ids), [i])
            history.enter(live)
            rows.append(Brought([Row(1, 0, live)]))
            if i == 2:
                rows.append(Cut(1, 0))
    (found,) = replay([encode(accepted(1)), *map(encode, rows)])
    assert found.histories[0].whole() == history.whole()


def test_records_that_fit_nothing_are_left_out() -> None:
    """No content of a journal keeps the server from starting."""
    bodies = [accepted(1), Brought([Row(1, 7, out(0, 5)), Row(1, -1, out(0, 5))]), Cut(1, 3)]
    (found,) = replay([encode(body) for body in bodies])
    assert not found.histories[0].token_ids


def of_prompt(first: int, count: int) -> list[PromptLogprobs]:
    return [PromptLogprobs(0, first, [logprobs_of(i, 1) for i in range(first, first + count)])]


def by_position(history: History) -> list[tuple[int, TokenLogprobs]]:
    parts = history.prompt_logprobs
    return [(part.first_position + i, e) for part in parts for i, e in enumerate(part.entries)]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_prompt_logprobs_are_whole_whatever_comes_between(num_before: int) -> None:
    """What comes after a snapshot's request, and before its parts, is in these too."""
    history = History(ignore)
    history.enter(out(0, prompt_logprobs=of_prompt(1, 100), num_cached_tokens=1))
    live = [
        out(0, prompt_logprobs=of_prompt(101, 100)),
        out(0, 5, prompt_logprobs=of_prompt(201, 50), finish_reason=STOP),
    ]
    outputs = []
    for output in live[:num_before]:
        history.enter(output)
        outputs.append(output)
    parts = history.parts()
    for output in live[num_before:]:
        outputs.append(next(parts))
        history.enter(output)
        outputs.append(output)
    outputs += parts
    rows = [Brought([Row(1, 0, output)]) for output in outputs]
    (found,) = replay([encode(accepted(1)), *map(encode, rows)])
    assert [position for position, _ in by_position(history)] == list(range(1, 251))
    assert by_position(found.histories[0]) == by_position(history)
    assert found.histories[0].whole(1) == history.whole(1) == out(1, finish_reason=STOP)
    assert found.histories[0].num_cached_tokens == 1


def test_parts_hold_no_more_of_a_prompt_than_of_an_answer() -> None:
    history = History(ignore)
    history.enter(out(0, 5, 6, prompt_logprobs=of_prompt(1, 1000), num_cached_tokens=4))
    parts = list(history.parts())
    sizes = [sum(len(p.entries) for p in part.prompt_logprobs or []) for part in parts]
    assert max(sizes) <= 64
    again = History(ignore)
    for part in parts:
        again.enter(part)
    assert by_position(again) == by_position(history)
    assert again.whole(1) == history.whole(1)
    assert again.num_cached_tokens == 4

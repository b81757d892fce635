"""Sessions: concurrent readers, duplicates, expiry, and what remains."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_proc.bodies import CompletionBody
from api_proc.errors import ApiError
from api_proc.fairness.budget import Freed, Lease
from api_proc.resumption.event_ids import StreamPosition
from api_proc.resumption.session import DecodedRequest, Session
from api_proc.text.output_sequence import Prompt
from protocol.api_core import AddRequest, RequestOutput
from protocol.client.errors import RequestFailed
from protocol.sampling import SamplingParams
from tests.api.fake_engine import emitting
from tests.api.session_server import OUTPUT_IDS, PATH, RAW, Server, play, read, submit_all, until


@play
async def test_an_error_in_one_connection_does_not_affect_another(tmp_path: Path) -> None:
    server = await Server(tmp_path).written()
    session = await server.accept("r")
    with server.generation("r", session) as other:
        other.resume(StreamPosition([None]))
        with contextlib.suppress(ZeroDivisionError), server.generation("r", session) as one:
            one.resume(StreamPosition([None]))
            await read(one, 3)
            raise ZeroDivisionError
        assert await read(other, 900) == OUTPUT_IDS
    server.sessions.close()


@play
async def test_a_reused_id_belongs_to_the_new_request(tmp_path: Path) -> None:
    """A connection to the old request does not affect the new one."""
    server = await Server(tmp_path).written()
    server.client.is_paused = True  # neither request ends by itself
    old = await server.accept("r", b'{"seed": 1}')
    server.sessions.attach(old)
    server.sessions.remove(old)
    new = await server.accept("r", b'{"seed": 2}')
    server.sessions.detach(old, is_known=True, is_sent=False)
    server.sessions.remove(old)
    assert server.find("r", b'{"seed": 2}') is new
    assert not new.is_ended
    server.sessions.close()


@play
async def test_a_position_after_the_end_is_an_error(tmp_path: Path) -> None:
    """The position of the end is not."""
    server = await Server(tmp_path).written()
    session = await server.accept("r", max_tokens=9)
    await until(lambda: session.is_ended)
    session.histories[0].token_ids.pop()  # a worker has computed another token
    with server.generation("r", session) as generation:
        generation.resume(StreamPosition([8]))
        assert await read(generation, 1) == []
    with server.generation("r", session) as generation, pytest.raises(ApiError) as caught:
        generation.resume(StreamPosition([9]))
    error = caught.value
    assert (error.param, error.code) == ("Last-Event-ID", "invalid_last_event_id")
    assert "9 tokens of a choice were received" in error.message
    assert "has ended after 8" in error.message
    assert server.find("r") is session
    server.sessions.close()


@play
async def test_skipping_sent_tokens_does_not_block_the_event_loop(tmp_path: Path) -> None:
    server = await Server(tmp_path).written()
    session = await server.accept("r")
    history = session.histories[0]
    await until(lambda: session.is_ended)
    history.token_ids.extend([100] * 50_000)
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    with server.generation("r", session, stop=["never"]) as generation:
        generation.resume(StreamPosition([50_900]))
        assert await read(generation, 1) == []
    turning.cancel()
    assert num_turns >= 50_000 // 256
    server.sessions.close()


@play
async def test_a_disconnect_during_acceptance_leaves_a_session(
    tmp_path: Path,
) -> None:
    server = await Server(tmp_path).written()
    with server.generation("r") as generation:
        generation.begin_session(PATH, RAW, [Prompt([5, 6], None)])
        submit_all(generation, [5, 6], SamplingParams(max_tokens=9, seed=1))
        accepting = asyncio.create_task(generation.accepted())
        await asyncio.sleep(0)
        generation.cancel()
        await accepting
    session = server.find("r")
    assert session is not None
    assert session.expiry is not None
    server.sessions.close()


@play
async def test_a_rejected_request_leaves_nothing(tmp_path: Path) -> None:
    """The first of several sequences may be accepted, and the next rejected."""
    server = await Server(tmp_path).written()
    with contextlib.suppress(RequestFailed), server.generation("r") as generation:
        generation.begin_session(PATH, RAW, [Prompt([5, 6], None)] * 2)
        submit_all(generation, [5, 6], SamplingParams(max_tokens=9, seed=1))
        submit_all(generation, [5] * 2000, SamplingParams(max_tokens=9, seed=1))
        pytest.fail("too long a prompt was accepted")
    assert len(server.sessions) == 0
    assert server.client.cancelled == [1]
    assert server.sessions._budget.num_requests == 0
    server.sessions.close()
    successor = await Server(tmp_path).written()
    assert len(successor.sessions) == 0
    successor.sessions.close()


@play
async def test_an_expired_session_leaves_nothing(tmp_path: Path) -> None:
    def script(add: AddRequest) -> Iterator[RequestOutput]:
        for i, output in enumerate(emitting(OUTPUT_IDS)(add)):
            server.client.is_paused = i >= 3
            yield output

    server = await Server(tmp_path, resume_window_s=0.1).written()
    server.client.script = script
    session = await server.accept("r")
    await until(lambda: len(server.sessions) == 0)
    assert server.client.cancelled == [1]
    assert session.histories[0].finish_reason is None
    assert num_finished(server) == {"abort": 1}
    assert server.sessions._budget.num_bytes == 0
    server.sessions.close()
    successor = await Server(tmp_path).written()
    assert len(successor.sessions) == 0
    successor.sessions.close()


@pytest.mark.parametrize("is_restored", [False, True])
@play
async def test_a_session_is_freed_at_once(tmp_path: Path, is_restored: bool) -> None:
    """The garbage collector is not needed: the process makes collections rare."""
    server = await Server(tmp_path).written()
    await end_without_connection(server, "r")
    if is_restored:
        server.sessions.close()
        server = await Server(tmp_path).written()
    server.client.receivers.clear()
    session = server.sessions._by_id["r"]
    parts = [weakref.ref(part) for part in (session, *session.histories)]
    gc.disable()
    try:
        server.sessions.remove(session)
        del session
        await until(lambda: all(part() is None for part in parts), 5.0)
    finally:
        gc.enable()
    server.sessions.close()


async def end_without_connection(server: Server, name: str) -> None:
    """Compute a request of two sequences, with a deadline, that no connection has read."""
    decoded = DecodedRequest(CompletionBody(prompt="x", timeout=60.0), [Prompt([5, 6], None)])
    session = server.sessions.begin(name, PATH, RAW, decoded)
    for _ in range(2):
        server.sessions.submit(session, [5, 6], SamplingParams(max_tokens=2, seed=1))
    await server.sessions.accept(session)
    await until(lambda: session.is_ended)


@play
async def test_answers_that_were_sent_make_room(tmp_path: Path) -> None:
    """This holds after a restart; answers whose end was not sent make none."""
    server = await Server(tmp_path, max_open_requests=2).written()
    for i in range(5):
        session = await server.accept(f"r{i}", max_tokens=2)
        with server.generation(f"r{i}", session) as generation:
            generation.resume(StreamPosition([None]))
            await read(generation, 2)
    assert set(server.sessions._by_id) == {"r3", "r4"}
    server.sessions.close()
    server = await Server(tmp_path, max_open_requests=2).written()
    assert set(server.sessions._by_id) == {"r3", "r4"}
    for i in range(2):
        session = await server.accept(f"open{i}", max_tokens=2)
        await until(lambda session=session: session.is_ended)
    with pytest.raises(ApiError) as caught:
        await server.accept("more")
    assert caught.value.status == 429
    assert set(server.sessions._by_id) == {"open0", "open1"}
    server.sessions.close()


@play
async def test_a_client_makes_room_with_its_own_answers(tmp_path: Path) -> None:
    """The oldest answer of any client is removed only if a client without one finds no room."""
    server = await Server(tmp_path, max_open_requests=9).written()

    async def begin(name: str, origin: str) -> Session:
        decoded = DecodedRequest(CompletionBody(prompt="x", stream=True), [Prompt([5, 6], None)])
        session = server.sessions.begin(name, PATH, RAW, decoded, origin=origin)
        params = SamplingParams(max_tokens=2, seed=1)
        server.sessions.submit(session, [5, 6], params, origin=origin)
        await server.sessions.accept(session)
        return session

    async def answer(name: str, origin: str) -> None:
        session = await begin(name, origin)
        with server.generation(name, session) as generation:
            generation.resume(StreamPosition([None]))
            await read(generation, 2)

    for i in range(9):
        await answer(f"a{i}", "a")
    kept = [f"a{i}" for i in range(1, 9)]
    assert list(server.sessions._by_id) == kept, "its share is full, and the bound is not"
    await answer("b0", "b")
    await answer("b1", "b")
    assert list(server.sessions._by_id) == [*kept, "b1"]
    await answer("c0", "c")
    assert list(server.sessions._by_id) == [*kept[1:], "b1", "c0"]

    unsent = [(await begin(f"open{i}", "a")).request_id for i in range(8)]
    assert list(server.sessions._by_id) == ["c0", *unsent]
    with pytest.raises(ApiError):
        await begin("more", "a")
    assert list(server.sessions._by_id) == ["c0", *unsent], "none is removed in vain"
    server.sessions.close()


@play
async def test_no_answer_is_removed_for_a_request_that_is_too_large(tmp_path: Path) -> None:
    """Neither the client's own nor another's is. Of several answers the fewest are removed."""
    server = await Server(tmp_path, max_open_bytes=9000).written()

    def begin(name: str, num_bytes: int, origin: str) -> Session:
        decoded = DecodedRequest(CompletionBody(prompt="x", stream=True), [Prompt([5, 6], None)])
        raw = b" " * num_bytes
        session = server.sessions.begin(name, PATH, raw, decoded, origin=origin)
        params = SamplingParams(max_tokens=2, seed=1)
        server.sessions.submit(session, [5, 6], params, origin=origin)
        return session

    async def answer(name: str, num_bytes: int, origin: str) -> None:
        session = begin(name, num_bytes, origin)
        await server.sessions.accept(session)
        with server.generation(name, session) as generation:
            generation.resume(StreamPosition([None]))
            await read(generation, 2)

    begin("open", 4000, "b")
    for name, origin in (("a0", "a"), ("a1", "a"), ("c0", "c"), ("c1", "c")):
        await answer(name, 1000, origin)
    kept = ["open", "a0", "a1", "c0", "c1"]
    for origin, num_bytes in (("a", 5001), ("b", 1400), ("d", 5001)):
        with pytest.raises(ApiError):
            begin("more", num_bytes, origin)
        assert list(server.sessions._by_id) == kept
    begin("a2", 1500, "a")
    assert list(server.sessions._by_id) == ["open", "a1", "c0", "c1", "a2"]
    begin("d0", 1500, "d")
    assert list(server.sessions._by_id) == ["open", "c0", "c1", "a2", "d0"]
    server.sessions.close()


@play
async def test_answers_that_make_no_room_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request needs room while a bound is reached, and thousands may be kept."""
    server = await Server(tmp_path, max_open_requests=9, max_open_bytes=9000).written()
    read_ids, num_freed = list[str](), 0

    class Watched(dict[str, Session]):
        def values(self) -> Iterator[Session]:  # type: ignore[override]
            for request_id, session in self.items():
                read_ids.append(request_id)
                yield session

    def add(freed: Freed, lease: Lease) -> None:
        nonlocal num_freed
        num_freed += 1
        add_freed(freed, lease)

    add_freed = Freed.add
    monkeypatch.setattr(Freed, "add", add)
    for i in range(8):
        session = await server.accept(f"a{i}", max_tokens=2)
        with server.generation(f"a{i}", session) as generation:
            generation.resume(StreamPosition([None]))
            await read(generation, 2)
    server.sessions._by_id = Watched(server.sessions._by_id)
    await server.accept("more")
    assert list(server.sessions._by_id) == [*(f"a{i}" for i in range(1, 8)), "more"]
    assert num_freed == 1
    with pytest.raises(ApiError):
        await server.accept("large", b" " * 9000)
    assert num_freed == 1, "the answers' bytes are not enough"
    assert read_ids == []
    server.sessions.close()


def num_finished(server: Server) -> dict[str, int]:
    return {reason: num for reason, num in server.state.metrics.num_finished.items() if num}


@play
async def test_an_end_counts_once_for_many_readers(tmp_path: Path) -> None:
    """So does the end of an unread answer."""
    server = await Server(tmp_path).written()
    session = await server.accept("r", max_tokens=2)
    for _ in range(3):
        with server.generation("r", session) as generation:
            generation.resume(StreamPosition([None]))
            await read(generation, 3)
    assert num_finished(server) == {"length": 1}
    server.sessions.remove(session)
    assert num_finished(server) == {"length": 1}
    unread = await server.accept("unread", max_tokens=2)
    await until(lambda: unread.is_ended)
    server.sessions.remove(unread)
    assert num_finished(server) == {"length": 2}
    server.sessions.close()

"""The recording client of chaos runs, against a server that plays what a test wants."""

import asyncio
import time
from collections.abc import Callable

import pytest

from scripts.chaos.client import Declined, StreamClient
from scripts.chaos.recording import End, Recording
from scripts.chaos.workload import ChaosRequest

REQUEST = ChaosRequest("one", "/v1/completions", {"prompt": "x", "stream": True})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TIMEOUT_S = 10.0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = [
    b'data: {"a":1}\n\n',
    b": comment\n\n",
    b'id: 7.1\ndata: {"b":2}\n\n',
    b"data: [DONE]\n\n",
]
WHOLE = HEAD + chunk(b"".join(EVENTS)) + chunk(b"")


def play(answers: list[bytes], run: Callable[[StreamClient], object]) -> Recording:
    """Answer each connection with the next of `answers`, then close it."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    async def main() -> Recording:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await run(StreamClient(f"http://127.0.0.1:{port}"))  # type: ignore[misc]

    return asyncio.run(main())


def record(*answers: bytes, request: ChaosRequest = REQUEST) -> Recording:
    return play(list(answers), lambda client: client.record(request, time.monotonic() + TIMEOUT_S))


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    """Chunks end anywhere; comments and ids are no data."""
    data = b"".join(EVENTS)
    pieces = [chunk(data[at : at + size]) for at in range(0, len(data), size)]
    recording = record(HEAD + b"".join(pieces) + chunk(b""))
    assert recording.end is End.DONE
    assert [event.data for event in recording.events] == ['{"a":1}', '{"b":2}', "[DONE]"]
    assert [event.id for event in recording.events] == ["", "7.1", ""]
    times = [event.time for event in recording.events]
    assert recording.opened_at <= times[0] <= times[-1] <= recording.ended_at
    assert times == sorted(times)


@pytest.mark.parametrize("num_bytes", [0, len(HEAD) + 5, len(HEAD) + 20, len(WHOLE) - 30])
def test_stream_that_breaks_is_cut(num_bytes: int) -> None:
    recording = record(WHOLE[:num_bytes])
    assert recording.end is End.CUT
    assert (recording.accepted_at is None) == (num_bytes == 0)
    assert recording.problem


def test_orderly_close_without_done_is_cut() -> None:
    assert record(HEAD + chunk(EVENTS[0]) + chunk(b"")).end is End.CUT


def test_body_without_chunks_is_read_too() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert record(head + b"".join(EVENTS)).end is End.DONE


def test_client_leaves_after_as_many_events_as_it_was_told() -> None:
    request = ChaosRequest("one", REQUEST.path, REQUEST.body, disconnect_after=1)
    recording = record(WHOLE, request=request)
    assert (recording.end, len(recording.events)) == (End.LEFT, 1)


def test_asked_to_come_again_it_comes_again() -> None:
    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"
    recording = record(busy, busy, WHOLE)
    assert (recording.end, recording.num_deferred) == (End.DONE, 2)


def test_declined_requests_say_why() -> None:
    recording = record(b"HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\nnope")
    assert (recording.end, recording.status) == (End.DECLINED, 400)
    assert "nope" in recording.problem


def test_nobody_there_and_no_end_in_time() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = StreamClient(f"http://127.0.0.1:{port}")
            assert await client.is_reachable()
            silent = await client.record(REQUEST, time.monotonic() + 0.1)
            assert silent.end is End.TIMEOUT
        assert not await client.is_reachable()
        gone = await client.record(REQUEST, time.monotonic() + TIMEOUT_S)
        assert gone.end is End.UNREACHABLE

    asyncio.run(main())


def test_get() -> None:
    async def get(client: StreamClient) -> None:
        assert await client.get("/x", TIMEOUT_S) == "hi"
        with pytest.raises(Declined):
            await client.get("/x", TIMEOUT_S)

    missing = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
    play([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", missing], get)

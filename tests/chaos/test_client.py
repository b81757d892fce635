"""The recording client of chaos runs, against a scripted server."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.chaos.client import Declined, StreamClient
from tests.chaos.recording import End, Recording
from tests.chaos.workload import ChaosRequest

REQUEST = ChaosRequest(
    "one", "/v1/completions", {"prompt": "x", "stream": True}, request_id="salt:one"
)
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


def play(
    answers: list[bytes],
    run: Callable[[StreamClient], object],
    *,
    resumes: bool = False,
    heads: list[str] | None = None,
) -> Recording:
    """Answer each connection with the next of `answers`, then close it; record the requests."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head.decode().lower())
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    async def main() -> Recording:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = StreamClient(f"http://127.0.0.1:{port}", resumes=resumes)
            return await run(client)  # type: ignore[misc]

    return asyncio.run(main())


def record(*answers: bytes, request: ChaosRequest = REQUEST) -> Recording:
    return play(list(answers), lambda client: client.record(request, time.monotonic() + TIMEOUT_S))


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_events_are_the_same_in_any_pieces(size: int) -> None:
    """Chunks end anywhere; comments and ids are not data."""
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


def test_an_answer_in_one_piece_is_one_event_and_half_of_it_is_a_break() -> None:
    request = ChaosRequest("one", "/v1/embeddings", {"input": ["x"]})
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n"
    half = record(head + b'{"data": [', request=request)
    assert (half.end, half.events) == (End.CUT, [])
    whole = record(head + b'{"data": []}', request=request)
    assert whole.end is End.DONE
    assert [event.data for event in whole.events] == ['{"data": []}', "[DONE]"]


def test_client_leaves_after_the_requested_number_of_events() -> None:
    request = ChaosRequest("one", REQUEST.path, REQUEST.body, disconnect_after=1)
    recording = record(WHOLE, request=request)
    assert (recording.end, len(recording.events)) == (End.LEFT, 1)


def test_deferred_request_is_sent_again() -> None:
    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"
    recording = record(busy, busy, WHOLE)
    assert (recording.end, recording.deferrals) == (End.DONE, [503, 503])


def test_broken_stream_is_resumed_with_the_id_of_its_last_event() -> None:
    """The recording has the events of both connections, and the break."""
    heads: list[str] = []
    begin, rest = HEAD + chunk(b"".join(EVENTS[:3])), HEAD + chunk(EVENTS[3]) + chunk(b"")

    def run(client: StreamClient) -> object:
        return client.record(REQUEST, time.monotonic() + TIMEOUT_S)

    recording = play([b"", begin, rest], run, resumes=True, heads=heads)
    assert recording.end is End.DONE
    assert [event.data for event in recording.events] == ['{"a":1}', '{"b":2}', "[DONE]"]
    assert len(recording.breaks) == 2
    assert len(recording.openings) == 3
    moments = [*zip(recording.openings, recording.breaks, strict=False), recording.openings[-1:]]
    in_order = [moment for pair in moments for moment in pair]
    assert in_order == sorted(in_order)
    assert all("x-request-id: salt:one\r\n" in head for head in heads)
    assert ["last-event-id: 7.1\r\n" in head for head in heads] == [False, False, True]


def test_client_that_does_not_resume_sends_no_request_id() -> None:
    heads: list[str] = []
    end = play(
        [HEAD + chunk(EVENTS[2])],
        lambda client: client.record(REQUEST, time.monotonic() + TIMEOUT_S),
        heads=heads,
    ).end
    assert end is End.CUT
    assert not any("x-request-id" in head for head in heads)


def test_resumed_request_that_is_unknown_is_declined() -> None:
    """It is not sent as a new request, which would hide a loss."""
    unknown = b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno"

    def run(client: StreamClient) -> object:
        return client.record(REQUEST, time.monotonic() + TIMEOUT_S)

    recording = play([HEAD + chunk(EVENTS[2]), unknown], run, resumes=True)
    assert (recording.end, recording.status) == (End.DECLINED, 404)


def test_events_after_the_end_are_recorded() -> None:
    """They come in the same piece, in another one, or as half an event."""
    more = b"".join(EVENTS[:1])
    for late in (
        chunk(EVENTS[3] + more) + chunk(b""),
        chunk(EVENTS[3]) + chunk(more) + chunk(b""),
        chunk(EVENTS[3] + more[:-2]) + chunk(b""),
    ):
        recording = record(HEAD + late)
        assert recording.end is End.DONE
        assert [event.data for event in recording.events] == ["[DONE]", '{"a":1}']
        assert not recording.problem


def test_answer_without_its_end_is_reported() -> None:
    recording = record(HEAD + chunk(EVENTS[3]))
    assert recording.end is End.DONE
    assert "no end of the answer" in recording.problem


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", HEAD + b"zz\r\n", b"HTTP/1.1 x\r\n"])
def test_invalid_http_is_garbled(answer: bytes) -> None:
    """No death explains it."""
    assert record(answer).end is End.GARBLED


@pytest.mark.parametrize("answer", [b"HTTP/1.1 2", HEAD[:40], HEAD + b"1"])
def test_half_a_number_is_not_a_number(answer: bytes) -> None:
    """Half of 200 is not another status, and half of a size is not another size."""
    recording = record(answer)
    assert recording.end is End.CUT
    assert (recording.accepted_at is None) == (not answer.startswith(HEAD))


def test_declined_requests_have_a_reason() -> None:
    recording = record(b"HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\nnope")
    assert (recording.end, recording.status) == (End.DECLINED, 400)
    assert "nope" in recording.problem


def test_refused_connection_and_timeout() -> None:
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


def test_a_get_returns_the_body_or_is_declined() -> None:
    async def get(client: StreamClient) -> None:
        assert await client.get("/x", TIMEOUT_S) == "hi"
        with pytest.raises(Declined):
            await client.get("/x", TIMEOUT_S)

    missing = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
    play([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", missing], get)

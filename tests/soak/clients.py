"""The clients of a soak: each sends one request after the other and checks its answer."""

import asyncio
import re
import time
from array import array
from typing import NamedTuple

from protocol.api_core import ErrorCode
from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from protocol.sampling import SamplingParams
from tests.soak.http_connection import ConnectionBroken, HttpConnection, Reply
from tests.soak.report import Tally
from tests.soak.requests import (
    Answer,
    SoakRequest,
    Way,
    Workload,
    body_of,
    decode_answer,
    problem_of,
)

REQUEST_TIMEOUT_S = 60.0
_METRICS_TIMEOUT_S = 10.0
_GAUGE = re.compile(
    rb"^troika_(ledger_requests|http_requests_open|http_request_bytes|sessions)"
    rb"(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
_RETRY_STATUSES = (429, 503)
_RETRY_CODES = (ErrorCode.OVERLOADED, ErrorCode.STARTING)
_PAUSE_S = 0.1
_MAX_EXAMPLES = 5
_DONE = b"[DONE]"
_RACE_S = 0.5
"""A kept connection may be closed while a request is in flight, but not long after."""


class Lost(Exception):
    """A request without its answer; the text gives the reason."""


class Place(NamedTuple):
    """The addresses of the engine."""

    host: str
    port: int
    model: str
    client: AsyncEngineClient


class SoakClient:
    """One client with a connection of its own, which it keeps as long as the server does."""

    def __init__(
        self, place: Place, workload: Workload, tally: Tally, latencies_s: "array[float]"
    ) -> None:
        """Record the results of requests in `tally` and, by number, in `latencies_s`."""
        self._place = place
        self._workload = workload
        self._tally = tally
        self._latencies_s = latencies_s
        self._connection: HttpConnection | None = None

    async def send(self, number: int) -> None:
        """Send one request, wait for its end and check it."""
        tally = self._tally
        request = self._workload.request(number)
        began = time.monotonic()
        try:
            if request.way is Way.EMBEDDED:
                token_ids, finish_reason = await self._embedded(request)
            else:
                token_ids, finish_reason = await self._http(request)
        except (Lost, ConnectionBroken, RequestFailed, OSError) as error:  # TimeoutError too
            tally.num_lost += 1
            if len(tally.lost) < _MAX_EXAMPLES:
                tally.lost.append(f"{number} ({request.way}): {type(error).__name__}: {error}")
        else:
            problem = problem_of(self._workload, request, token_ids, finish_reason)
            if problem is None:
                tally.num_right += 1
                tally.num_left += request.way is Way.LEAVE and finish_reason is None
            else:
                tally.num_mismatched += 1
                if len(tally.mismatched) < _MAX_EXAMPLES:
                    tally.mismatched.append(f"{number} ({request.way}): {problem}")
        self._latencies_s[number] = time.monotonic() - began
        tally.num_ended += 1

    async def probe(self) -> None:
        """Send a request over HTTP and one through the embedding client: both paths are ready then.

        Raises:
            Lost: a request is not served.
        """
        for way, ask in ((Way.WHOLE, self._http), (Way.EMBEDDED, self._embedded)):
            await ask(SoakRequest(0, way, [1, 2, 3, 4], 2, 0))

    async def close(self) -> None:
        """Disconnect; the next request reconnects."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _embedded(self, request: SoakRequest) -> tuple[list[int], str | None]:
        params = SamplingParams(max_tokens=request.max_tokens)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            while True:
                try:
                    return await self._read_stream(request.prompt, params)
                except RequestFailed as failure:
                    if failure.error.code not in _RETRY_CODES:
                        raise
                    self._tally.num_deferred += 1
                    await asyncio.sleep(_PAUSE_S)

    async def _read_stream(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[int], str | None]:
        token_ids: list[int] = []
        finish_reason = None
        async for output in self._place.client.submit(prompt, params):
            if output.first_index != len(token_ids):
                raise Lost(f"index {output.first_index} after {len(token_ids)} tokens")
            token_ids += output.token_ids
            if output.finish_reason is not None:
                finish_reason = str(output.finish_reason)
        return token_ids, finish_reason

    async def _http(self, request: SoakRequest) -> tuple[list[int], str | None]:
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        body = body_of(request, self._place.model)
        while True:
            reply = await self._ask(request, body, deadline - time.monotonic())
            if reply.status == 200:
                return read_reply(request, reply)
            if reply.status not in _RETRY_STATUSES:
                raise Lost(f"status {reply.status}: {reply.body[:200]!r}")
            self._tally.num_deferred += 1
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, request: SoakRequest, body: bytes, timeout_s: float) -> Reply:
        """Send one request; a kept connection that is closed before the first byte is replaced."""
        connection, is_kept = self._connection, True
        while True:
            if connection is None or not connection.is_open:
                connection = await HttpConnection.connect(self._place.host, self._place.port)
                self._connection, is_kept = connection, False
            began = time.monotonic()
            try:
                return await connection.ask(
                    "POST",
                    "/v1/completions",
                    body,
                    timeout_s=timeout_s,
                    leave_after=request.leaves_after,
                )
            except ConnectionBroken as broken:
                is_race = is_kept and time.monotonic() < began + _RACE_S
                if not (is_race and broken.is_untouched):
                    raise
                self._tally.num_resent += 1


async def read_gauges(place: Place) -> dict[str, int]:
    """Return the API's gauges by name; they count this request, too.

    Raises:
        OSError: it does not answer.
    """
    connection = await HttpConnection.connect(place.host, place.port)
    try:
        reply = await connection.ask("GET", "/metrics", b"", timeout_s=_METRICS_TIMEOUT_S)
    finally:
        await connection.close()
    return {name.decode(): int(float(value)) for name, value in _GAUGE.findall(reply.body)}


def read_reply(request: SoakRequest, reply: Reply) -> tuple[list[int], str | None]:
    """Return the tokens and the last finish_reason.

    Raises:
        Lost: it is an error, a stream without exactly one end, or its usage has another number of
            tokens.
    """
    if request.way is Way.WHOLE:
        answer = decode_answer(reply.body)
        token_ids, finish_reason = _join([answer])
        if answer.usage is None or answer.usage.completion_tokens != len(token_ids):
            raise Lost(f"usage {answer.usage} of {len(token_ids)} tokens")
        return token_ids, finish_reason
    *blocks, _ = reply.body.split(b"\n\n")
    events = [
        line[5:].strip()
        for block in blocks
        for line in block.split(b"\n")
        if line.startswith(b"data:")
    ]
    if not reply.has_left and (events.count(_DONE), events[-1:]) != (1, [_DONE]):
        raise Lost(f"a stream with {events.count(_DONE)} ends, of {len(events)} events")
    return _join([decode_answer(event) for event in events if event != _DONE])


def _join(answers: list[Answer]) -> tuple[list[int], str | None]:
    token_ids: list[int] = []
    finish_reason = None
    for answer in answers:
        if answer.error is not None:
            raise Lost(bytes(answer.error)[:200].decode(errors="replace"))
        for choice in answer.choices:
            if finish_reason is not None:
                raise Lost("goes on after its end")
            token_ids += choice.token_ids or []
            finish_reason = choice.finish_reason or finish_reason
    return token_ids, finish_reason

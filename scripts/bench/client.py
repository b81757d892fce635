"""One load process: sends requests, and records when their tokens arrive.

`python -m scripts.bench.client` reads a `Job` from a line of its input, connects, writes "ready",
reads the time of the start, and writes the `Results`. A job goes to an HTTP server or, over the
embedded client, to a core. While it runs, pieces of replies are only kept; they are decoded after
the last one.
"""

import asyncio
import contextlib
import gc
import os
import resource
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from protocol.api_core import RequestOutput
from protocol.client.async_client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from protocol.sampling import SamplingParams
from scripts.bench.workloads import Request

READY = b"ready\n"
_SHOWN_CHARS = 500
"""Maximum length of an error's text that is passed on."""


class BenchError(Exception):
    """Nothing can be measured; the text has the reason."""


class Job(msgspec.Struct, frozen=True):
    """The requests of one process in one run."""

    target: str
    """The root of an HTTP server's API, as http://127.0.0.1:8000/v1, or the address of a core."""
    model: str
    requests: list[Request]
    timeout_s: float
    """The longest time that a request may take."""
    return_token_ids: bool = False
    """Ask an HTTP server for ids, so that tokens without text arrive as pieces, too."""


class Outcome(msgspec.Struct):
    """The reply to one request."""

    times: list[float] = []
    """When each piece with tokens has arrived, on the monotonic clock."""
    num_tokens: int = 0
    error: str = ""


class Results(msgspec.Struct):
    """The replies to all requests of a job, in its order."""

    outcomes: list[Outcome]
    cpu_s: float
    """Processor time of this process from the start to the last token."""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


class Reply(asyncio.Protocol):
    """What a connection receives, with the time of each piece."""

    def __init__(self, request: bytes, done: "asyncio.Future[None]") -> None:
        self._request = request
        self._done = done
        self._raw = bytearray()
        self._ends: list[int] = []
        self._times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop has its own classes

    def data_received(self, data: bytes) -> None:
        self._raw += data
        self._ends.append(len(self._raw))
        self._times.append(time.monotonic())

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def outcome(self) -> Outcome:
        """Decode the reply."""
        head, _, rest = bytes(self._raw).partition(b"\r\n\r\n")
        status, _, fields = head.partition(b"\r\n")
        if b" 200 " not in status + b" ":
            text = rest[:_SHOWN_CHARS].decode(errors="replace").strip()
            return Outcome(error=f"{status.decode(errors='replace') or 'no reply'}: {text}")
        is_chunked = b"transfer-encoding: chunked" in fields.lower()
        outcome, used = Outcome(times=[]), None
        for line, time_s in self._lines(rest, len(head) + 4, is_chunked):
            data = line.removeprefix(b"data:").strip()
            if data in (line, b"[DONE]"):
                continue
            try:
                event = msgspec.json.decode(data, type=_Event)
            except msgspec.DecodeError as error:
                return Outcome(error=f"unreadable event {data[:_SHOWN_CHARS]!r}: {error}")
            if event.error is not None:
                return Outcome(error=data[:_SHOWN_CHARS].decode(errors="replace"))
            if event.usage is not None:
                used = event.usage.completion_tokens
            if event.choices:
                outcome.times.append(time_s)
        outcome.num_tokens = len(outcome.times) if used is None else used
        return outcome

    def _lines(self, rest: bytes, start: int, is_chunked: bool) -> Iterator[tuple[bytes, float]]:
        """Yield the lines of the body, each with the time at which its end arrived.

        `rest` begins at the offset `start` of what was received.
        """
        body, ends, shifts = bytearray(), [], []
        if is_chunked:
            position = 0
            while (line_end := rest.find(b"\r\n", position)) >= 0:
                size = int(rest[position:line_end].partition(b";")[0] or b"0", 16)
                if size == 0:
                    break
                first = line_end + 2
                shifts.append(start + first - len(body))
                body += rest[first : first + size]
                ends.append(len(body))
                position = first + size + 2
        else:
            body, ends, shifts = bytearray(rest), [len(rest)], [start]
        position = 0
        while (line_end := body.find(b"\n", position)) >= 0:
            end = line_end + 1
            raw_end = end + shifts[bisect_left(ends, end)]
            yield bytes(body[position:line_end]), self._times[bisect_left(self._ends, raw_end)]
            position = end


class Receiver:
    """The output of a request of the embedded client, with the time of each piece."""

    def __init__(self, done: "asyncio.Future[None]") -> None:
        self._done = done
        self._outcome = Outcome(times=[])

    def deliver(self, output: RequestOutput) -> None:
        if output.token_ids:
            self._outcome.times.append(time.monotonic())
            self._outcome.num_tokens += len(output.token_ids)
        if output.finish_reason is not None and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: RequestFailed) -> None:
        self._outcome.error = str(error)
        if not self._done.done():
            self._done.set_result(None)

    def rebind(self, fingerprint: str, *, is_exact: bool) -> None:
        """Do nothing: tokens are not compared."""

    def stored_at(self, blocks_at: str) -> None:
        """Do nothing: there is no journal."""

    def outcome(self) -> Outcome:
        """Return the whole output."""
        return self._outcome


class Sender(Protocol):
    """Sends the requests of one job."""

    async def send(self, index: int) -> Reply | Receiver:
        """Send a request and wait for the end of its reply."""

    async def close(self) -> None:
        """Disconnect."""


class HttpSender:
    """Opens a connection for each request; replies are streams of events."""

    def __init__(self, job: Job) -> None:
        url = urlsplit(job.target)
        self._host, self._port = url.hostname or "", url.port or 80
        key = os.environ.get("OPENAI_API_KEY", "none")
        self._requests = []
        options = {"return_token_ids": True} if job.return_token_ids else {}
        for request in job.requests:
            body = msgspec.json.encode(
                options
                | {
                    "model": job.model,
                    "prompt": request.prompt,
                    "max_tokens": request.num_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )
            head = (
                f"POST {url.path}/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
                f"Authorization: Bearer {key}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            self._requests.append(head.encode() + body)

    async def send(self, index: int) -> Reply:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        reply = Reply(self._requests[index], done)
        transport, _ = await loop.create_connection(lambda: reply, self._host, self._port)
        try:
            await done
        finally:
            transport.abort()
        return reply

    async def close(self) -> None:
        """Do nothing: no connection stays open."""


class EmbeddedSender:
    """Submits to the core, without HTTP and text."""

    def __init__(self, job: Job, client: AsyncEngineClient) -> None:
        self._client = client
        self._requests = job.requests
        self._params = [
            SamplingParams(max_tokens=item.num_tokens, temperature=0.0, ignore_eos=True)
            for item in job.requests
        ]

    @classmethod
    async def connect(cls, job: Job) -> "EmbeddedSender":
        """Wait until the engine serves."""
        client = AsyncEngineClient(job.target)
        await client.start()
        await client.wait_ready(job.timeout_s)
        return cls(job, client)

    async def send(self, index: int) -> Receiver:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        receiver = Receiver(done)
        self._client.submit_to(receiver, self._requests[index].prompt, self._params[index])
        await done
        return receiver

    async def close(self) -> None:
        await self._client.close()


async def connect(job: Job) -> Sender:
    """Do everything that comes before the first request."""
    if job.target.startswith("http://"):
        return HttpSender(job)
    return await EmbeddedSender.connect(job)


async def send_all(job: Job, sender: Sender, start: float) -> Results:
    """Send each request at its time after `start`, and wait for all ends."""

    async def send(index: int, at_s: float) -> Reply | Receiver | str:
        try:
            async with asyncio.timeout(job.timeout_s + at_s):
                if (wait_s := start + at_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                return await sender.send(index)
        except TimeoutError:
            return f"not at its end after {job.timeout_s:g} s"
        except (OSError, RequestFailed) as error:
            return str(error)

    began_s = time.process_time()
    sent = [send(index, request.at_s) for index, request in enumerate(job.requests)]
    replies = await asyncio.gather(*sent)
    cpu_s = time.process_time() - began_s
    await sender.close()
    outcomes = [Outcome(error=r) if isinstance(r, str) else r.outcome() for r in replies]
    return Results(outcomes, cpu_s)


def main() -> None:
    """Work through the jobs until the input ends."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    gc.disable()  # a collection would delay the pieces of all streams
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        while line := sys.stdin.buffer.readline():
            job = msgspec.json.decode(line, type=Job)
            sender = runner.run(connect(job))
            sys.stdout.buffer.write(READY)
            sys.stdout.buffer.flush()
            start = float(sys.stdin.buffer.readline())
            results = runner.run(send_all(job, sender, start))
            sys.stdout.buffer.write(msgspec.json.encode(results) + b"\n")
            sys.stdout.buffer.flush()
            del job, sender, results
            gc.collect()


if __name__ == "__main__":
    main()

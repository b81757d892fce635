"""Sends raw requests to a real engine with the null model, and checks that it is unharmed.

Every response must be valid HTTP with a declared status, no status is 500, and an error names what
was wrong. Between the requests a canary gets the tokens that it had before, no process has
died, no log line shows an exception, and no process grows beyond its bound.
"""

import asyncio
import contextlib
import json
import math
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory
from tests.fuzz.faults import Fault
from tests.fuzz.requests import Case, Cases

FLAGS = (
    *("--max-model-len", "256", "--max-body-bytes", "100000", "--num-gpu-blocks-override", "300"),
    *("--access-log", "off", "--log-stats-interval-s", "3600"),
)
MAX_GROWTH_MIB: Mapping[Role, int] = {
    Role.API: 64,
    Role.CORE: 32,
    Role.WORKER: 300,  # it keeps 256 MiB of compiled grammars
    Role.SUPERVISOR: 16,
}
"""From the end of the warm-up on."""
NUM_WARM_UP = 2_000
NUM_CLIENTS = 16
ROUND = 500
"""Requests between two looks at the processes."""
_WHOLE_S = 20.0
"""For the responses to requests whose ends the server sees."""
_QUIET_S = 0.1
"""After which no response to other bytes is expected any more."""
_FORBIDDEN = (b"Traceback", b"internal_error", b"Internal Server Error")
_ALLOWED_5XX = (501, 503, 504, 505)
_CANARY = {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, "return_token_ids": True}


class Response(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    is_cut: bool
    """The connection was closed before its end."""


def responses(data: bytes) -> Iterator[Response]:
    """Parse the responses of one connection; ValueError: this is not HTTP."""
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        version, status, *_ = first.split(b" ", 2)
        if not end or version != b"HTTP/1.1" or len(status) != 3:
            raise ValueError(f"no response begins with {head[:80]!r}")
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        number = int(status)
        if number < 200 or number in (204, 304):
            yield Response(number, headers, b"", False)
            continue
        if headers.get(b"transfer-encoding") == b"chunked":
            body, data, is_cut = _dechunked(data)
        else:
            length = int(headers.get(b"content-length", len(data)))
            body, data, is_cut = data[:length], data[length:], len(data) < length
        yield Response(number, headers, body, is_cut)


def _dechunked(data: bytes) -> tuple[bytes, bytes, bool]:
    """Return a body, the data after it, and whether it is cut."""
    body = b""
    while True:
        line, end, rest = data.partition(b"\r\n")
        if not end:
            return body, b"", True
        size = int(line, 16)
        if len(rest) < size + 2:
            return body + rest, b"", True
        body += rest[:size]
        data = rest[size + 2 :]
        if size == 0:
            return body, data, False


class Watch:
    """The processes of an engine, as they were at first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._url = engine.url()
        engine.readiness()
        self._pids = {role: engine.pid(role) for role in MAX_GROWTH_MIB}
        self._tokens = self._canary()
        self._first: dict[Role, float] | None = None
        self.growth: dict[Role, float] = {}
        self._num_read = 0

    def begin(self) -> None:
        """Measure growth from now on."""
        self._first = {role: _resident_mib(pid) for role, pid in self._pids.items()}

    def check(self) -> None:
        """Fault: a process has died or grown, an exception is in the log, or tokens differ."""
        pids = {role: self._engine.pid(role) for role in self._pids}
        if pids != self._pids:
            raise Fault(
                f"a process has died: {self._pids} became {pids}\n{self._engine.log[-3000:]}"
            )
        log = self._engine.log
        news, self._num_read = log[self._num_read :], len(log)
        if "Traceback" in news or "ERROR" in news:
            raise Fault(f"the log has an exception:\n{news[-3000:]}")
        if (tokens := self._canary()) != self._tokens:
            raise Fault(f"the canary has got {tokens} instead of {self._tokens}")
        for role, mib in (self._first or {}).items():
            self.growth[role] = growth = _resident_mib(self._pids[role]) - mib
            if growth > MAX_GROWTH_MIB[role]:
                raise Fault(f"{role} has grown by {growth:.0f} MiB")

    def _canary(self) -> Any:
        request = urllib.request.Request(
            self._url + "/v1/completions",
            json.dumps(_CANARY).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_WHOLE_S) as response:
            return json.load(response)["choices"][0]["token_ids"]


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class HttpFuzz:
    """Sends the cases of one seed to one engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._seed = seed
        self.watch = Watch(engine)
        url = urlsplit(engine.url())
        self._address = str(url.hostname), int(url.port or 0)
        self._cases = Cases(engine.get("/openapi.json"), seed)
        self.statuses: Counter[int] = Counter()
        self.num_requests = 0

    def case(self, number: int) -> Case:
        return self._cases.case(number)

    async def send(self, first: int, count: int) -> None:
        """Send some cases over several connections at once. Fault: the harm that one has done."""
        numbers = iter(range(first, first + count))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(NUM_CLIENTS, count)):
                group.create_task(self._send_some(numbers))

    async def _send_some(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self.send_one(number)

    async def send_one(self, number: int) -> bytes:
        """Send one case, check the responses, and return them."""
        case = self._cases.case(number)
        received = await self._exchange(case)
        self.num_requests += 1
        try:
            self._check(case, received)
        except (ValueError, KeyError, TypeError) as problem:
            raise Fault(self._describe(number, case, received, str(problem))) from problem
        return received

    async def _exchange(self, case: Case) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address, limit=2**20)
        received = b""
        try:
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
                if len(case.pieces) > 1:
                    await asyncio.sleep(0.001)
            if case.is_left:
                writer.transport.abort()
                return b""
            wait_s = _WHOLE_S if case.is_whole else _QUIET_S
            while piece := await asyncio.wait_for(reader.read(2**16), wait_s):
                received += piece
        except TimeoutError:
            pass
        except (ConnectionResetError, BrokenPipeError):
            pass  # it may close before it has read all: the response is lost with the rest
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return received

    def _check(self, case: Case, received: bytes) -> None:
        """Raise ValueError for a response that must not come."""
        found = list(responses(received)) if case.is_whole else _readable(received)
        # The response to HEAD has a length and no body.
        has_bodies = case.is_whole or not any(b"HEAD" in piece for piece in case.pieces)
        for response in found:
            self.statuses[response.status] += 1
            if response.status >= 500 and response.status not in _ALLOWED_5XX:
                raise ValueError(f"status {response.status}")
            if any(text in response.body for text in _FORBIDDEN):
                raise ValueError("an internal error")
            if response.status >= 400 and has_bodies and response.body and not response.is_cut:
                message = json.loads(response.body)["error"]["message"]
                if not isinstance(message, str) or not message:
                    raise ValueError("an error without a message")
        if case.is_whole and not case.is_left and (not found or found[-1].is_cut):
            raise ValueError("no whole response")

    def _describe(self, number: int, case: Case, received: bytes, problem: str) -> str:
        return (
            f"http: {problem}\nseed {self._seed}, request {number}: {case.pieces!r}\n"
            f"received {received[:2000]!r}\n"
            f"python -m tests.fuzz http --seed {self._seed} --first {number} --count 1 --show"
        )


def _readable(received: bytes) -> list[Response]:
    """Return the responses to bytes that are not HTTP; a HEAD may be among the requests."""
    found: list[Response] = []
    with contextlib.suppress(ValueError, IndexError):
        for response in responses(received):
            found.append(response)
    if received and not found:
        raise ValueError("this is not HTTP")
    return found


def run(
    seed: int, first: int, count: int, *, limit_s: float = math.inf, show: bool = False
) -> HttpFuzz:
    """Send the requests `first` to `first + count - 1` of a seed to an engine of its own.

    After `limit_s` the rest is left out.
    """
    with EngineFactory() as start:
        fuzz = HttpFuzz(start(*FLAGS), seed)
        began = time.monotonic()
        for place in range(first, first + count, ROUND):
            size = min(ROUND, first + count - place)
            try:
                asyncio.run(fuzz.send(place, size))
            except BaseExceptionGroup as faults:
                raise _first_of(faults) from None
            try:
                fuzz.watch.check()
            except Fault as fault:
                again = f"--seed {seed} --first {place} --count {size}"
                raise Fault(f"{fault}\npython -m tests.fuzz http {again}") from fault
            if place - first < NUM_WARM_UP:
                fuzz.watch.begin()
            if time.monotonic() - began > limit_s:
                break
        seconds = time.monotonic() - began
        if show:
            for number in range(first, first + count):
                print(number, fuzz.case(number).pieces)
                print(asyncio.run(fuzz.send_one(number)))
    counts = ", ".join(f"{status}: {number:,}" for status, number in sorted(fuzz.statuses.items()))
    sizes = ", ".join(f"{role} {mib:+.0f}" for role, mib in fuzz.watch.growth.items())
    print(f"{fuzz.num_requests:,} connections in {seconds:.0f} s; responses {counts}")
    print(f"growth in MiB: {sizes or 'not measured'}; no process has died")
    return fuzz


def _first_of(faults: BaseException) -> BaseException:
    while isinstance(faults, BaseExceptionGroup):
        faults = faults.exceptions[0]
    return faults

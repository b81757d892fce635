"""Soak the journal with streams that their clients abandon, and look for memory that stays.

    python -m tests.soak journal --requests 100000

The engine has the null model and keeps requests without a client for a second. Every client chooses
an id of the greatest length. It leaves its stream after the first event, and some come back: with
the id of another request, with a position beyond the end, with another body, or as they should.
The exit status is 1 if the resident memory of the API grows by more than 1 MiB per 10,000 requests
over the second half, if an answer has a status that the protocol does not name, or if a request is
kept at the end.
"""

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence

from protocol.lifecycle import Role
from scripts.testing import EngineFactory, RunningEngine, eventually
from tests.soak.report import MAX_SLOPE_MIB, theil_sen

NUM_REQUESTS = 100_000
_REQUESTS_PER_S = 85.0
"""A higher rate keeps more requests at the same time, which need memory."""
_ID_LENGTH = 128
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-"
_MAX_TOKENS = 40
_WAYS = ("leave", "leave", "leave", "stranger", "beyond", "conflict", "continue")
_STATUSES = {
    "leave": {200},
    "stranger": {400},
    "beyond": {400},
    "conflict": {409},
    "continue": {200},
}
"""The answers to each way of coming back; 429 and 503 are possible in all."""
_REFUSED = {429, 503}
_TIMEOUT_S = 30.0
_SAMPLES = 50
_MIB = 2**20


class Abuse:
    """Clients that leave their streams, and some of which come back wrongly."""

    def __init__(self, url: str, seed: int) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._rng = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def one(self) -> None:
        """Begin a stream, leave it, and perhaps come back."""
        request_id, other = self._new_id(), self._new_id()
        way = self._rng.choice(_WAYS)
        prompt = [self._rng.randrange(5, 90) for _ in range(8)]
        body = {"prompt": prompt, "max_tokens": _MAX_TOKENS, "stream": True, "ignore_eos": True}
        status, _ = await self._post(body, request_id)
        self._count("leave", status)
        if status != 200 or way == "leave":
            return
        position = {"stranger": f"{other}.1", "beyond": f"{request_id}.{10**9}"}
        if way == "conflict":
            body["max_tokens"] = _MAX_TOKENS + 1
        status, text = await self._post(body, request_id, position.get(way, f"{request_id}.1"))
        self._count(way, status, text)

    def _new_id(self) -> str:
        return "".join(self._rng.choices(_ID_LETTERS, k=_ID_LENGTH))

    def _count(self, way: str, status: int, text: str = "") -> None:
        self.answers[f"{way} {status}"] += 1
        if status not in _STATUSES[way] | _REFUSED and len(self.unexpected) < 10:
            self.unexpected.append(f"{way}: {status} {text[-300:]}")

    async def _post(self, body: object, request_id: str, last_event: str = "") -> tuple[int, str]:
        """Send a request, and leave with the first event of the answer."""
        data = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: soak", f"X-Request-Id: {request_id}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"Last-Event-ID: {last_event}"] if last_event else []
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode() + data)
                head = await reader.readuntil(b"\r\n\r\n")
                answer = await reader.read(2**12)
            finally:
                writer.transport.abort()
        return int(head.split()[1]), answer.decode(errors="replace")


async def _run(abuse: Abuse, num_requests: int, concurrency: int, rate: float) -> None:
    """Send requests at this rate per second; 0: each client begins the next one at once."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    numbers = iter(range(num_requests))

    async def client() -> None:
        for number in numbers:
            if rate:
                await asyncio.sleep(began + number / rate - loop.time())
            await abuse.one()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())


def _resident(engine: RunningEngine) -> float:
    """Return the resident bytes of the API."""
    with open(f"/proc/{engine.pid(Role.API)}/smaps_rollup") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))


def _num_kept(engine: RunningEngine) -> int:
    """Return the number of requests whose clients may come back."""
    with urllib.request.urlopen(f"{engine.url()}/metrics", timeout=_TIMEOUT_S) as answer:
        found = re.search(r"^troika_sessions\{.*\} (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns 1 if memory grows, or if an answer is wrong."""
    parser = argparse.ArgumentParser(
        "python -m tests.soak journal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--rate", type=float, default=_REQUESTS_PER_S, help="per second; 0: no bound"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-journal-") as directory:
        flags = ("--journal-dir", directory, "--resume-window-s", "1", "--null-step-ms", "1")
        with EngineFactory() as start_engine:
            return _soak(start_engine(*flags, model="null"), arguments)


def _soak(engine: RunningEngine, arguments: argparse.Namespace) -> int:
    engine.readiness()
    abuse = Abuse(engine.url(), arguments.seed)
    part = max(1, arguments.requests // _SAMPLES)
    started = time.monotonic()
    points: list[tuple[float, float]] = []
    pid = engine.pid(Role.API)
    for end in range(part, arguments.requests + 1, part):
        asyncio.run(_run(abuse, part, arguments.concurrency, arguments.rate))
        points.append((float(end), _resident(engine)))
        print(f"{end} requests, {time.monotonic() - started:.0f} s", end=", ")
        print(f"{points[-1][1] / _MIB:.1f} MiB, {_num_kept(engine)} kept", flush=True)
    broken = list(abuse.unexpected)
    if engine.pid(Role.API) != pid:
        broken.append("the API was replaced")
    eventually(lambda: not _num_kept(engine), "no request is kept", 60.0)
    late = points[len(points) // 2 :]
    slope = theil_sen([x for x, _ in late], [y for _, y in late]) * 10_000 / _MIB
    answers = ", ".join(f"{name}: {number}" for name, number in sorted(abuse.answers.items()))
    print(f"{answers}; at rest {_resident(engine) / _MIB:.1f} MiB")
    print(f"{slope:.3f} MiB per 10,000 requests over the second half")
    if slope > MAX_SLOPE_MIB:
        broken.append("the memory of the API grows")
    print("\n".join(broken) or "all bounds hold")
    return 1 if broken else 0

"""Measures what is answered under ten times the peak load: `python -m tests.system.goodput --help`.

The engine has the null model, with steps long enough that its capacity does not depend on the
machine. First as many clients as it serves at once send one request after the other, which gives
its peak. Then requests arrive at a multiple of that rate, whether or not earlier ones were
answered. The numbers answered in full per second are printed, with the latency of answers and of
refusals.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from typing import NamedTuple
from urllib.parse import urlsplit

from scripts.testing import EngineFactory

MAX_NUM_SEQS = 32
NUM_TOKENS = 32
_WARM_UP_S = 3.0
_TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """The answer to one request."""

    at: float
    took_s: float
    status: int
    is_whole: bool


class Load:
    """Sends requests to one engine, and records their answers."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = (str(address.hostname), address.port)
        body = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self.answers: list[Answer] = []
        self.num_broken = 0

    async def ask(self) -> None:
        """Send one request on its own connection."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._address)
                writer.write(self._request)
                data = await reader.read(-1)
                writer.close()
        except (OSError, TimeoutError):
            self.num_broken += 1
            return
        now = time.monotonic()
        status = int(data.split(b" ", 2)[1])
        is_whole = b'"completion_tokens":%d,' % NUM_TOKENS in data
        self.answers.append(Answer(now, now - began, status, is_whole))

    async def closed(self, num_clients: int, seconds: float) -> None:
        """Each client sends its next request as soon as the last one was answered."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.ask()

        await asyncio.gather(*[client() for _ in range(num_clients)])

    async def open(self, rate: float, seconds: float) -> None:
        """Send requests at random times, at this average rate per second."""
        rng = random.Random(1)
        asking: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        end = due + seconds
        while due < end:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self.ask())
            asking.add(task)
            task.add_done_callback(asking.discard)
        await asyncio.gather(*asking)

    def goodput(self, since: float, until: float) -> float:
        """Complete answers per second."""
        return sum(a.is_whole and since <= a.at < until for a in self.answers) / (until - since)


class Outcome(NamedTuple):
    """Figures of one measurement; rates per second, times in seconds."""

    peak: float
    offered: float
    goodput: float
    answered_p99_s: float
    refused_p50_s: float
    refused_p99_s: float
    num_refused: int
    num_other: int
    """Requests that were neither answered in full nor refused with 429."""


async def measure(url: str, factor: float, seconds: float) -> Outcome:
    """Measure the peak, and then a load of `factor` times that."""
    load = Load(url)
    began = time.monotonic()
    await load.closed(2 * MAX_NUM_SEQS, _WARM_UP_S + seconds / 2)
    peak = load.goodput(began + _WARM_UP_S, began + _WARM_UP_S + seconds / 2)
    load = Load(url)
    began = time.monotonic()
    await load.open(factor * peak, seconds)
    goodput = load.goodput(began + _WARM_UP_S, began + seconds)
    whole = [a.took_s for a in load.answers if a.is_whole]
    refused = [a.took_s for a in load.answers if a.status == 429]
    num_other = load.num_broken + len(load.answers) - len(whole) - len(refused)
    offered = (len(load.answers) + load.num_broken) / seconds
    cuts = statistics.quantiles(refused, n=100, method="inclusive")
    whole_p99 = statistics.quantiles(whole, n=100, method="inclusive")[98]
    return Outcome(peak, offered, goodput, whole_p99, cuts[49], cuts[98], len(refused), num_other)


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser("tests.system.goodput", description=__doc__)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=25.0)
    arguments = parser.parse_args()
    with EngineFactory() as factory:
        engine = factory(
            *("--null-step-ms", str(arguments.step_ms), "--max-num-seqs", str(MAX_NUM_SEQS)),
            *("--max-num-waiting", str(MAX_NUM_SEQS * 9 // 8)),  # one client gets 8/9 of it
        )
        engine.ready()
        found = asyncio.run(measure(engine.url(), arguments.factor, arguments.seconds))
    print(
        f"peak {found.peak:.1f} requests/s; {found.offered:.0f}/s offered for"
        f" {arguments.seconds:.0f} s: {found.goodput:.1f}/s answered in full"
        f" ({found.goodput / found.peak:.0%}), 99th percentile {found.answered_p99_s:.2f} s;"
        f" {found.num_refused} refused within {found.refused_p50_s * 1e3:.0f} ms (median),"
        f" {found.refused_p99_s * 1e3:.0f} ms (99th percentile); {found.num_other} others;"
        f" load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()

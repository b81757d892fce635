"""The cost of clients that do not read for other clients: `python -m tests.system.slow_readers`.

The engine has the null model. First some streams run alone; then beside others whose clients
have closed their TCP windows. Prints the time between two tokens of the readers, with and without
the others, the memory that each of the others costs, and when they were dropped.
"""

import argparse
import os
import selectors
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.streams import Stream, metric

BODY = {"prompt": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True, "stream": True}
STALLED_RECEIVE_BUFFER = 2048
_DROPPED_TIMEOUT_S = 120.0


class Outcome(NamedTuple):
    """Figures of one measurement; times in seconds."""

    alone_p99_s: float
    beside_p99_s: float
    bytes_per_stalled: float
    """Peak growth of the API process per stalled stream, the open request included."""
    num_dropped: float
    dropped_after_s: float
    """From the opening of the last stalled stream until the last was dropped."""
    kv_cache_usage: float
    """Usage after all streams have ended."""

    @property
    def ratio(self) -> float:
        """Time between tokens beside stalled streams, as a multiple of the time without them."""
        return self.beside_p99_s / self.alone_p99_s


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gaps_s(url: str, num_streams: int, num_tokens: int) -> list[float]:
    """Read streams in parallel and return the times between two events of each."""
    found: list[float] = []
    last: dict[int, float] = {}
    selector = selectors.DefaultSelector()
    for number in range(num_streams):
        stream = Stream(url, {**BODY, "max_tokens": num_tokens})
        stream.socket.setblocking(False)
        selector.register(stream.socket, selectors.EVENT_READ, (number, stream))
    num_open = num_streams
    while num_open:
        ready = selector.select(30.0)
        assert ready, "the streams stand still"
        for key, _ in ready:
            number, stream = key.data
            data = stream.socket.recv(65536)
            assert data, "a stream that is read was broken"
            now = time.monotonic()
            num_events = data.count(b"data: {")
            if num_events and number in last:
                found += [now - last[number], *[0.0] * (num_events - 1)]
            if num_events:
                last[number] = now
            if b"data: [DONE]" in data:
                selector.unregister(stream.socket)
                stream.close()
                num_open -= 1
    selector.close()
    return found


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def measure(engine: Engine, num_stalled: int, num_normal: int, num_tokens: int) -> Outcome:
    """Measure readers alone, and beside clients that do not read."""
    url, api = engine.url(), engine.pid(Role.API)
    alone = p99(gaps_s(url, num_normal, num_tokens))
    before, num_before = rss_bytes(api), metric(engine, "slow_readers_dropped")
    stalled = [Stream(url, BODY, receive_buffer=STALLED_RECEIVE_BUFFER) for _ in range(num_stalled)]
    opened = time.monotonic()
    beside = p99(gaps_s(url, num_normal, num_tokens))
    most = rss_bytes(api)

    def are_dropped() -> bool:
        nonlocal most
        most = max(most, rss_bytes(api))
        return metric(engine, "slow_readers_dropped") - num_before >= num_stalled

    eventually(are_dropped, "all that do not read are dropped", _DROPPED_TIMEOUT_S)
    dropped_after_s = time.monotonic() - opened
    num_dropped = metric(engine, "slow_readers_dropped") - num_before
    eventually(lambda: metric(engine, "num_requests_running") == 0, "they are aborted")
    usage = metric(engine, "kv_cache_usage_perc")
    for stream in stalled:
        stream.close()
    bytes_each = (most - before) / max(1, num_stalled)
    return Outcome(alone, beside, bytes_each, num_dropped, dropped_after_s, usage)


def flags(step_ms: float, timeout_s: float) -> list[str]:
    """Return the flags of an engine that runs all streams at once."""
    return [
        *("--null-step-ms", str(step_ms), "--slow-reader-timeout-s", str(timeout_s)),
        *("--max-num-seqs", "256", "--max-num-batched-tokens", "4096"),
        *("--num-gpu-blocks-override", "200000"),
    ]


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser("tests.system.slow_readers", description=__doc__)
    parser.add_argument("--stalled", type=int, default=200)
    parser.add_argument("--normal", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    arguments = parser.parse_args()
    with EngineFactory() as factory:
        engine = factory(*flags(arguments.step_ms, arguments.timeout_s))
        engine.ready()
        found = measure(engine, arguments.stalled, arguments.normal, arguments.tokens)
    print(
        f"{arguments.stalled} stalled, {arguments.normal} normal, steps of {arguments.step_ms} ms:"
        f" p99 between tokens {found.alone_p99_s * 1e3:.1f} ms alone,"
        f" {found.beside_p99_s * 1e3:.1f} ms beside ({found.ratio:.2f}x),"
        f" {found.bytes_per_stalled / 1024:.0f} KiB per stalled stream,"
        f" {found.num_dropped:.0f} dropped within {found.dropped_after_s:.1f} s,"
        f" KV cache in use afterwards {found.kv_cache_usage}, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()

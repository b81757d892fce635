"""A host that opens and closes engines repeatedly: `python -m tests.system.embedding_cycles`.

It has its own event loop, signal handlers, threads, logging and directory, and checks after every
cycle that none of them was touched and nothing has leaked. It prints its findings as
JSON, and ends with status 1 if they break a promise of docs/embedding.md.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from protocol.client.request_stream import RequestStream
from protocol.client.sync_client import EngineClient
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.launch import EngineProcesses
from protocol.sampling import SamplingParams
from tests.chaos import processes
from tests.soak.report import theil_sen
from tests.system import host_state

CLOSE_LIMIT_S = 5.0
MAX_SLOPE_KIB = 10.0
"""Bound for the growth of resident memory per cycle."""
NUM_WARM_UP = 5
"""At least one cycle of each kind."""
CONFIG = configure(model="null", null_step_ms=2.0, log_level="error")
WITH_STANDBY = configure(model="null", null_step_ms=2.0, log_level="error", standby_workers=1)
_TIMEOUT_S = 60.0
_MARK = "_TROIKA_CYCLES"


class Cycles:
    """All cycles of one host, within its running loop."""

    def __init__(self) -> None:
        self.close_s: list[float] = []
        self.problems: list[str] = []
        self._victims = itertools.cycle((Role.WORKER, Role.SUPERVISOR, Role.CORE))
        self.kinds: list[Callable[[], Any]] = [
            self.serve_synchronously,
            self.serve_in_the_loop,
            self.close_under_streams,
            self.close_after_a_death,
            self.close_while_starting,
        ]

    async def run(self, number: int) -> None:
        """Run one cycle: all kinds in turn, half of them off the main thread."""
        kind = self.kinds[number % len(self.kinds)]
        loop_before, before = host_state.loop_settings(), host_state.settings()
        if asyncio.iscoroutinefunction(kind):
            await kind()
        elif number % 2:
            thread = threading.Thread(target=kind)
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0.005)
            thread.join()
        else:
            kind()
        await asyncio.sleep(0)
        found = host_state.changes(before, host_state.settings())
        found += host_state.changes(loop_before, host_state.loop_settings())
        self.problems += [f"cycle {number} ({kind.__name__}): {text}" for text in found]

    def close(self, engine: EngineProcesses | EngineClient) -> None:
        """Close an engine or a client, and record the time it takes."""
        began = time.monotonic()
        engine.close()
        self.close_s.append(time.monotonic() - began)

    def serve_synchronously(self) -> None:
        """Run one stream on an engine and close both."""
        engine = EngineProcesses.start(CONFIG, timeout_s=_TIMEOUT_S)
        client = EngineClient(engine.address)
        client.wait_ready(_TIMEOUT_S)
        output = client.submit([5, 6, 7], SamplingParams(max_tokens=8)).result(_TIMEOUT_S)
        assert len(output.token_ids) == 8
        self.close(client)
        self.close(engine)
        self.close(client)
        self.close(engine)

    async def serve_in_the_loop(self) -> None:
        """Do the same in the host's own loop, which is blocked while the engine is closed."""
        engine = await asyncio.to_thread(EngineProcesses.start, CONFIG, timeout_s=_TIMEOUT_S)
        async with AsyncEngineClient(engine.address) as client:
            await client.wait_ready(_TIMEOUT_S)
            async for _ in client.submit([5, 6, 7], SamplingParams(max_tokens=8)):
                pass
        self.close(engine)

    async def close_under_streams(self) -> None:
        """Close under open streams: their readers get an error, and none keeps waiting."""
        engine = await asyncio.to_thread(EngineProcesses.start, CONFIG, timeout_s=_TIMEOUT_S)
        client = AsyncEngineClient(engine.address)
        await client.start()
        await client.wait_ready(_TIMEOUT_S)
        params = SamplingParams(max_tokens=4000)
        streams = [client.submit([5, 6, number], params) for number in range(8)]
        began = asyncio.Semaphore(0)
        readers = [asyncio.create_task(_read_on(stream, began)) for stream in streams]
        for _ in readers:
            await began.acquire()
        self.close(engine)
        await client.close()
        ends = await asyncio.wait_for(asyncio.gather(*readers), _TIMEOUT_S)
        assert all(ends), "a stream has ended as if it were complete"

    def close_after_a_death(self) -> None:
        """Close right after a process was killed; the roles take turns."""
        engine = EngineProcesses.start(WITH_STANDBY, timeout_s=_TIMEOUT_S)
        client = EngineClient(engine.address)
        client.wait_ready(_TIMEOUT_S)
        stream = client.submit([5, 6, 7], SamplingParams(max_tokens=4000))
        next(stream)
        reply = engine.status()
        assert reply is not None
        role = next(self._victims)
        pid = next(row.pid for row in reply.processes if row.role is role)
        assert pid is not None
        processes.kill(pid)
        self.close(engine)
        self.close(client)

    def close_while_starting(self) -> None:
        """Close at a random moment of the start."""
        engine = EngineProcesses(WITH_STANDBY)
        time.sleep(random.Random(len(self.close_s)).uniform(0.0, 0.6))
        self.close(engine)


async def _read_on(stream: RequestStream, began: asyncio.Semaphore) -> bool:
    """Read a stream; return whether it failed. `began` is released at the first token."""
    try:
        async for output in stream:
            if output.first_index == 0:
                began.release()
            if output.finish_reason is not None:
                return False
    except RequestFailed:
        return True
    return True


def _no_signal(number: int, frame: object) -> None:
    """A signal handler of the host."""


def _no_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A handler that must not be called."""
    print(f"the loop's exception handler was called: {context}", file=sys.stderr)


async def main(num_cycles: int) -> dict[str, Any]:
    """Run cycles; returns the figures."""
    asyncio.get_running_loop().set_exception_handler(_no_exception)
    cycles = Cycles()
    rss: list[float] = []
    held: dict[str, list[str]] = {}
    for number in range(NUM_WARM_UP + num_cycles):
        await cycles.run(number)
        rss.append(host_state.resident_bytes() / 1024)
        if number == NUM_WARM_UP - 1:
            held = await _quiet_resources(None)
    after = await _quiet_resources(held)
    growth = theil_sen([float(n) for n in range(num_cycles)], rss[NUM_WARM_UP:])
    leaks = host_state.changes(held, after)
    strays = sorted(processes.living_with(_MARK, os.environ[_MARK]))
    problems = cycles.problems + leaks + [f"process {pid} is left" for pid in strays]
    slowest_s = max(cycles.close_s)
    if slowest_s > CLOSE_LIMIT_S:
        problems.append(f"a close took {slowest_s:.1f} s")
    if num_cycles >= 50 and growth is not None and growth > MAX_SLOPE_KIB:
        problems.append(f"resident memory grows by {growth:.1f} KiB per cycle")
    return {
        "cycles": num_cycles,
        "closes": len(cycles.close_s),
        "slowest_close_s": round(slowest_s, 3),
        "rss_kib_per_cycle": None if growth is None else round(growth, 2),
        "rss_mib": [round(rss[NUM_WARM_UP - 1] / 1024, 1), round(rss[-1] / 1024, 1)],
        "held": {kind: len(names) for kind, names in after.items()},
        "problems": problems,
    }


async def _quiet_resources(wanted: dict[str, list[str]] | None) -> dict[str, list[str]]:
    """Return the held resources, once orphans of a killed supervisor have had 2 s to leave."""
    deadline = time.monotonic() + 2.0
    while True:
        held = host_state.resources()
        strays = processes.living_with(_MARK, os.environ[_MARK])
        if (not strays and wanted in (None, held)) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.system.embedding_cycles")
    parser.add_argument("--cycles", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="host-") as own:
        os.environ |= {"TMPDIR": own, "XDG_RUNTIME_DIR": own, _MARK: f"{os.getpid()}"}
        tempfile.tempdir = own
        signal.signal(signal.SIGUSR1, _no_signal)
        signal.signal(signal.SIGTERM, _no_signal)
        logging.basicConfig(level=logging.WARNING)
        os.umask(0o027)
        figures = asyncio.run(main(arguments.cycles))
    print(json.dumps(figures, indent=2))
    sys.exit(1 if figures["problems"] else 0)

"""Kills of each process of an engine with replicas, ranks, prefill replicas and block stores."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from protocol.process.run_dir import replica_dir
from protocol.process.status import StatusLink
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory, eventually
from tests.system.null_load import null_tokens
from tests.system.streams import Stream

NUM_LANES = 6
NUM_TOKENS = 1500
STREAM_TIMEOUT_S = 300.0
FLAGS = (
    *("--data-parallel-size", "3", "--prefill-replicas", "1", "--tensor-parallel-size", "2"),
    *("--kv-offload-bytes", "64000000", "--null-step-ms", "4", "--null-token-ms", "0.3"),
)
Victim = tuple[int | None, Role, int]
"""Replica, or None for the outer engine; role and rank."""


def prompt_of(lane: int) -> list[int]:
    """Return a prompt that is long enough for a prefill replica."""
    rng = random.Random(lane)
    return [rng.randrange(5, 400) for _ in range(300)]


def read(url: str, lane: int, number: int) -> list[int]:
    """Read one request to its end, over as many connections as it takes."""
    body = {"prompt": prompt_of(lane), "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}
    body |= {"stream": True, "return_token_ids": True, "cache_salt": f"{lane}.{number}"}
    headers = {"X-Request-Id": f"lane-{lane}.{number}"}
    found: list[int] = []
    deadline = time.monotonic() + STREAM_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the API was killed
            stream = Stream(url, body, headers=headers, timeout_s=STREAM_TIMEOUT_S)
            if stream.read_head() == 503:
                stream.close()
                continue
            assert stream.status == 200, stream.body()
            for event in stream.events():
                if event.data == "[DONE]":
                    return found
                for choice in json.loads(event.data)["choices"]:
                    found += choice["token_ids"]
                headers["Last-Event-ID"] = event.id or headers.get("Last-Event-ID", "")
    raise TimeoutError(f"{headers} has {len(found)} tokens")


def asked(run_dir: str) -> list[ProcessStatus] | None:
    """Return the processes of a supervisor; None: some are not ready."""
    with contextlib.closing(StatusLink(run_dir)) as link:
        reply: StatusReply | None = link.query(TIMEOUT_S)
    if reply is None or not reply.ready:
        return None
    rows = reply.processes
    are_ready = all(row.state is ProcessState.READY and row.pid is not None for row in rows)
    return rows if are_ready else None


def processes(engine: Engine) -> dict[Victim, int] | None:
    """Return the pids of all processes but the outer supervisor; None: some are not ready."""
    outer = asked(engine.run_dir)
    if outer is None:
        return None
    found: dict[Victim, int] = {}
    for row in outer:
        rows = [(None, row)] if row.role is not Role.SUPERVISOR else []
        if row.role is Role.REPLICA:
            inner = asked(replica_dir(engine.run_dir, row.rank))
            if inner is None:
                return None
            rows += [(row.rank, one) for one in inner if one.role is not Role.SUPERVISOR]
        found |= {(replica, one.role, one.rank): one.pid or 0 for replica, one in rows}
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_are_exact_while_each_process_is_killed_in_turn(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    stores = ("--kv-offload-dir", str(tmp_path / "kv"), "--journal-dir", str(tmp_path / "journal"))
    engine = start_engine(*FLAGS, *stores, timeout_s=LOAD_TIMEOUT_S)
    url, has_finished = engine.url(), threading.Event()

    def follow(lane: int) -> int:
        expected, number = null_tokens(prompt_of(lane), NUM_TOKENS), 0
        while not has_finished.is_set():
            assert read(url, lane, number) == expected
            number += 1
        return number

    def is_replaced(victim: Victim, pid: int) -> bool:
        found = processes(engine)
        return found is not None and found[victim] != pid

    def all_ready() -> dict[Victim, int]:
        return eventually(lambda: processes(engine), "all processes are ready", LOAD_TIMEOUT_S)

    victims = list(all_ready())
    assert len(victims) == 22
    random.Random(3).shuffle(victims)
    with ThreadPoolExecutor(NUM_LANES) as pool:
        lanes = [pool.submit(follow, lane) for lane in range(NUM_LANES)]
        try:
            for victim in victims:
                pid = all_ready()[victim]
                os.kill(pid, signal.SIGKILL)
                replaced = partial(is_replaced, victim, pid)
                eventually(replaced, f"{victim} is replaced", LOAD_TIMEOUT_S)
        finally:
            has_finished.set()
        assert all(lane.result() for lane in lanes)

"""Requests whose KV blocks are kept outside of the workers, and the files of these blocks."""

import asyncio
import os
import signal
from pathlib import Path

from protocol.client import EngineClient, ReplicatedClient
from protocol.client.request_stream import RequestStream
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory, eventually
from tests.system.kills import begin

NUM_PROMPTS = 4
PROMPT_LEN = 320
"""Twenty blocks; more than the least that is read."""
PROMPTS = [
    [7 + (13 * place + number * place * place) % 900 for place in range(PROMPT_LEN)]
    for number in range(NUM_PROMPTS)
]
PARAMS = [
    SamplingParams(max_tokens=200, temperature=0.9, seed=1 + number, ignore_eos=True)
    for number in range(NUM_PROMPTS)
]
MEMORY = ("--kv-offload-bytes", str(2**28))
Tokens = list[list[int]]


def start(start_engine: EngineFactory, *flags: str, model: str = "demo") -> Engine:
    few = ("--num-gpu-blocks-override", "400", "--check-invariants")
    flags = ("--no-api", "--num-threads", "1", *few, *flags)
    return start_engine(*flags, model=model, timeout_s=LOAD_TIMEOUT_S)


def stop(engine: Engine) -> None:
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0


def tokens_of(client: EngineClient) -> Tokens:
    streams = [client.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
    return [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams]


def tokens_over_kill(
    engine: Engine, client: EngineClient, role: Role, rank: int
) -> tuple[Tokens, bool]:
    """Return the tokens of all requests, and whether all were open when the process died."""
    victim = engine.row(role, rank)
    assert victim.pid is not None
    streams = begin(client, list(zip(PROMPTS, PARAMS, strict=True)))
    os.kill(victim.pid, signal.SIGKILL)
    was_amid = client._client.num_open_requests == NUM_PROMPTS
    tokens = [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams]
    eventually(lambda: engine.row(role, rank).epoch > victim.epoch, f"{role} is replaced")
    return tokens, was_amid


def num_loaded(client: EngineClient) -> int:
    status = client.status
    return 0 if status is None else status.stats.kv_tokens_loaded


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and len(path.name) >= 64]


def wait_for_files(directory: Path, least: int) -> None:
    def are_there() -> bool:
        return len(files_in(directory)) >= least

    eventually(are_there, f"{least} blocks in {directory}")


STAGES = ("--pipeline-parallel-size", "2")


async def begin_and_hold(
    client: ReplicatedClient, number: int
) -> tuple[list[RequestStream], Tokens]:
    """Begin all requests at two replicas in turn, and pause one of these amid its half.

    Returns the streams, and the first tokens of each. The half has time for what the test does.
    """
    held = client.clients[number]
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        while True:
            streams = [client.submit(*request) for request in zip(PROMPTS, PARAMS, strict=True)]
            first = [(await anext(stream)).token_ids for stream in streams]
            assert await held.pause()
            if held.num_open_requests == NUM_PROMPTS // 2:
                return streams, first
            await held.resume()  # some have ended before the pause
            for stream in streams:
                await tokens_left(stream)


async def tokens_left(stream: RequestStream) -> list[int]:
    return [token_id async for output in stream for token_id in output.token_ids]


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

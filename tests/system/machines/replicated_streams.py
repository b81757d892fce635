"""Streams of a client with several replicas of the null model, whose tokens are known."""

import asyncio
import time
from collections.abc import Callable

from protocol.client import ReplicatedClient
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S
from tests.system.null_load import null_tokens

NUM_STREAMS = 40
PARAMS = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
Tokens = list[list[int]]


def prompt_of(number: int) -> list[int]:
    return [number + 5, 2, 3]


EXPECTED = [null_tokens(prompt_of(number), PARAMS.max_tokens) for number in range(NUM_STREAMS)]


async def stream(
    client: ReplicatedClient, number: int, tokens: list[int], params: SamplingParams = PARAMS
) -> float:
    """Read one request to its end; return the longest pause."""
    longest, last = 0.0, time.monotonic()
    async for output in client.submit(prompt_of(number), params):
        assert output.first_index == len(tokens)
        tokens.extend(output.token_ids)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def all_streams(
    client: ReplicatedClient, found: Tokens, params: SamplingParams = PARAMS
) -> list[float]:
    works = [stream(client, number, tokens, params) for number, tokens in enumerate(found)]
    return await asyncio.gather(*works)


async def until_serving(client: ReplicatedClient, timeout_s: float = TIMEOUT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not all(each.serves for each in client.clients):
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def until_half(found: Tokens) -> None:
    await until(lambda: min(map(len, found)) >= 30)


async def half_read(client: ReplicatedClient) -> tuple[Tokens, asyncio.Task[list[float]], int]:
    """Begin all streams of two replicas; return them half read, and how many the second one has."""
    await until_serving(client)
    found: Tokens = [[] for _ in range(NUM_STREAMS)]
    streams = asyncio.create_task(all_streams(client, found))
    await until_half(found)
    num_there = client.clients[1].num_open_requests
    assert num_there > NUM_STREAMS / 3
    return found, streams, num_there

"""A client of several replicas, whose cores do what a test asks for."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from protocol.api_core import AddRequest, ControlDone, PauseMode, RequestOutput
from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.client.prefix_index import PrefixIndex
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import FACTS, READY, TIMEOUT_S, FakeCore

PARAMS = SamplingParams(max_tokens=8, seed=1)
Cores = list[FakeCore]


def play(cores: Cores, act: Callable[[ReplicatedClient], Awaitable[None]], **options: Any) -> None:
    """Run a test with a connected client; the cores answer meanwhile."""

    async def main() -> None:
        addresses = [core.address for core in cores]
        async with ReplicatedClient(addresses, ReplicatedOptions(**options)) as client:
            task = asyncio.create_task(pump(cores))
            await until(lambda: all(each.serves for each in client.clients))
            await act(client)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


async def pump(cores: Cores) -> None:
    """Let the cores answer and report until the task is cancelled."""
    while True:
        for core in cores:
            core.pump()
            core.report()
        await asyncio.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def ticks(client: ReplicatedClient) -> None:
    """Wait until the client has looked twice at what its replicas hold."""
    for _ in range(2):
        timer = client._timer
        await until(lambda timer=timer: client._timer is not timer)


def answer(core: FakeCore, *, ok: bool, error: str = "") -> None:
    core.send(ControlDone(core.controls[-1].number, ok, PauseMode.RUNNING, error))


async def known_index(client: ReplicatedClient) -> PrefixIndex:
    """Return the index once the client has seen the cores' epochs."""
    await until(lambda: all(each._cache_epoch for each in client._replicas))
    return client._placement.index


def with_facts(core: FakeCore, **facts: Any) -> str:
    """Change the facts of a core; returns their fingerprint."""
    core.status = msgspec.structs.replace(READY, facts=msgspec.structs.replace(FACTS, **facts))
    assert core.status.facts is not None
    return core.status.facts.fingerprint


def begun(fingerprint: str, *output_token_ids: int) -> AddRequest:
    """Return a request as the journal has it."""
    return AddRequest(1, [5], PARAMS, list(output_token_ids), fingerprint=fingerprint)


def output(core: FakeCore, *token_ids: int, first_index: int = 0) -> None:
    """Send outputs of the newest request."""
    core.emit(RequestOutput(core.adds[-1].request_id, first_index, list(token_ids)))


def joining(
    cores: Cores, act: Callable[[ReplicatedClient], Awaitable[None]], *first: FakeCore
) -> None:
    """Run a test with a client whose replicas change; `first`: those that it begins with."""

    async def main() -> None:
        addresses = [core.address for core in first]
        options = ReplicatedOptions(failover_s=0.1)
        async with ReplicatedClient(addresses, options, may_change=True) as client:
            task = asyncio.create_task(pump(cores))
            await act(client)
            task.cancel()

    asyncio.run(main())

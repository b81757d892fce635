"""The client of several replicas, with cores that do what a test asks for."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.adapters import Adapter
from protocol.api_core import ControlDone, PauseMode
from protocol.client import ReplicatedClient
from protocol.client.errors import Overloaded
from protocol.client.prefix_index import PrefixIndex
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import FakeCore

PARAMS = SamplingParams(max_tokens=8, seed=1)
Cores = list[FakeCore]


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[Cores]:
    with ExitStack() as stack:
        dirs = [tmp_path / str(number) for number in range(2)]
        for each in dirs:
            each.mkdir()
        yield [stack.enter_context(FakeCore(str(each))) for each in dirs]


def play(cores: Cores, act: Callable[[ReplicatedClient], Awaitable[None]]) -> None:
    """Run a test with a connected client; the cores answer meanwhile."""

    async def pump() -> None:
        while True:
            for core in cores:
                core.pump()
            await asyncio.sleep(0.001)

    async def main() -> None:
        async with ReplicatedClient([core.address for core in cores]) as client:
            task = asyncio.create_task(pump())
            await until(lambda: all(each.serves for each in client.clients))
            await act(client)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def answer(core: FakeCore, *, ok: bool, error: str = "") -> None:
    core.send(ControlDone(core.controls[-1].number, ok, PauseMode.RUNNING, error))


async def known_index(client: ReplicatedClient) -> PrefixIndex:
    """Return the index once the client has seen the cores' epochs."""
    await until(lambda: all(each._cache_epoch for each in client._replicas))
    return client._router.index


def test_replica_that_refuses_to_reset_keeps_its_prefixes_and_the_other_does_not(
    cores: Cores,
) -> None:
    async def act(client: ReplicatedClient) -> None:
        index = await known_index(client)
        for each in (0, 1):
            index.add(each, [b"a", b"b"], 9)
        reset = asyncio.create_task(client.reset_prefix_cache())
        await until(lambda: all(core.controls for core in cores))
        answer(cores[0], ok=True)
        answer(cores[1], ok=False)
        assert not await reset
        assert list(index.holders(b"a")) == [1]

    play(cores, act)


def test_error_of_a_control_names_the_replica(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        load = asyncio.create_task(client.load_adapter(Adapter("a", "/a", b"a" * 32)))
        await until(lambda: all(core.controls for core in cores))
        answer(cores[0], ok=True)
        answer(cores[1], ok=False)
        with pytest.raises(Overloaded, match="replica 1: the engine is starting"):
            await load
        load = asyncio.create_task(client.load_adapter(Adapter("a", "/a", b"a" * 32)))
        await until(lambda: all(len(core.controls) == 2 for core in cores))
        answer(cores[0], ok=True)
        answer(cores[1], ok=False, error="its rank is 99")
        assert await load == "replica 1: its rank is 99"
        with pytest.raises(TimeoutError, match="replica 0 has not answered"):
            await client.resume(timeout_s=0.05)

    play(cores, act)


def test_prefixes_of_a_new_core_and_of_one_that_is_gone_are_forgotten(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        index = await known_index(client)
        for each in (0, 1):
            index.add(each, [b"a"], 9)
        await cores[0].restart(0)
        await until(lambda: list(index.holders(b"a")) == [1])
        cores.pop().link.close()
        await until(lambda: not index.holders(b"a"))

    play(cores, act)

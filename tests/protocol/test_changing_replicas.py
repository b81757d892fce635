"""Replicas join and leave while requests run and while the engine is paused."""

import asyncio

import msgspec
import pytest

from protocol.api_core import EngineState, ErrorCode, PauseMode, RequestOutput
from protocol.client import ReplicatedClient
from protocol.client.errors import Overloaded
from protocol.client.request_stream import RequestStream
from tests.protocol.fake_core import READY, FakeCore
from tests.protocol.replicas import PARAMS, Cores, begun, joining, output, ticks, until


def test_without_a_replica_requests_are_refused_and_resumed_ones_wait(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        with pytest.raises(Overloaded, match="is starting"):
            client.submit([5], PARAMS)
        client.adopt(begun("", 7), RequestStream(0, client.cancel))
        client.set_addresses([cores[0].address])
        await until(lambda: cores[0].num_added == 1)
        assert cores[0].adds[0].output_token_ids == [7]
        await until(lambda: [each.is_open for each in client.clients] == [False, True])

    joining(cores, act)


def test_replicas_join_and_those_that_retire_leave_once_they_are_empty(cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        streams = [client.submit([5], PARAMS) for _ in range(8)]
        await until(lambda: one.num_added == 8)
        for stream in streams:
            one.emit(RequestOutput(stream.request_id, 0, [7]))
        await until(lambda: all(stream.num_unread for stream in streams))
        client.set_addresses([one.address, other.address])
        await until(lambda: client.clients[1].serves)
        client.set_addresses([other.address])
        await until(lambda: other.num_added == 8)
        assert all(add.output_token_ids == [7] for add in other.adds)
        await until(lambda: sorted(one.aborted) == [stream.request_id for stream in streams])
        await until(lambda: not client.clients[0].is_open)
        client.submit([6], PARAMS)
        await until(lambda: other.num_added == 9)
        client.set_addresses([other.address, one.address])  # its number is taken again
        await until(lambda: client.clients[0].serves)
        assert len(client.clients) == 2
        for _ in range(20):
            client.submit([5], PARAMS)
        await until(lambda: one.num_added > 8 and one.num_added + other.num_added == 37)

    joining(cores, act, one)


def test_a_replica_that_retires_alone_keeps_its_requests_until_another_one_joins(
    cores: Cores,
) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        stream = client.submit([5], PARAMS)
        await until(lambda: one.num_added == 1)
        client.set_addresses([])
        await ticks(client)
        output(one, 7)
        await until(lambda: stream.num_unread == 1)
        client.set_addresses([other.address])
        await until(lambda: other.num_added == 1)
        assert other.adds[0].output_token_ids == [7]

    joining(cores, act, one)


def test_when_all_machines_are_gone_new_requests_are_refused_while_others_wait(
    cores: Cores,
) -> None:
    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        client.submit([5], PARAMS)
        await until(lambda: cores[0].num_added == 1)
        cores.pop(0).link.close()
        client.set_addresses([])
        await until(lambda: not client.clients[0].connected)
        assert client.num_open_requests == 1
        with pytest.raises(Overloaded, match="all replicas have left") as caught:
            client.submit([6], PARAMS)
        assert caught.value.error.code is ErrorCode.STARTING  # 503, not 429

    joining(cores, act, cores[0])


def test_when_the_last_replicas_leave_requests_are_refused_with_that_reason(cores: Cores) -> None:
    async def act(client: ReplicatedClient) -> None:
        await until(lambda: all(each.serves for each in client.clients))
        for core in cores:
            core.send(msgspec.structs.replace(READY, state=EngineState.DRAINING))
        await until(lambda: not any(each.serves for each in client.clients))
        with pytest.raises(Overloaded, match="no other one has joined"):
            client.submit([5], PARAMS)
        assert client.facts is not None
        client.set_addresses([])
        await until(lambda: sum(each.is_open for each in client.clients) == 1)
        assert client.facts is None

    joining(cores, act, *cores)


async def begin_pause(client: ReplicatedClient, core: FakeCore) -> "asyncio.Task[bool]":
    """Begin a pause of the only replica, which has received it but not answered."""
    await until(lambda: client.clients[0].serves)
    pausing = asyncio.create_task(client.pause())
    await until(lambda: core.controls)
    return pausing


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_pause_holds_at_a_replica_that_joins(cores: Cores, is_answered: bool) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        pausing = await begin_pause(client, one)
        if is_answered:
            one.done(PauseMode.PAUSED_ALL)
            assert await pausing
        client.set_addresses([one.address, other.address])
        await until(lambda: other.controls)
        assert other.controls[0].pause_mode is PauseMode.PAUSED_ALL
        assert other.controls[0].restores
        one.done(PauseMode.PAUSED_ALL)
        assert await pausing

    joining(cores, act, one)


@pytest.mark.parametrize("ends", ["answered", "not answered", "by another client"])
def test_a_replica_that_joins_after_a_pause_computes(cores: Cores, ends: str) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        pausing = await begin_pause(client, one)
        one.done(PauseMode.PAUSED_ALL)
        assert await pausing
        if ends == "by another client":
            one.send(READY)
            await until(lambda: not client.clients[0].pauses)
        else:
            resuming = asyncio.create_task(client.resume(timeout_s=0.2))
            await until(lambda: len(one.controls) == 2)
            if ends == "answered":
                one.done(PauseMode.RUNNING)
                assert await resuming
            else:
                with pytest.raises(TimeoutError):
                    await resuming
        client.set_addresses([one.address, other.address])
        await until(lambda: client.clients[1].serves)
        client.set_addresses([other.address])
        client.submit([5], PARAMS)
        await until(lambda: other.num_added == 1)
        assert not other.controls

    joining(cores, act, one)


@pytest.mark.parametrize("wrong", ["10.0.0.2:5000", "tcp://10.0.0.2:5000", "tcp://a:0"])
def test_a_wrong_address_changes_nothing(wrong: str, cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        with pytest.raises(ValueError, match=r"address|tcp://HOST:PORT"):
            client.set_addresses([one.address, wrong, other.address])
        assert len(client.clients) == 1
        client.set_addresses([one.address, other.address])
        await until(lambda: client.clients[1].serves)

    joining(cores, act, one)


def test_a_replica_serves_until_its_successor_does(cores: Cores) -> None:
    one, other = cores
    other.answers = False

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        client.set_addresses([other.address])
        await until(lambda: other.connects)
        client.submit([5], PARAMS)
        await until(lambda: one.num_added == 1)
        other.answers = True
        other.send(READY)
        await until(lambda: other.num_added == 1 and one.aborted)
        client.submit([6], PARAMS)
        await until(lambda: other.num_added == 2 and not client.clients[0].is_open)

    joining(cores, act, one)


def test_a_pause_is_done_when_a_replica_leaves_meanwhile(cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: all(each.serves for each in client.clients))
        pausing = asyncio.create_task(client.pause())
        await until(lambda: one.controls and other.controls)
        other.done(PauseMode.PAUSED_ALL)
        client.set_addresses([other.address])
        assert await pausing

    joining(cores, act, one, other)


def test_an_address_that_is_none_changes_nothing(cores: Cores) -> None:
    one, other = cores

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: client.clients[0].serves)
        for address in ("tcp://ho!st:7000", "tcp://host:99999", "tcp://-host:7000", "tcp://host"):
            with pytest.raises(ValueError, match="tcp://"):
                client.set_addresses([other.address, address])
        assert client.clients[0].serves
        assert len(client.clients) == 1

    joining(cores, act, one)

"""The client's link to the core: connection, repetition, replacement, queues and timeouts."""

import asyncio
import errno
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from protocol import message
from protocol.api_core import RequestOutput, StepOutputs
from protocol.client import AsyncEngineClient, ClientOptions, core_link
from protocol.client.request_stream import RequestStream
from protocol.message import encode, pack_header
from protocol.process.run_dir import client_address
from protocol.sampling import FinishReason, SamplingParams
from protocol.transport.channel import MAX_FRAME_BYTES, DealerChannel
from tests.protocol.fake_core import (
    FAST_TICK_S,
    READY,
    RECOVERING,
    TIMEOUT_S,
    FakeCore,
    run_connected,
)
from tests.protocol.relay import Relay

PARAMS = SamplingParams(max_tokens=1000)


@pytest.mark.usefixtures("fast_ticks")
def test_connect_is_repeated_until_it_is_answered(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_link, "STATUS_TIMEOUT_S", 1e9)

    async def main() -> None:
        async with AsyncEngineClient(core.address) as client:
            await core.until(lambda: len(core.connects) >= 3)
            assert not client.connected
            core.answers = True
            await core.until(lambda: client.connected)

    core.answers = False
    asyncio.run(main())


@pytest.mark.usefixtures("fast_ticks")
def test_silence_of_the_core_is_answered_with_a_new_beginning(core: FakeCore) -> None:
    """A core that dropped this client as too slow sends it nothing, under the same epoch."""

    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        core.answers = False
        core.connects.clear()
        await core.until(lambda: len(core.connects) >= 2)
        assert not client.connected
        core.emit(RequestOutput(stream.request_id, 0, [10]))
        await core.until(lambda: client.num_fenced_frames == 1)
        core.answers = True
        await core.until(lambda: core.num_added == 2)
        core.emit(RequestOutput(stream.request_id, 0, [10], FinishReason.STOP))
        assert [output.token_ids async for output in stream] == [[10]]

    run_connected(core, play)


@pytest.mark.usefixtures("fast_ticks")
def test_reporting_core_is_not_bothered_again(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_link, "STATUS_TIMEOUT_S", 20 * FAST_TICK_S)

    async def play(client: AsyncEngineClient) -> None:
        client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        num_connects = len(core.connects)
        for _ in range(10):
            before = client.last_status_time
            core.send(READY)
            await core.until(lambda before=before: client.last_status_time > before)
            ticked = asyncio.get_running_loop().time() + 3 * FAST_TICK_S
            await core.until(lambda at=ticked: asyncio.get_running_loop().time() > at)
        assert len(core.connects) == num_connects

    run_connected(core, play)


@pytest.mark.usefixtures("fast_ticks")
def test_socket_that_never_reconnects_is_replaced(core: FakeCore) -> None:
    """A frame above the largest size makes libzmq disconnect again and again."""

    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        first = core.connects[-1]
        too_large = [first, pack_header(core.epoch, 1, b""), bytes(MAX_FRAME_BYTES + 1)]
        core.link.socket.send_multipart(too_large)
        await core.until(lambda: core.num_added == 2)
        assert core.connects[-1] != first
        core.emit(RequestOutput(stream.request_id, 0, [10], FinishReason.STOP))
        assert (await anext(stream)).token_ids == [10]

    run_connected(core, play)


def test_connection_that_breaks_while_the_core_is_busy_costs_nothing_else(
    core: FakeCore, tmp_path: Path
) -> None:
    (tmp_path / "front").mkdir()
    address = client_address(str(tmp_path / "front"))

    async def main(relay: Relay) -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), AsyncEngineClient(address) as client:
            await core.until(lambda: client.connected)
            stream = client.submit([5], PARAMS)
            await core.until(lambda: core.num_added == 1)
            core.emit(RequestOutput(stream.request_id, 0, [10]))
            relay.cut()
            while client.connected:
                await asyncio.sleep(0.001)
            while not client._link._is_linked:
                await asyncio.sleep(0.001)
            await core.until(lambda: core.num_added == 2)
            assert len(set(core.connects)) == 1, "it is known by its identity"
            core.emit(RequestOutput(stream.request_id, 0, [10, 11], FinishReason.STOP))
            tokens = [token async for output in stream for token in output.token_ids]
            assert tokens == [10, 11]

    with Relay(address.removeprefix("ipc://"), core.address.removeprefix("ipc://")) as relay:
        asyncio.run(main(relay))


@pytest.mark.usefixtures("fast_ticks")
def test_socket_is_replaced_as_soon_as_there_are_descriptors_again(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the old socket stays open, and reused descriptor numbers are left alone."""
    tries: list[str] = []

    def refuse(*_: object) -> DealerChannel:
        tries.append("refused")
        raise zmq.ZMQError(errno.EMFILE)

    async def play(client: AsyncEngineClient) -> None:
        client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        with monkeypatch.context() as full:
            full.setattr(core_link, "DealerChannel", refuse)
            too_large = [core.connects[-1], pack_header(1, 1, b""), bytes(MAX_FRAME_BYTES + 1)]
            core.link.socket.send_multipart(too_large)
            await core.until(lambda: len(tries) >= 3)
        await core.until(lambda: core.num_added == 2)
        assert client.connected

    run_connected(core, play)


def test_what_is_sent_in_one_turn_costs_one_look_at_the_socket(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        looks = []
        monkeypatch.setattr(client._link, "_on_readable", lambda: looks.append(1))
        for _ in range(20):
            client.submit([5], PARAMS)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(looks) == 1

    run_connected(core, play)


def send_with_another_header(core: FakeCore) -> None:
    with pytest.MonkeyPatch.context() as other:
        other.setattr(message, "PROTOCOL_VERSION", 99)
        core.send(READY)


def send_with_another_field(core: FakeCore) -> None:
    tag, state, facts, *others = msgspec.to_builtins(READY)
    core.send_raw(encode([tag, state, [*facts, "of another version"], *others]))


@pytest.mark.usefixtures("fast_ticks")
@pytest.mark.parametrize(
    ("send", "reason"),
    [(send_with_another_header, "protocol 99"), (send_with_another_field, "Expected `array`")],
)
def test_an_engine_of_another_version_is_the_stated_reason_not_to_be_ready(
    core: FakeCore,
    send: Callable[[FakeCore], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with AsyncEngineClient(core.address) as client:
            with pytest.raises(TimeoutError, match=f"nothing answers at {core.address}"):
                await client.wait_ready(timeout_s=0.01)
            await core.until(lambda: core.connects)
            for _ in range(3):
                before = client._link._channel.num_read
                send(core)
                await core.until(lambda before=before: client._link._channel.num_read > before)
            with pytest.raises(TimeoutError, match=f"as if it had another version: .*{reason}"):
                await client.wait_ready(timeout_s=0.01)
            assert not client.connected
            assert caplog.text.count(client.link_problem) == 1
            core.answers = True
            await core.until(lambda: client.connected)
            assert client.link_problem == ""

    core.answers = False
    asyncio.run(main())


def test_an_engine_of_another_version_that_is_gone_is_not_the_reason(core: FakeCore) -> None:
    async def main() -> None:
        async with AsyncEngineClient(core.address) as client:
            await core.until(lambda: core.connects)
            send_with_another_header(core)
            await core.until(lambda: client.link_problem)
            core.link.close()
            async with asyncio.timeout(TIMEOUT_S):
                while client._link._is_linked:
                    await asyncio.sleep(0.001)
            with pytest.raises(TimeoutError, match=f"nothing answers at {core.address}$"):
                await client.wait_ready(timeout_s=0.01)

    core.answers = False
    asyncio.run(main())


def test_frames_of_other_epochs_are_dropped_and_counted(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        core.send(StepOutputs([RequestOutput(stream.request_id, 0, [99])]), epoch=4)
        core.send(RECOVERING, epoch=4)
        core.send_raw(b"\xc1")
        core.emit(RequestOutput(stream.request_id, 0, [10]))
        assert (await anext(stream)).token_ids == [10]
        assert (client.num_fenced_frames, client.num_bad_frames) == (2, 1)
        assert client.status == READY
        assert core.num_added == 1

    core.epoch = 5
    run_connected(core, play)


def fill_queue(client: AsyncEngineClient) -> list[RequestStream]:
    """Submit until the socket is full; the core reads nothing meanwhile."""
    streams = []
    while not client._link._outbox:
        streams.append(client.submit([5] * 200, PARAMS))
        assert len(streams) < ClientOptions().max_open_requests
    return streams


def test_everything_arrives_once_the_core_reads_again(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        streams = fill_queue(client)
        streams += [client.submit([6], PARAMS) for _ in range(50)]
        await core.until(lambda: core.num_added == len(streams))
        assert [add.request_id for add in core.adds] == [stream.request_id for stream in streams]

    run_connected(core, play)


def test_output_is_read_though_a_failed_send_swallowed_its_sign(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor is edge-triggered; an attempt to send resets it."""
    monkeypatch.setattr(core_link, "STATUS_TIMEOUT_S", 10 * TIMEOUT_S)  # it connects once

    async def play(client: AsyncEngineClient) -> None:
        stream = fill_queue(client)[0]
        for _ in range(2000):
            client.submit([5] * 200, PARAMS)
        core.emit(RequestOutput(stream.request_id, 0, [10]))
        descriptor = client._link._fds[0]
        assert select.select([descriptor], [], [], 5.0)[0]
        while select.select([descriptor], [], [], 0.05)[0]:
            client._link._flush()
        assert client._link._outbox
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(stream)).token_ids == [10]

    run_connected(core, play)


@pytest.mark.usefixtures("fast_ticks")
def test_queue_that_does_not_empty_is_bounded(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        kept = client.submit([7], PARAMS)
        num_sent = 0
        while client.connected:
            client.submit([5] * 200, PARAMS).cancel()
            num_sent += 1
            assert num_sent < 100_000
        assert not client._link._outbox
        core.adds.clear()
        core.connects.clear()
        await core.until(lambda: core.connects and core.num_added)
        await core.until(lambda: core.adds[-1].request_id == kept.request_id)
        assert core.adds[-1].resent

    run_connected(core, play, max_open_requests=20)


@pytest.mark.usefixtures("fast_ticks")
def test_time_in_which_the_client_stood_still_does_not_count(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        stream = client.submit([5], PARAMS)
        await core.until(lambda: core.num_added == 1)
        before = client.last_status_time
        core.send(READY)
        await core.until(
            lambda: client.last_status_time > before
        )  # the silence is measured from here
        core.connects.clear()
        core.answers = False
        time.sleep(15 * FAST_TICK_S)
        deadline = asyncio.get_running_loop().time() + 2 * FAST_TICK_S
        await core.until(lambda: asyncio.get_running_loop().time() > deadline)
        assert client.connected
        assert not core.connects
        stream.cancel()

    run_connected(core, play, stall_timeout_s=10 * FAST_TICK_S)


def test_close_with_a_full_queue_leaves_no_timer_that_sends(core: FakeCore) -> None:
    async def main() -> None:
        problems: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        client = AsyncEngineClient(core.address)
        await client.start()
        await core.until(lambda: client.connected)
        fill_queue(client)
        await client.close()
        after_retry = loop.time() + 2 * core_link._RETRY_S
        await core.until(lambda: loop.time() > after_retry)
        assert problems == []

    asyncio.run(main())


def test_start_that_fails_leaves_nothing_open() -> None:
    async def main() -> None:
        client = AsyncEngineClient("ipc:///" + "x" * 200)
        with pytest.raises(zmq.ZMQError, match="too long"):
            await client.start()
        await client.close()

    asyncio.run(main())

"""Requests are resent in order, exactly once, with true ages, and in slices of bounded time."""

import asyncio
import gc
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from protocol.api_core import AbortRequests, AddRequest, RequestOutput, decode_from_client
from protocol.client import AsyncEngineClient, core_link
from protocol.client.ledger import Ledger, OpenLimits
from protocol.client.open_requests import OpenRequests
from protocol.message import encode
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import FakeCore, ServingThread, run_connected

PARAMS = SamplingParams(max_tokens=1000)
NUM_OPEN = 16_384
LONGEST_TURN_S = 0.02
"""Processor time of one turn of the host's loop; a slice takes a tenth of it."""


class Reader:
    def deliver(self, output: object) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass

    def rebind(self, fingerprint: str, *, is_exact: bool) -> None:
        pass

    def stored_at(self, blocks_at: str) -> None:
        pass


class SlowClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Wire:
    """Takes what is sent, each message for a tenth of a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[AddRequest] = []
        self.open = OpenRequests(Ledger(OpenLimits(1000), clock=lambda: self.now), self._send)

    def _send(self, body: bytes) -> None:
        self.now += 0.0001
        message = decode_from_client(body)
        if isinstance(message, AddRequest):
            self.sent.append(message)

    def accept(self) -> int:
        add = AddRequest(self.open.ledger.next_request_id(), [5], PARAMS)
        self.open.accept(add, encode(add), Reader())
        return add.request_id

    def send_some(self, bodies: Iterator[bytes]) -> bool:
        """Send 19 requests of a resend; returns whether there may be more."""
        some = list(islice(bodies, 19))
        for body in some:
            self._send(body)
        return len(some) == 19


def test_a_request_that_is_held_continues_when_the_facts_are_equal_again() -> None:
    wire = Wire()
    add = AddRequest(wire.open.ledger.next_request_id(), [5], PARAMS, fingerprint="A")
    wire.open.accept(add, encode(add), Reader())
    wire.open.take(RequestOutput(add.request_id, 0, [7]))
    wire.sent.clear()
    assert list(wire.open.resend("B")) == []
    assert wire.open.held_ids() == [add.request_id]
    wire.open.follow("C")
    assert wire.sent == []
    wire.open.follow("A")
    assert wire.open.held_ids() == []
    assert [(one.request_id, one.output_token_ids) for one in wire.sent] == [(add.request_id, [7])]
    assert wire.open.num_inexact == 0


def test_a_resend_keeps_the_order_whatever_is_added_and_cancelled_meanwhile() -> None:
    wire = Wire()
    expected = [wire.accept() for _ in range(100)]
    accepted_last_at = wire.now
    wire.sent.clear()
    wire.now += 50.0
    bodies = wire.open.resend("")
    num_slices = 0
    while wire.send_some(bodies):
        num_slices += 1
        expected.append(wire.accept())
        wire.open.cancel(expected.pop(-3))
        assert len(wire.sent) == 19 * num_slices, "new requests wait behind those of the resend"
    assert num_slices >= 4
    assert [add.request_id for add in wire.sent] == expected
    ages = [add.age_s for add in wire.sent]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] >= 50.0 + accepted_last_at - 0.0001
    assert wire.accept() == wire.sent[-1].request_id, "nothing is held back after the resend"


def test_a_backlog_is_made_in_slices_and_only_while_there_is_room(core: FakeCore) -> None:
    clock = SlowClock()
    made: list[bytes] = []

    def bodies() -> Iterator[bytes]:
        for i in range(100):
            clock.seconds += 0.001
            made.append(encode(AbortRequests([1000 + i])))
            yield made[-1]

    async def play(client: AsyncEngineClient) -> None:
        link = client._link
        link._monotonic = clock.monotonic
        with pytest.MonkeyPatch.context() as full:
            full.setattr(link._channel, "send", lambda *_, **__: False)
            link.send_backlog(bodies())
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(made) == 1, "the first did not fit, and the others were not made"
        link._flush()
        assert len(made) == 3, "a slice of two milliseconds holds two of them"
        await core.until(lambda: len(made) == 100 and not link._outbox)

    run_connected(core, play)


def test_a_new_core_is_sent_each_requests_age(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        before = time.monotonic()
        client.submit([1], PARAMS)
        await asyncio.sleep(0.1)
        client.submit([2], PARAMS)
        await core.until(lambda: core.num_added == 2)
        assert [add.age_s for add in core.adds] == [0.0, 0.0]
        await core.restart(2)
        old, new = core.adds
        assert (old.prompt_token_ids, new.prompt_token_ids) == ([1], [2])
        assert old.age_s - new.age_s >= 0.1
        assert 0.0 < new.age_s < old.age_s <= time.monotonic() - before

    run_connected(core, play)


def test_a_request_of_an_earlier_incarnation_keeps_its_age(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        add = AddRequest(7, [1], PARAMS, arrival_time=time.time() - 100.0)
        client.adopt(add, Reader())
        await core.until(lambda: core.num_added == 1)
        await core.restart(1)
        assert 100.0 <= core.adds[0].age_s < 110.0

    run_connected(core, play)


async def longest_turn(seconds: list[float]) -> None:
    """Keep the longest processor time of a turn of this loop in `seconds`."""
    while True:
        began = time.thread_time()
        await asyncio.sleep(0)
        seconds[0] = max(seconds[0], time.thread_time() - began)


def test_a_reconnect_of_16384_requests_leaves_the_loop_to_its_host(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_link, "STATUS_TIMEOUT_S", 1e9)  # a slow core is sent nothing twice
    seconds = [0.0]

    async def main() -> None:
        async with asyncio.timeout(60), AsyncEngineClient(core.address) as client:
            await client.wait_ready(10)
            for i in range(NUM_OPEN):
                client.submit([i % 1000], PARAMS)
                if i % 64 == 0:
                    await asyncio.sleep(0)
            while core.num_added < NUM_OPEN:
                await asyncio.sleep(0.01)
            core.adds.clear()
            gc.collect()
            gc.disable()  # a full collection of all that the tests hold takes longer than a slice
            watch = asyncio.create_task(longest_turn(seconds))
            core.epoch += 1  # and the next status has it
            while core.num_added < NUM_OPEN:
                await asyncio.sleep(0.01)
            watch.cancel()

    with ServingThread(core):
        try:
            asyncio.run(main())
        finally:
            gc.enable()
    print(f"longest turn: {seconds[0] * 1000:.1f} ms")
    assert [add.prompt_token_ids for add in core.adds] == [[i % 1000] for i in range(NUM_OPEN)]
    assert seconds[0] < LONGEST_TURN_S

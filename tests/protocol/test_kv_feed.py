"""The feed of KV events: in order, each once, and a new snapshot after any loss."""

import asyncio
from typing import Any

import pytest

from protocol.api_core import KVEventsTaken
from protocol.client import AsyncEngineClient, ClientOptions
from protocol.client.errors import RequestFailed
from protocol.client.kv_feed import KVEventFeed
from protocol.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    KVEvent,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from protocol.sampling import SamplingParams
from tests.protocol.fake_core import TIMEOUT_S, FakeCore, run_connected

CLEARED = AllBlocksCleared()


def removed(number: int) -> BlocksRemoved:
    return BlocksRemoved([bytes([number])], 0)


def batch(first_seq: int | None, *numbers: int, subscription: int = 0) -> KVEventBatch:
    return KVEventBatch(subscription, first_seq, [removed(number) for number in numbers])


def snapshot(*numbers: int, subscription: int = 0) -> KVEventBatch:
    return KVEventBatch(subscription, None, [CLEARED, *[removed(number) for number in numbers]])


def num_taken(core: FakeCore) -> int:
    return sum(isinstance(message, KVEventsTaken) for message in core.received)


async def take(feed: KVEventFeed, count: int) -> list[tuple[int | None, KVEvent]]:
    async with asyncio.timeout(2 * TIMEOUT_S):
        return [await anext(feed) for _ in range(count)]


def test_a_snapshot_and_what_follows_it_come_in_order(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        await core.until(lambda: core.subscriptions == [SubscribeKVEvents(0, None)])
        for message in (snapshot(1), batch(None, 2), batch(40), batch(40, 3, 4), batch(42, 5)):
            core.send(message)
        numbers = [(None, CLEARED), (None, removed(1)), (None, removed(2))]
        numbers += [(40, removed(3)), (41, removed(4)), (42, removed(5))]
        assert await take(feed, 6) == numbers

    run_connected(core, play)


@pytest.mark.parametrize(
    ("received", "next_seq"),
    [
        ([snapshot(1)], None),
        ([snapshot(1), batch(None, 2)], None),
        ([snapshot(1), batch(40)], 40),
        ([snapshot(1), batch(40, 2, 3)], 42),
    ],
)
def test_a_new_connection_continues_after_what_was_complete(
    core: FakeCore, received: list[KVEventBatch], next_seq: int | None
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(5)
        await core.until(lambda: core.subscriptions)
        for message in received:
            core.send(message)
        await take(feed, sum(len(message.events) for message in received))
        if next_seq == 40:  # an empty batch has no event: wait for its number
            await core.until(lambda: feed._next_seq == 40)
        await core.restart(0)
        await core.until(lambda: core.subscriptions)
        assert core.subscriptions == [SubscribeKVEvents(1, next_seq)]

    run_connected(core, play)


def test_a_gap_is_asked_for_once_and_no_event_is_delivered_twice(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(5)
        await core.until(lambda: core.subscriptions)
        core.send(batch(5, 1))
        await take(feed, 1)
        core.send(batch(8, 4))
        core.send(batch(9, 5))
        await core.until(lambda: len(core.subscriptions) == 2)
        assert core.subscriptions[-1] == SubscribeKVEvents(1, 6)
        core.send(batch(6, 2, 3, 4, 5, subscription=1))
        assert await take(feed, 4) == [(6 + i, removed(2 + i)) for i in range(4)]
        core.pump()
        assert len(core.subscriptions) == 2

    run_connected(core, play)


def test_the_core_is_asked_for_more_only_when_all_that_came_was_read(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(1)
        await core.until(lambda: core.subscriptions)
        core.send(batch(1, 1, 2))
        core.send(batch(3, 3))
        await core.until(lambda: feed.num_unread == 3)
        await take(feed, 2)
        client.submit([7], SamplingParams()).cancel()
        await core.until(lambda: core.aborted)  # all earlier messages have arrived too
        assert num_taken(core) == 0
        await take(feed, 1)
        await core.until(lambda: num_taken(core) == 2)
        core.send(batch(9, 9))  # a gap: the batch is not kept, so there is room at once
        await core.until(lambda: num_taken(core) == 3)

    run_connected(core, play)


@pytest.mark.parametrize("ending", ["cancelled", "refused"])
def test_a_feed_that_ends_unread_leaves_room_for_the_next(core: FakeCore, ending: str) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(1)
        await core.until(lambda: core.subscriptions)
        core.send(batch(1, 1))
        await core.until(lambda: feed.num_unread)
        if ending == "cancelled":
            feed.cancel()
        else:
            core.send(KVEventsRefused(0, "a bug"))
        await core.until(lambda: num_taken(core) == 1)
        core.send(batch(2, 2))  # sent before the refusal arrived
        await core.until(lambda: num_taken(core) == 2)

    run_connected(core, play)


def test_what_was_on_its_way_to_another_feed_is_none_of_this_one(core: FakeCore) -> None:
    """It is ignored even if it begins with the expected number, or is a refusal or a snapshot."""

    async def play(client: AsyncEngineClient) -> None:
        client.kv_events(5).cancel()
        feed = client.kv_events(5)
        await core.until(lambda: len(core.subscriptions) == 3)
        core.send(KVEventsRefused(0, "a bug"))
        core.send(batch(5, 1))
        core.send(snapshot(2))
        core.send(batch(5, 3, subscription=1))
        assert await take(feed, 1) == [(5, removed(3))]
        await core.until(lambda: num_taken(core) == 3)
        assert len(core.subscriptions) == 3

    run_connected(core, play)


def test_without_an_engine_a_feed_ends_as_streams_do(core: FakeCore, fast_ticks: None) -> None:
    core.answers = False

    async def main() -> None:
        client = AsyncEngineClient(core.address, ClientOptions(stall_timeout_s=0.2))
        async with asyncio.timeout(TIMEOUT_S), client:
            with pytest.raises(ConnectionError, match="no engine has served"):
                await take(client.kv_events(), 1)

    asyncio.run(main())


def test_a_refusal_is_raised_and_a_new_feed_may_be_tried(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        await core.until(lambda: core.subscriptions)
        core.send(KVEventsRefused(0, "not without enable_kv_events"))
        with pytest.raises(ValueError, match="enable_kv_events"):
            await take(feed, 1)
        client.kv_events().cancel()

    run_connected(core, play)


def test_cancelling_ends_the_iteration_and_the_subscription(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        with pytest.raises(RuntimeError, match="already"):
            client.kv_events()
        waiting = asyncio.create_task(take(feed, 1))
        await asyncio.sleep(0)
        feed.cancel()
        feed.cancel()
        with pytest.raises(StopAsyncIteration):
            await waiting
        await core.until(lambda: len(core.subscriptions) == 2)
        assert isinstance(core.subscriptions[-1], UnsubscribeKVEvents)
        assert [item async for item in feed] == []

        async def read() -> None:
            with client.kv_events() as following:
                await anext(following)

        reading = asyncio.create_task(read())
        await core.until(lambda: len(core.subscriptions) == 3)
        reading.cancel()
        await core.until(lambda: len(core.subscriptions) == 4)
        assert isinstance(core.subscriptions[-1], UnsubscribeKVEvents)
        client.kv_events()

    run_connected(core, play)


def test_closing_the_client_fails_the_feed(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        waiting = asyncio.create_task(take(feed, 1))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ConnectionError):
            await waiting

    run_connected(core, play)


@pytest.mark.parametrize("number", [-1, 2**63, 1.5, "1"])
def test_a_number_of_no_event_is_refused_at_the_call(core: FakeCore, number: Any) -> None:
    async def play(client: AsyncEngineClient) -> None:
        with pytest.raises(ValueError, match="next_seq"):
            client.kv_events(number)
        core.pump()
        assert core.subscriptions == []

    run_connected(core, play)


def test_a_closed_client_has_no_feed(core: FakeCore) -> None:
    closed: list[AsyncEngineClient] = []

    async def play(client: AsyncEngineClient) -> None:
        closed.append(client)

    run_connected(core, play)
    with pytest.raises(RequestFailed, match="not open"):
        closed[0].kv_events()

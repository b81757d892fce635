"""The feed of KV events: in order, each once, and a new beginning after whatever was missed."""

import asyncio

import pytest

from protocol import kv_feed
from protocol.client import AsyncEngineClient
from protocol.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    KVEvent,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from protocol.kv_feed import KVEventFeed
from protocol.ledger import RequestFailed
from tests.protocol.fake_core import FakeCore, run_connected

CLEARED = AllBlocksCleared()


def removed(number: int) -> BlocksRemoved:
    return BlocksRemoved([bytes([number])], 0)


def batch(first_seq: int | None, *numbers: int) -> KVEventBatch:
    return KVEventBatch(first_seq, [removed(number) for number in numbers])


def snapshot(*numbers: int) -> KVEventBatch:
    return KVEventBatch(None, [CLEARED, *[removed(number) for number in numbers]])


async def take(feed: KVEventFeed, count: int) -> list[tuple[int | None, KVEvent]]:
    async with asyncio.timeout(5):
        return [await anext(feed) for _ in range(count)]


def test_a_snapshot_and_what_follows_it_come_in_order(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        await core.until(lambda: core.subscriptions == [SubscribeKVEvents(None)])
        for message in (snapshot(1), batch(None, 2), batch(40), batch(40, 3, 4), batch(42, 5)):
            core.say(message)
        numbers = [(None, CLEARED), (None, removed(1)), (None, removed(2))]
        numbers += [(40, removed(3)), (41, removed(4)), (42, removed(5))]
        assert await take(feed, 6) == numbers

    run_connected(core, play)


@pytest.mark.parametrize(
    ("heard", "next_seq"),
    [
        ([snapshot(1)], None),
        ([snapshot(1), batch(None, 2)], None),
        ([snapshot(1), batch(40)], 40),
        ([snapshot(1), batch(40, 2, 3)], 42),
    ],
)
def test_a_new_connection_goes_on_after_what_was_complete(
    core: FakeCore, heard: list[KVEventBatch], next_seq: int | None
) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(5)
        await core.until(lambda: core.subscriptions)
        for message in heard:
            core.say(message)
        await take(feed, sum(len(message.events) for message in heard))
        if next_seq == 40:  # an empty batch is no event: wait for what it says
            await core.until(lambda: feed._next_seq == 40)
        await core.restart(0)
        await core.until(lambda: core.subscriptions)
        assert core.subscriptions == [SubscribeKVEvents(next_seq)]

    run_connected(core, play)


def test_a_gap_is_asked_for_once_and_nothing_is_told_twice(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(5)
        await core.until(lambda: core.subscriptions)
        core.say(batch(5, 1))
        await take(feed, 1)
        core.say(batch(8, 4))
        core.say(batch(9, 5))
        await core.until(lambda: len(core.subscriptions) == 2)
        assert core.subscriptions[-1] == SubscribeKVEvents(6)
        core.say(batch(6, 2, 3, 4, 5))
        assert await take(feed, 4) == [(6 + i, removed(2 + i)) for i in range(4)]
        core.pump()
        assert len(core.subscriptions) == 2

    run_connected(core, play)


def test_a_reader_that_lags_gets_a_snapshot_when_it_has_caught_up(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_feed, "MAX_UNREAD_BLOCKS", 3)

    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events(1)
        await core.until(lambda: core.subscriptions)
        for first in range(1, 9, 2):
            core.say(batch(first, first, first + 1))
        await core.until(lambda: len(core.subscriptions) == 2)
        assert isinstance(core.subscriptions[-1], UnsubscribeKVEvents)
        assert feed.num_unread == 4
        await take(feed, 4)
        reading = asyncio.create_task(take(feed, 1))
        await core.until(lambda: len(core.subscriptions) == 3)
        assert core.subscriptions[-1] == SubscribeKVEvents(None)
        core.say(batch(9, 9))  # what was on its way
        core.say(snapshot())
        assert await reading == [(None, CLEARED)]

    run_connected(core, play)


def test_a_refusal_is_raised_and_a_new_feed_may_be_tried(core: FakeCore) -> None:
    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        await core.until(lambda: core.subscriptions)
        core.say(KVEventsRefused("not without enable_kv_events"))
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


def test_a_snapshot_of_any_size_is_told_whole(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as the cache, and a slow reader would else never get to its end."""
    monkeypatch.setattr(kv_feed, "MAX_UNREAD_BLOCKS", 3)

    async def play(client: AsyncEngineClient) -> None:
        feed = client.kv_events()
        await core.until(lambda: core.subscriptions)
        core.say(snapshot(*range(20)))
        await core.until(lambda: feed.num_unread == 21)
        assert core.subscriptions == [SubscribeKVEvents(None)]

    run_connected(core, play)


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_number_of_no_event_is_refused_at_the_call(core: FakeCore, number: int) -> None:
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

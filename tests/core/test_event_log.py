"""Routers that apply events have exactly the cached contents, whatever was lost."""

import itertools
import random
from collections.abc import Iterator

import pytest

from core_proc.engine import EngineCore
from core_proc.kv.event_recorder import HASH_BYTES
from core_proc.links import event_log
from core_proc.links.event_log import EventLog
from protocol.api_core import Control, ControlAction, KVEventsTaken, decode_from_core
from protocol.client.kv_feed import KVEventFeed
from protocol.config.settings import configure
from protocol.core_worker import ModelRunnerOutput
from protocol.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from protocol.message import encode
from protocol.model_facts import KVGroup, ModelFacts
from tests.core.engine_bench import CLIENT, add

Contents = set[tuple[bytes, int]]
"""Block hashes with their KV groups."""


def events_of(feed: KVEventFeed) -> Iterator[tuple[int | None, KVEvent]]:
    """Return all batches that are ready."""
    while feed.num_unread:
        try:
            feed.__anext__().send(None)
        except StopIteration as item:
            yield item.value


class Router:
    """Builds the contents from events alone. Its connection may break at any moment."""

    def __init__(self, core: "Core", name: bytes, next_seq: int | None = None) -> None:
        self.core = core
        self.name = name
        self.contents: Contents = set()
        self.last_seq: int | None = None
        self.num_snapshots = 0
        self.feed = KVEventFeed(next_seq, itertools.count(), self._send, lambda: None)

    def _send(self, message: SubscribeKVEvents | UnsubscribeKVEvents | KVEventsTaken) -> None:
        if isinstance(message, SubscribeKVEvents):
            self.core.subscribe(self.name, message)
        elif isinstance(message, KVEventsTaken):
            self.core.log.taken(self.name)
        else:
            self.core.log.unsubscribe(self.name)

    def reconnect(self) -> None:
        self.core.log.forget(self.name)
        self.feed.subscribe()

    def receive(self) -> None:
        """Receive the batches of one turn of the core."""
        if self.name in self.core.log.waiting():
            message = decode_from_core(encode(self.core.log.take_batch(self.name)))
            assert isinstance(message, KVEventBatch)
            self.feed.take(message)

    def read(self) -> None:
        for seq, event in events_of(self.feed):
            if seq is not None and self.last_seq is not None:
                assert seq == self.last_seq + 1
            self.last_seq = seq
            self._apply(event)

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, BlocksStored):
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            self.contents |= {(key, event.group) for key in event.block_hashes}
        elif isinstance(event, BlocksRemoved):
            gone = {(key, event.group) for key in event.block_hashes}
            assert gone <= self.contents, "a block was removed that was never stored"
            self.contents -= gone
        else:
            assert isinstance(event, AllBlocksCleared)
            self.num_snapshots += self.last_seq is None
            self.contents.clear()

    def catch_up(self) -> None:
        for _ in range(10_000):
            self.read()
            if self.name not in self.core.log.waiting():
                return
            self.receive()
        raise AssertionError("it never catches up")


class Core:
    """An engine under random load, and its log."""

    def __init__(self, seed: int, groups: list[KVGroup], epoch: int) -> None:
        self.random = random.Random(seed * 1000 + epoch)
        self.epoch = epoch
        settings = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "max_steps_in_flight": 2}
        self.facts = ModelFacts("fake", 1000, 64, 4, 30, [2], kv_groups=groups)
        self.engine = EngineCore(configure(model="null", enable_kv_events=True, **settings))
        self.engine.adopt_workers(self.facts)
        self.log = EventLog(epoch, self.engine.snapshot_kv_events)
        self.next_id = 0

    def subscribe(self, name: bytes, asked: SubscribeKVEvents) -> None:
        self.log.append(self.engine.take_kv_events())
        self.log.subscribe(name, asked)

    def contents(self) -> Contents:
        pool = self.engine.scheduler.kv.pool
        keys = (pool.hash_of(i) for i in range(pool.num_blocks))
        return {(k[:HASH_BYTES], (k[HASH_BYTES:] or b"\0")[0]) for k in keys if k is not None}

    def act(self) -> None:
        """Execute one random event, then the work of each turn of the loop."""
        rng, engine = self.random, self.engine
        dice = rng.random()
        if dice < 0.4:
            self.next_id += 1
            prompt = [rng.choice((5, 6))] * rng.randrange(1, 30) + [7] * rng.randrange(20)
            engine.add(CLIENT, add(self.next_id, prompt, rng.randrange(1, 10)))
        elif dice < 0.45:
            engine.abort(CLIENT, [rng.randrange(self.next_id + 1)])
        elif dice < 0.48:
            reset = ControlAction.RESET_PREFIX_CACHE
            running = rng.random() < 0.5
            engine.control(CLIENT, Control(1, reset, reset_running_requests=running))
        elif dice < 0.5:
            engine.control(CLIENT, Control(1, ControlAction.SLEEP))
        elif dice < 0.52:
            engine.lose_workers()
            engine.adopt_workers(self.facts)
        else:
            engine.control(CLIENT, Control(1, ControlAction.RESUME))
        while engine.schedule() is not None:
            pass
        if engine.scheduler.in_flight and rng.random() < 0.8:
            step_id, sampling = engine.scheduler.in_flight[0]
            tokens = [rng.choice((5, 6, 7)) for _ in sampling]
            engine.update(ModelRunnerOutput(step_id, tokens))
        engine.take_outgoing()
        self.log.append(engine.take_kv_events())


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bound is reached many times."""
    monkeypatch.setattr(event_log, "MAX_KEPT_EVENTS", 40)
    monkeypatch.setattr(event_log, "MAX_BATCH_EVENTS", 3)


GROUPS = [[KVGroup()], [KVGroup(), KVGroup(8, 4)]]


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("groups", GROUPS, ids=["one group", "two groups"])
@pytest.mark.parametrize("seed", range(8))
def test_a_router_that_applies_events_knows_exactly_what_is_cached(
    seed: int, groups: list[KVGroup]
) -> None:
    """Routers begin at any moment; connections are lost, and the core is reset or dies."""
    rng = random.Random(seed)
    core = Core(seed, groups, 1)
    routers = [Router(core, b"0")]
    for turn in range(400):
        core.act()
        if turn % 40 == 0:
            routers.append(Router(core, b"%d" % len(routers), rng.choice((None, 1, 10**6))))
        for router in routers:
            dice = rng.random()
            for _ in range(rng.randrange(4)):
                router.receive()
            if dice < 0.6:
                router.read()
            if dice > 0.95:
                router.reconnect()
        if rng.random() < 0.02:
            core = Core(seed, groups, core.epoch + 1)
            for router in routers:
                router.core = core
                router.feed.subscribe()
        if rng.random() < 0.1:
            for router in routers:
                router.catch_up()
                assert router.contents == core.contents()


def stored(number: int) -> BlocksStored:
    return BlocksStored([number.to_bytes(16, "little")], None, [1, 2, 3, 4], 4, 0, "", 0)


def flat(batches: list[KVEventBatch]) -> list[int | None]:
    """Return the number of every event, and of an empty batch."""
    numbers: list[int | None] = []
    for batch in batches:
        if batch.first_seq is None:
            numbers += [None] * len(batch.events)
        else:
            numbers += [batch.first_seq + i for i in range(len(batch.events))] or [batch.first_seq]
    return numbers


def drained(log: EventLog, client: bytes) -> list[KVEventBatch]:
    batches: list[KVEventBatch] = []
    while client in log.waiting():
        batches.append(log.take_batch(client))
        log.taken(client)
    return batches


def test_kept_events_are_sent_again_without_a_snapshot() -> None:
    log = EventLog(0, lambda: [stored(99)])
    log.append(map(stored, range(5)))
    log.subscribe(CLIENT, SubscribeKVEvents(0, 3))
    assert flat(drained(log, CLIENT)) == [3, 4, 5]
    log.subscribe(CLIENT, SubscribeKVEvents(0, 6))
    assert flat(drained(log, CLIENT)) == []


@pytest.mark.parametrize("next_seq", [None, 0, 2, 7, 2**32 + 1])
def test_what_is_not_kept_any_more_or_yet_is_replaced_by_a_snapshot(
    next_seq: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_KEPT_EVENTS", 3)
    log = EventLog(0, lambda: [stored(1), stored(2)])
    log.append(map(stored, range(5)))
    log.subscribe(CLIENT, SubscribeKVEvents(0, next_seq))
    assert flat(drained(log, CLIENT)) == [None, None, None, 6]


def test_numbers_of_two_lives_are_never_the_same() -> None:
    first, second = EventLog(1, list), EventLog(2, list)
    for log in (first, second):
        log.append(map(stored, range(3)))
        log.subscribe(CLIENT, SubscribeKVEvents(0, 2**32 + 1))
    assert flat(drained(first, CLIENT)) == [2**32 + 1, 2**32 + 2, 2**32 + 3]
    assert flat(drained(second, CLIENT)) == [None, 2 * 2**32 + 4]


def test_events_that_come_during_a_snapshot_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_BATCH_EVENTS", 2)
    log = EventLog(0, lambda: map(stored, range(4)))
    log.subscribe(CLIENT, SubscribeKVEvents(0, None))
    first = [log.take_batch(CLIENT)]
    log.taken(CLIENT)
    log.append([stored(9)])
    assert flat(first + drained(log, CLIENT)) == [None] * 5 + [1]


def test_batches_are_bounded_in_events_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(0, list)
    log.subscribe(CLIENT, SubscribeKVEvents(0, 1))
    log.append(map(stored, range(2500)))
    assert [len(batch.events) for batch in drained(log, CLIENT)] == [1000, 1000, 500]
    monkeypatch.setattr(event_log, "MAX_BATCH_BYTES", 1000)
    log.append(map(stored, range(100)))
    assert max(len(encode(batch)) for batch in drained(log, CLIENT)) < 1100


def test_the_log_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_KEPT_BYTES", 1000)
    log = EventLog(0, list)
    log.append(map(stored, range(1000)))
    assert sum(map(len, log._kept)) <= 1000
    assert sum(map(len, log._kept)) == log._num_kept_bytes


def test_repeated_subscriptions_cost_no_snapshot_until_something_is_sent() -> None:
    num_snapshots = 0

    def snapshot() -> list[KVEvent]:
        nonlocal num_snapshots
        num_snapshots += 1
        return []

    log = EventLog(1, snapshot)
    for _ in range(64):
        log.subscribe(b"a", SubscribeKVEvents(0, None))
    assert num_snapshots == 0
    assert log.waiting() == [b"a"]
    log.take_batch(b"a")
    assert num_snapshots == 1


def test_who_takes_nothing_is_sent_nothing_more_however_often_it_subscribes() -> None:
    log = EventLog(1, lambda: map(stored, range(100_000)))
    num_sent = 0
    for _ in range(10):
        log.subscribe(CLIENT, SubscribeKVEvents(0, None))
        while CLIENT in log.waiting():
            log.take_batch(CLIENT)
            num_sent += 1
        log.unsubscribe(CLIENT)
    assert num_sent == event_log.MAX_UNTAKEN_BATCHES
    log.taken(CLIENT)
    log.subscribe(CLIENT, SubscribeKVEvents(0, None))
    assert log.waiting() == [CLIENT]
    log.take_batch(CLIENT)
    log.forget(CLIENT)
    assert log.waiting() == []
    log.subscribe(CLIENT, SubscribeKVEvents(0, None))
    assert log.waiting() == [CLIENT], "batches sent to an old connection do not count"


def test_events_that_cannot_be_sent_take_no_room_from_others() -> None:
    num_bugs = iter(range(3))

    def snapshot() -> list[KVEvent]:
        if next(num_bugs, None) is not None:
            raise RuntimeError("a bug")
        return []

    log = EventLog(1, snapshot)
    for _ in range(3):
        log.subscribe(CLIENT, SubscribeKVEvents(7, None))
        with pytest.raises(RuntimeError, match="a bug"):
            log.take_batch(CLIENT)
        assert log.refuse(CLIENT, "sorry") == KVEventsRefused(7, "sorry")
    log.subscribe(CLIENT, SubscribeKVEvents(8, None))
    assert log.waiting() == [CLIENT]


def test_a_snapshot_is_sent_to_its_end_although_the_log_has_passed_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow reader would otherwise begin again and again."""
    monkeypatch.setattr(event_log, "MAX_KEPT_EVENTS", 3)
    monkeypatch.setattr(event_log, "MAX_BATCH_EVENTS", 2)
    log = EventLog(0, lambda: map(stored, range(9)))
    log.subscribe(CLIENT, SubscribeKVEvents(0, None))
    events: list[KVEvent] = []
    for _ in range(5):
        batch = decode_from_core(encode(log.take_batch(CLIENT)))
        assert isinstance(batch, KVEventBatch)
        events += batch.events
        log.taken(CLIENT)
        log.append(map(stored, range(4)))
    assert events == [AllBlocksCleared(), *map(stored, range(9))]
    following = decode_from_core(encode(log.take_batch(CLIENT)))
    assert isinstance(following, KVEventBatch)
    assert following.events[0] == AllBlocksCleared()


@pytest.mark.parametrize("num_missed", [1, 10, 90, 100])
def test_missed_events_are_sent_in_order_from_either_end_of_the_log(num_missed: int) -> None:
    log = EventLog(1, lambda: [])
    log.append(BlocksRemoved([bytes([i])], 0) for i in range(100))
    log.subscribe(b"a", SubscribeKVEvents(0, 2**32 + 101 - num_missed))
    batch = decode_from_core(encode(log.take_batch(b"a")))
    assert isinstance(batch, KVEventBatch)
    hashes = [event.block_hashes[0] for event in batch.events if isinstance(event, BlocksRemoved)]
    assert hashes == [bytes([i]) for i in range(100 - num_missed, 100)]

"""Pauses, sleep and KV events over the core's real sockets."""

import itertools
from collections.abc import Iterator

import pytest

from core_proc import loop
from core_proc.links.event_log import MAX_UNTAKEN_BATCHES
from protocol.api_core import (
    Control,
    ControlAction,
    ControlDone,
    EngineState,
    ErrorCode,
    KVEventsTaken,
    PauseMode,
    Status,
)
from protocol.kv_events import (
    AllBlocksCleared,
    BlocksStored,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from protocol.lifecycle import Drain
from tests.core.loop_bench import CORE_EPOCH, Bench, FakeClient, all_tokens


def ask(client: FakeClient, number: int, action: ControlAction, **fields: object) -> None:
    client.send(CORE_EPOCH, Control(number, action, **fields))  # type: ignore[arg-type]


def done(client: FakeClient) -> dict[int, ControlDone]:
    return {m.number: m for m in client.received if isinstance(m, ControlDone)}


def test_a_paused_engine_stops_and_reports_it_and_then_continues(bench: Bench) -> None:
    worker, client, other = bench.worker(), bench.client(), bench.client()
    ask(client, 1, ControlAction.PAUSE)
    bench.until(lambda: 1 in done(client))
    assert done(client)[1] == ControlDone(1, True, PauseMode.PAUSED_ALL)
    client.add(1)
    bench.until(lambda: other.statuses[-1].pause_mode is PauseMode.PAUSED_ALL)
    bench.until(lambda: other.statuses[-1].stats.num_waiting_reqs == 1)
    for _ in range(20):
        bench.turn()
    assert not client.rows
    assert not worker.unanswered
    ask(other, 1, ControlAction.RESUME)
    client.finish(1)
    assert client.tokens(1) == all_tokens(4)
    assert not done(client).keys() - {1}


def test_the_status_precedes_the_answer_to_a_control(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STATUS_INTERVAL_S", 1000.0)
    bench.worker()
    client = bench.client()
    for number, action in enumerate((ControlAction.PAUSE, ControlAction.SLEEP)):
        ask(client, number, action)
        bench.until(lambda n=number: n in done(client))
        before = client.received[: client.received.index(done(client)[number])]
        status = [m for m in before if isinstance(m, Status)][-1]
        assert status.pause_mode is PauseMode.PAUSED_ALL
        assert status.is_sleeping == (action is ControlAction.SLEEP)


def test_workers_are_sent_to_sleep_after_their_last_step_and_new_ones_too(bench: Bench) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    client.add(1, max_tokens=50)
    bench.until(lambda: worker.unanswered)
    ask(client, 7, ControlAction.SLEEP)
    bench.until(lambda: client.statuses[-1].is_sleeping)
    assert worker.num_sleeps == 0
    assert 7 not in done(client)
    worker.answers = True
    bench.until(lambda: 7 in done(client))
    assert done(client)[7].ok
    bench.until(lambda: worker.num_sleeps == 1)
    worker.kill_process()
    bench.until(lambda: bench.state is EngineState.RECOVERING)
    successor = bench.worker(epoch=6)
    bench.until(lambda: successor.num_sleeps == 1)
    ask(client, 8, ControlAction.RESUME)
    client.finish(1)
    assert client.tokens(1) == all_tokens(50)
    assert (worker.num_sleeps, successor.num_sleeps) == (1, 1)


@pytest.mark.parametrize("action", [ControlAction.PAUSE, ControlAction.SLEEP])
def test_a_paused_engine_that_drains_comes_to_its_end(bench: Bench, action: ControlAction) -> None:
    client = bench.client()
    bench.worker()
    ask(client, 1, action)
    client.add(1)
    bench.until(lambda: 1 in done(client))
    bench.child.inbox.append(Drain())
    client.finish(1)
    bench.until(lambda: bench.child.num_drained)
    assert client.statuses[-1].pause_mode is PauseMode.RUNNING


def test_a_request_that_the_scheduler_gives_up_is_refused_and_the_loop_continues(
    bench: Bench,
) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    bench.admit_together(2, lambda: [client.add(i) for i in (1, 2)])
    bench.engine.scheduler.fail_request(min(bench.engine.scheduler.requests), "a bug")
    worker.answers = True
    client.finish(2)
    [refused] = client.refused
    assert (refused.request_id, refused.error.code) == (1, ErrorCode.INTERNAL)


# KV events ---------------------------------------------------------------------------------------


@pytest.fixture
def events_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    real = FakeClient.read

    def read(client: FakeClient) -> None:
        before = len(batches(client))
        real(client)
        for _ in batches(client)[before:]:
            client.send(CORE_EPOCH, KVEventsTaken())

    monkeypatch.setattr(FakeClient, "read", read)
    monkeypatch.setattr(loop, "STATUS_INTERVAL_S", 0.1)
    with Bench(enable_kv_events=True) as running:
        yield running


def batches(client: FakeClient) -> list[KVEventBatch]:
    return [m for m in client.received if isinstance(m, KVEventBatch)]


def num_stored(client: FakeClient) -> int:
    events = [event for batch in batches(client) for event in batch.events]
    return sum(len(e.block_hashes) for e in events if isinstance(e, BlocksStored))


def test_without_the_setting_a_subscription_is_refused_with_its_name(bench: Bench) -> None:
    client = bench.client()
    client.send(CORE_EPOCH, SubscribeKVEvents(0))
    bench.until(lambda: any(isinstance(m, KVEventsRefused) for m in client.received))
    assert any("enable_kv_events" in m.message for m in client.received if hasattr(m, "message"))


def test_a_subscriber_gets_a_snapshot_and_then_what_happens(events_bench: Bench) -> None:
    bench = events_bench
    bench.worker()
    client, late = bench.client(), bench.client()
    client.send(CORE_EPOCH, SubscribeKVEvents(0))
    bench.until(lambda: batches(client))
    client.add(1, max_tokens=64)
    client.finish(1)
    assert num_stored(client) == 4
    late.send(CORE_EPOCH, SubscribeKVEvents(0))
    bench.until(lambda: num_stored(late) == 4)
    assert isinstance(batches(late)[0].events[0], AllBlocksCleared)
    ask(client, 1, ControlAction.RESET_PREFIX_CACHE)
    for subscriber in (client, late):
        bench.until(lambda s=subscriber: batches(s)[-1].events == [AllBlocksCleared()])
        numbered = [batch for batch in batches(subscriber) if batch.first_seq is not None]
        for batch, following in itertools.pairwise(numbered):
            assert batch.first_seq is not None
            assert following.first_seq == batch.first_seq + len(batch.events)


def test_a_client_that_unsubscribes_or_reconnects_or_dies_gets_no_more_events(
    events_bench: Bench,
) -> None:
    bench = events_bench
    bench.worker()
    quits, anew, dies, stays = (bench.client() for _ in range(4))
    for client in (quits, anew, dies, stays):
        client.send(CORE_EPOCH, SubscribeKVEvents(0))
        bench.until(lambda c=client: batches(c))
    quits.send(CORE_EPOCH, UnsubscribeKVEvents())
    anew.connect()
    dies.connect(dies.start_process())
    dies.send(CORE_EPOCH, SubscribeKVEvents(0))
    bench.until(lambda: len(batches(dies)) == 4)
    dies.kill_process()
    bench.until(lambda: len(bench.loop._clients._outboxes) == 3)
    before = num_stored(quits), num_stored(anew)
    stays.add(1, max_tokens=64)
    bench.until(lambda: num_stored(stays) == 4)
    assert (num_stored(quits), num_stored(anew)) == before


def test_a_subscriber_that_does_not_read_delays_no_other_and_continues_where_it_was(
    events_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = events_bench
    bench.worker()
    stuck, client = bench.client(), bench.client()
    stuck.send(CORE_EPOCH, SubscribeKVEvents(0))
    bench.until(lambda: batches(stuck))
    real = bench.loop._links[0].send
    is_stuck = True

    def send(peer: bytes, epoch: int, body: bytes) -> bool:
        return not (is_stuck and b"KVEventBatch" in body) and real(peer, epoch, body)

    monkeypatch.setattr(bench.loop._links[0], "send", send)
    for request_id in range(1, 6):
        client.add(request_id, max_tokens=64, cache_salt=str(request_id))
        client.finish(request_id)
        kept = [body for outbox in bench.loop._clients._outboxes.values() for body in outbox.bodies]
        assert sum(b"KVEventBatch" in body for body in kept) <= 1
    is_stuck = False
    bench.until(lambda: num_stored(stuck) == 20)


def test_what_is_on_its_way_to_a_subscriber_that_does_not_read_is_bounded(
    events_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of its socket would hold thousands of messages."""
    bench = events_bench
    bench.worker()
    stuck, client = bench.client(), bench.client()
    monkeypatch.setattr(stuck, "read", lambda: None)
    for request_id in range(1, 6):
        stuck.send(CORE_EPOCH, SubscribeKVEvents(0))
        client.add(request_id, max_tokens=64, cache_salt=str(request_id))
        client.finish(request_id)
    monkeypatch.undo()
    FakeClient.read(stuck)
    assert len(batches(stuck)) == MAX_UNTAKEN_BATCHES


@pytest.mark.parametrize("message", [Control(5, ControlAction.RESUME), SubscribeKVEvents(0)])
def test_a_message_whose_handling_fails_is_answered(
    events_bench: Bench, monkeypatch: pytest.MonkeyPatch, message: Control | SubscribeKVEvents
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    bench = events_bench
    bench.worker()
    client = bench.client()
    monkeypatch.setattr(bench.engine, "control", fail)
    monkeypatch.setattr(bench.loop._clients._events, "_snapshot", fail)
    client.send(CORE_EPOCH, message)
    answers = (ControlDone, KVEventsRefused)
    bench.until(lambda: any(isinstance(message, answers) for message in client.received))
    client.add(1)
    client.finish(1)
    assert not any(answer.ok for answer in done(client).values())

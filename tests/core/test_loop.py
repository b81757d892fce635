"""The core's loop over real sockets goes on, whatever clients and workers do."""

import logging
import re
import time
from collections import deque
from collections.abc import Iterator

import pytest

from core_proc import loop
from core_proc.engine import EngineCore
from core_proc.links import clients
from protocol import message
from protocol.api_core import (
    AbortRequests,
    AddRequest,
    Connect,
    EngineState,
    ErrorCode,
    StepOutputs,
)
from protocol.client.ledger import check_request
from protocol.core_worker import ModelRunnerOutput, PromptLogprobs, TokenLogprobs
from protocol.lifecycle import Drain, Stop
from protocol.message import encode
from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from protocol.transport.channel import Received
from tests.core.loop_bench import CORE_EPOCH, Bench, FakeClient, WorkerEnd, all_tokens


def test_a_request_runs_and_its_tokens_come_in_order(bench: Bench) -> None:
    client = bench.client()
    assert client.statuses[0].state is EngineState.STARTING
    bench.worker()
    bench.until(lambda: client.statuses[-1].state is EngineState.READY)
    client.add(1)
    client.finish(1)
    assert client.tokens(1) == all_tokens(4)


def test_drain_is_reported_when_the_last_request_is_finished(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    client, worker = bench.client(), bench.worker()
    worker.answers = False
    client.add(1)
    bench.until(lambda: worker.unanswered)
    bench.child.inbox.append(Drain())
    bench.until(lambda: client.statuses[-1].state is EngineState.DRAINING)
    assert bench.child.num_drained == 0
    worker.answers = True
    client.finish(1)
    bench.until(lambda: bench.child.num_drained)
    bench.child.inbox.append(Stop())
    bench.loop.run()
    assert bench.child.num_drained == 1


def test_a_core_that_comes_back_is_not_drained_before_its_clients_have_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait begins when workers are ready, whose start may take long."""
    monkeypatch.setattr(loop, "RETURN_S", 0.2)
    bench.loop._has_predecessor = True
    bench.child.inbox.append(Drain())
    for _ in range(300):
        bench.turn()
    assert bench.child.num_drained == 0
    bench.worker()
    began = time.monotonic()
    bench.until(lambda: bench.child.num_drained)
    assert time.monotonic() - began > 0.1


def test_a_core_that_came_back_long_ago_is_drained_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RETURN_S", 0.05)
    bench.loop._has_predecessor = True
    bench.worker()
    bench.until(lambda: bench.loop._are_all_back(time.monotonic()))
    monkeypatch.setattr(loop, "RETURN_S", 3600.0)
    bench.child.inbox.append(Drain())
    bench.until(lambda: bench.child.num_drained)


def test_a_first_core_that_was_asked_nothing_is_drained_at_once(bench: Bench) -> None:
    bench.child.inbox.append(Drain())
    bench.turn()
    bench.turn()
    assert bench.child.num_drained == 1


def test_core_that_leaves_passes_on_what_is_under_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor would have to compute the step again. No new step is begun."""
    monkeypatch.setattr(loop, "LEAVE_S", 60.0)
    client, worker = bench.client(), bench.worker()
    worker.answers = False
    client.add(1, max_tokens=50)
    bench.until(lambda: len(worker.unanswered) == 2)
    bench.child.inbox.append(Stop())
    bench.turn()
    assert not bench.loop._has_left
    for num_tokens in (1, 2):
        worker.send(*worker.compute())
        bench.until(lambda n=num_tokens: len(client.tokens(1)) == n)
    assert not worker.unanswered
    assert bench.loop._has_left
    bench.loop.run()


def test_core_that_leaves_waits_for_no_worker_that_hangs(bench: Bench) -> None:
    client, worker = bench.client(), bench.worker()
    worker.answers = False
    client.add(1)
    bench.until(lambda: worker.unanswered)
    began = time.monotonic()
    while not bench.loop._has_left:
        bench.child.inbox.append(Stop())  # it is repeated
        bench.turn()
        assert time.monotonic() - began < 20 * loop.LEAVE_S


# Clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pid", [2**22 + 1, 2**31 - 1, 2**31, 2**40, 2**64 - 1, -1])
def test_no_pid_in_connect_harms_the_core(bench: Bench, pid: int) -> None:
    stranger, client = FakeClient(bench), bench.client()
    stranger.send(0, Connect(pid))
    bench.worker()
    client.add(1)
    client.finish(1)


def test_a_message_that_raises_in_the_core_costs_only_its_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = EngineCore.add

    def add(engine: EngineCore, client: bytes, message: AddRequest) -> object:
        if message.request_id == 13:
            raise RuntimeError("a bug")
        return real(engine, client, message)

    def abort(engine: EngineCore, client: bytes, request_ids: list[int]) -> None:
        if 14 in request_ids:
            raise RuntimeError("another bug")

    monkeypatch.setattr(EngineCore, "add", add)
    monkeypatch.setattr(EngineCore, "abort", abort)
    bench.worker()
    client = bench.client()
    client.add(13)
    client.send(CORE_EPOCH, AbortRequests([14]))
    client.add(1)
    client.finish(1)
    [refused] = client.refused
    assert (refused.request_id, refused.error.code) == (13, ErrorCode.INTERNAL)
    assert "a bug" in caplog.text
    assert "another bug" in caplog.text


def test_an_unreadable_request_is_refused_alone(bench: Bench) -> None:
    """It is new, or takes the place of an open one; other streams of its client go on."""
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    bench.admit_together(2, lambda: [client.add(i) for i in (1, 300)])
    client.add(300, priority=2**40)
    bench.until(lambda: client.refused)
    [refused] = client.refused
    assert (refused.request_id, refused.error.code) == (300, ErrorCode.INVALID)
    assert refused.error.param == "priority"
    assert refused.error.message == "priority: must be an integer <= 2147483647"
    worker.answers = True
    client.finish(1)
    assert client.tokens(1) == all_tokens(4)
    bench.until(lambda: not bench.engine.has_unfinished)


def test_a_request_that_does_not_fit_into_memory_is_refused_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = clients.decode_from_client._decoder.decode

    class Scarce:
        def decode(self, body: bytes) -> object:
            if b"tenant 13" in body:
                raise MemoryError
            return decode(body)

    bench.worker()
    client = bench.client()
    monkeypatch.setattr(clients.decode_from_client, "_decoder", Scarce())
    client.add(1)
    client.add(2**40, tenant="tenant 13")
    client.finish(1)
    bench.until(lambda: client.refused)
    assert [refused.request_id for refused in client.refused] == [2**40]


def test_a_failed_assertion_in_the_client_path_ends_the_core(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is wrong, and the next core gets the right one from the clients."""

    def broken(*args: object) -> None:
        raise AssertionError("block 3 was free already")

    bench.worker()
    client = bench.client()
    monkeypatch.setattr(EngineCore, "add", broken)
    client.add(1)
    with pytest.raises(AssertionError, match="block 3"):
        bench.until(lambda: False)


def test_an_accepted_prompt_of_350_000_tokens_does_not_hold_the_core(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns take about 5 ms of processor time at most, however busy the machine is."""
    facts = ModelFacts("fake", 151_936, 500_000, 16, 40_000, [2])
    worker, client = WorkerEnd(bench, 5, facts=facts), bench.client()
    worker.answers = False
    worker.join()
    bench.until(lambda: client.statuses[-1].state is EngineState.READY)
    turn, times = bench.loop.turn, list[float]()

    def timed(timeout_ms: int) -> None:
        began = time.thread_time()
        turn(timeout_ms)
        times.append(time.thread_time() - began)

    monkeypatch.setattr(bench.loop, "turn", timed)
    longest = list[float]()
    for request_id in range(1, 4):
        ids = [(request_id + 7 * position) % 50_000 for position in range(350_000)]
        add = AddRequest(request_id, ids, SamplingParams(max_tokens=8))
        assert client.channel.send(CORE_EPOCH, check_request(add, facts)[1])
        bench.until(lambda: bench.engine.stats().num_running_reqs)
        client.send(CORE_EPOCH, AbortRequests([request_id]))
        bench.until(lambda: not bench.engine.has_unfinished)
        worker.join()  # adopted again, so that no step of the last prompt is in flight
        longest.append(max(times))
        times.clear()
    assert not client.refused
    assert min(longest) < 0.015


def messages_by_turn(
    bench: Bench, aborts: AbortRequests, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Send 8 messages; return how many each turn handles when all of them have arrived before."""
    bench.worker()
    client, link = bench.client(), bench.loop._links[0]
    for _ in range(8):
        client.send(CORE_EPOCH, aborts)
    arrived: deque[Received] = deque()

    def have_arrived() -> bool:
        arrived.extend(link.drain(8))
        return len(arrived) == 8

    bench.until(have_arrived, turn=False)

    def drain(limit: int) -> Iterator[Received]:
        for _ in range(min(limit, len(arrived))):
            yield arrived.popleft()

    monkeypatch.setattr(link, "drain", drain)
    counts = []
    while arrived:
        before = len(arrived)
        bench.turn()
        counts.append(before - len(arrived))
    return counts


def test_a_turn_ends_with_the_frame_that_reaches_its_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts of a million tokens must not hold the core past its deadline."""
    monkeypatch.setattr(clients, "DRAIN_S", 3600.0)
    aborts = AbortRequests([2**52] * (clients.DRAIN_BYTES // 16))
    assert messages_by_turn(bench, aborts, monkeypatch) == [2, 2, 2, 2]


def test_a_turn_ends_when_its_time_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "DRAIN_S", 0.0)
    assert messages_by_turn(bench, AbortRequests([1]), monkeypatch) == [1] * 8


def test_an_unreadable_body_is_answered_with_its_number_and_logged_with_the_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    client = bench.client()
    seq = client.channel._frames.next_seq
    assert client.channel.send(CORE_EPOCH, b"\xc1")
    with pytest.MonkeyPatch.context() as foreign:
        foreign.setattr(message, "PROTOCOL_VERSION", 99)
        client.send(CORE_EPOCH, AbortRequests([1]))
    bench.until(lambda: client.refused)
    [refused] = client.refused
    assert (refused.request_id, refused.seq) == (None, seq)
    bench.until(lambda: "unreadable" in caplog.text)
    bench.until(lambda: sum(map(int, re.findall(r"sent (\d+) unreadable", caplog.text))) == 2)
    assert "protocol 99" in caplog.text


def test_frames_of_another_epoch_or_before_connect_are_dropped_and_counted(bench: Bench) -> None:
    client, stranger = bench.client(), FakeClient(bench)
    client.send(CORE_EPOCH + 1, AbortRequests([1]))
    stranger.add(1)
    bench.until(lambda: bench.engine.stats().fenced_frames == 2)


def test_connect_from_a_known_client_drops_its_requests_and_serves_new_ones(bench: Bench) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    bench.admit_together(2, lambda: [client.add(i) for i in (1, 2)])
    client.connect()
    assert bench.engine.stats().num_running_reqs == 0
    worker.answers = True
    client.add(2, output_token_ids=[100, 101], resent=True)
    client.finish(2)
    assert client.tokens(2) == all_tokens(4)[2:]
    assert client.tokens(1) == []


def test_connect_from_a_known_client_drops_its_unsent_messages(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    client.add(1)
    bench.until(lambda: worker.unanswered)
    with monkeypatch.context() as patch:
        patch.setattr(bench.loop._links[0], "send", lambda *_: False)
        worker.answer_all()
        bench.until(lambda: bench.engine.stats().generation_tokens)
        client.send(0, Connect(0))
        bench.until(lambda: not bench.engine.has_unfinished)
    before = len(client.statuses)
    bench.until(lambda: len(client.statuses) > before)
    assert client.rows == []


def test_connect_from_a_known_client_watches_the_process_that_it_names(bench: Bench) -> None:
    """The death of the process that it named before has no effect any more."""
    bench.worker().answers = False
    client = FakeClient(bench)
    client.connect(client.start_process())
    client.connect(0)
    client.add(1)
    bench.until(lambda: bench.engine.has_unfinished)
    client.kill_process()
    before = len(client.statuses)
    bench.until(lambda: len(client.statuses) > before)
    assert bench.engine.has_unfinished


def test_a_client_that_dies_is_forgotten_with_its_requests(bench: Bench) -> None:
    bench.worker().answers = False
    client = FakeClient(bench)
    client.connect(client.start_process())
    client.add(1)
    bench.until(lambda: bench.engine.has_unfinished)
    client.kill_process()
    bench.until(lambda: not bench.engine.has_unfinished)


def test_a_client_that_does_not_read_is_dropped_and_the_others_are_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "troika.core")
    monkeypatch.setattr(clients, "OUTBOX_LIMIT", 20)
    worker, deaf, client = bench.worker(), bench.client(), bench.client()
    worker.answers = False
    monkeypatch.setattr(deaf, "read", lambda: None)
    deaf.add(7)
    bench.until(lambda: bench.engine.has_unfinished)
    bad = b"\xc0" * 8
    while bench.engine.has_unfinished:
        for _ in range(64):  # each is answered
            deaf.channel.send(CORE_EPOCH, bad)  # refused when a slow turn has left many
        bench.turn()
    assert "has left 20 messages unread" in caplog.text
    worker.answers = True
    client.add(1)
    client.finish(1)
    monkeypatch.setattr(deaf, "read", lambda: FakeClient.read(deaf))
    deaf.connect()
    deaf.add(8)
    deaf.finish(8)


def test_outputs_that_exceed_a_frame_are_sent_in_parts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "MAX_FRAME_BYTES", 400)
    bench.worker()
    client = bench.client()
    for request_id in range(60):
        client.add(request_id)
    client.finish(*range(60))
    assert all(client.tokens(request_id) == all_tokens(4) for request_id in range(60))
    steps = [message for message in client.received if isinstance(message, StepOutputs)]
    assert max(len(step.outputs) for step in steps) > 1
    assert max(len(encode(step)) for step in steps) <= 400


def test_a_single_output_that_exceeds_a_frame_fails_its_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    params = SamplingParams(max_tokens=4000, prompt_logprobs=0)
    client.send(CORE_EPOCH, AddRequest(1, [5] * 40, params))
    client.add(2)
    bench.until(lambda: worker.unanswered)
    monkeypatch.setattr(clients, "MAX_FRAME_BYTES", 400)
    epoch, output = worker.compute()
    entries = [TokenLogprobs(5, 0.0, 1, [], []) for _ in range(39)]
    parts = [PromptLogprobs(1, 1, entries)]
    worker.send(
        epoch, ModelRunnerOutput(output.step_id, output.sampled_token_ids, prompt_logprobs=parts)
    )
    worker.answers = True
    client.finish(2)
    [refused] = client.refused
    assert (refused.request_id, refused.error.code) == (1, ErrorCode.INTERNAL)
    assert not bench.engine.has_unfinished


# Workers -------------------------------------------------------------------------------------


def test_state_is_sent_at_once_when_it_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bench.client()
    bench.turn()
    monkeypatch.setattr(loop, "STATUS_INTERVAL_S", 1000.0)
    bench.until(lambda: len(client.statuses) >= 3)
    worker = bench.worker()
    bench.until(lambda: client.statuses[-1].state is EngineState.READY)
    worker.kill_process()
    bench.until(lambda: client.statuses[-1].state is EngineState.RECOVERING)

"""The core's loop and its workers over real sockets: deaths, protocol errors, successors."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from core_proc.engine import EngineCore
from core_proc.kv import kv_cache
from core_proc.links.worker_link import WorkerLink
from core_proc.links.workers import WorkerGroup
from protocol import message
from protocol.adapters import Adapter
from protocol.api_core import AddRequest, EngineState, ErrorCode
from protocol.core_worker import (
    BlocksLoaded,
    ModelRunnerOutput,
    StepFailed,
    WorkerHello,
)
from protocol.lifecycle import DeathCause, Role, Suspect, WorkerDied
from protocol.message import encode
from protocol.process.progress_page import CoreMarks, Death, ProgressPage
from protocol.sampling import SamplingParams
from protocol.transport.channel import PeerGone, Received, RouterChannel
from tests.core.loop_bench import CORE_EPOCH, FACTS, Bench, FakeClient, WorkerEnd, all_tokens

Misdeed = Callable[[WorkerEnd, int, ModelRunnerOutput], None]


def wrong_step(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    worker.send(epoch, ModelRunnerOutput(output.step_id + 1, output.sampled_token_ids))


def wrong_count(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    worker.send(epoch, ModelRunnerOutput(output.step_id, [*output.sampled_token_ids, 7]))


def wrong_token(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    worker.send(epoch, ModelRunnerOutput(output.step_id, [1000 for _ in output.sampled_token_ids]))


def repeated(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    for _ in range(4):
        worker.send(epoch, output)


def unreadable_body(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    assert worker.channel.send(epoch, b"\xc1")


def unasked_load(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    worker.send(epoch, BlocksLoaded(1, 1))


def foreign_header(worker: WorkerEnd, epoch: int, output: ModelRunnerOutput) -> None:
    with pytest.MonkeyPatch.context() as foreign:
        foreign.setattr(message, "PROTOCOL_VERSION", 99)
        assert worker.channel.send(epoch, encode(output))


@pytest.mark.parametrize(
    "misdeed",
    [
        wrong_step,
        wrong_count,
        wrong_token,
        repeated,
        unreadable_body,
        unasked_load,
        foreign_header,
    ],
)
def test_a_worker_that_breaks_the_protocol_is_killed_and_its_successor_continues(
    bench: Bench, misdeed: Misdeed
) -> None:
    worker, client = bench.worker(5), bench.client()
    worker.answers = False
    client.add(1, max_tokens=6)
    bench.until(lambda: worker.unanswered)
    misdeed(worker, *worker.compute())
    bench.until(lambda: bench.state is EngineState.RECOVERING)
    bench.until(lambda: worker.is_killed)
    bench.worker(6)
    client.finish(1)
    assert client.tokens(1) == all_tokens(6)


def test_an_unreadable_frame_of_a_stranger_explains_no_loss(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss awaits its cause: the worker has introduced itself again in a step."""
    crashes: list[None] = []
    monkeypatch.setattr(bench.engine, "attribute_death", lambda **_: crashes.append(None))
    client, worker = bench.client(), bench.worker()
    worker.answers = False
    client.add(1, max_tokens=6)
    bench.until(lambda: worker.unanswered)
    worker.join()
    stranger = WorkerEnd(bench, worker.epoch)
    seen = bench.loop._workers._link.num_read
    assert stranger.channel.send(worker.epoch, b"unreadable", begins=True)
    bench.until(lambda: bench.loop._workers._link.num_read > seen)
    assert not crashes
    assert worker.channel.send(worker.epoch, b"unreadable")
    bench.until(lambda: crashes)


def test_a_worker_of_another_version_that_connects_is_named_once_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It repeats its hello, and otherwise nothing would state why the engine is not ready."""
    stranger = WorkerEnd(bench, 5)
    tag, *fields = msgspec.to_builtins(WorkerHello(0, os.getpid(), FACTS))

    def connect() -> None:
        for _ in range(3):
            seen = bench.loop._workers._link.num_read
            hello = encode([tag, *fields, "of another version"])
            assert stranger.channel.send(5, hello, begins=True)
            bench.until(lambda seen=seen: bench.loop._workers._link.num_read > seen)

    connect()
    assert bench.state is EngineState.STARTING
    assert caplog.text.count("a worker that connects is not used") == 1
    assert "at most length" in caplog.text
    bench.worker(6)
    connect()
    assert caplog.text.count("a worker that connects is not used") == 2, "much later, perhaps"


def test_a_worker_whose_step_failed_may_still_report_why(bench: Bench) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    client.add(1)
    bench.until(lambda: worker.unanswered)
    epoch, step = worker.unanswered.pop()
    worker.send(epoch, StepFailed(step.step_id, "out of memory"))
    bench.until(lambda: bench.state is EngineState.RECOVERING)
    assert not worker.is_killed


def test_results_that_a_worker_sent_before_it_died_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have arrived but are not read when its death is noticed."""
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    client.add(1, max_tokens=1)
    bench.until(lambda: worker.unanswered)
    worker.answer_all()
    link, arrived = bench.loop._links[1], list[Received]()
    really_drain = link.drain
    bench.until(lambda: arrived.extend(link.drain(1)) or arrived, turn=False)

    def drain(limit: int) -> Iterator[Received]:
        while arrived:
            yield arrived.pop(0)
        yield from really_drain(limit)

    monkeypatch.setattr(link, "drain", drain)
    worker.kill_process()
    client.finish(1)


def test_a_worker_and_a_client_may_die_together(bench: Bench) -> None:
    """The worker's last results are for a client whose death is in the same poll."""
    worker, client, other = bench.worker(5), FakeClient(bench), bench.client()
    client.connect(client.start_process())
    worker.answers = False
    bench.admit_together(2, lambda: [end.add(i) for i, end in ((1, client), (2, other))])
    bench.until(lambda: len(worker.unanswered) >= 1)
    worker.answer_all()
    client.close()
    worker.close()
    bench.until(lambda: bench.engine.stats().num_running_reqs == 0)
    bench.worker(6)
    other.finish(2)
    assert other.tokens(2) == all_tokens(4)


def test_a_successor_may_report_while_its_predecessor_and_a_client_are_mourned(
    bench: Bench,
) -> None:
    """Descriptors closed and opened in one turn share their numbers."""
    worker, client, other = bench.worker(5), FakeClient(bench), bench.client()
    client.connect(client.start_process())
    worker.answers = False
    other.add(2)
    bench.until(lambda: worker.unanswered)
    worker.kill_process()
    client.kill_process()
    successor = WorkerEnd(bench, 6)
    successor.join()
    other.finish(2)
    assert not successor.is_killed
    assert bench.state is EngineState.READY
    before = len(other.statuses)
    bench.until(lambda: len(other.statuses) > before)


def test_a_predecessor_that_dies_late_is_not_counted_as_a_death(bench: Bench) -> None:
    """It does not wake every later poll either."""
    old = bench.worker(5)
    bench.worker(6)
    old.close()
    woken_by = [item for item, _ in bench.loop._poller.poll(20)]
    assert not [item for item in woken_by if isinstance(item, int)]
    assert bench.state is EngineState.READY


def test_a_second_hello_raises_the_epoch_and_old_answers_are_fenced(bench: Bench) -> None:
    """A connection lost between two living processes: the identity stays, the steps are gone."""
    worker, client = bench.worker(5), bench.client()
    worker.answers = False
    client.add(1)
    bench.until(lambda: worker.unanswered)
    late = worker.compute()
    worker.unanswered.clear()
    worker.join()
    assert worker.adopted == [5, 6]
    worker.send(*late)
    bench.until(lambda: bench.engine.stats().fenced_frames == 1)
    worker.answers = True
    client.finish(1)
    assert client.tokens(1) == all_tokens(4)
    assert not worker.is_killed


def test_a_core_records_a_received_step_on_its_page() -> None:
    """It is the core's useful work; dispatching alone is not."""
    page, fd = ProgressPage.create("test")
    try:
        with Bench(progress_fd=fd) as bench:
            worker, client = bench.worker(), bench.client()
            worker.answers = False
            client.add(1, max_tokens=2)
            bench.until(lambda: worker.unanswered)
            assert page.last_completing_epoch == 0
            worker.answer_all()
            bench.until(lambda: page.last_completing_epoch == CORE_EPOCH)
    finally:
        page.close()
        os.close(fd)


def test_a_worker_that_is_gone_before_its_adoption_does_not_count(bench: Bench) -> None:
    worker = WorkerEnd(bench, 5)
    worker.kill_process()
    worker.hello()
    client = bench.client()
    before = len(client.statuses)
    bench.until(lambda: len(client.statuses) > before)
    assert bench.state is EngineState.STARTING
    bench.worker(6)


def test_an_adoption_that_cannot_be_sent_does_not_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "troika.core")

    def send(channel: RouterChannel, peer: bytes, epoch: int, body: bytes) -> bool:
        raise PeerGone

    with monkeypatch.context() as patch:
        patch.setattr(RouterChannel, "send", send)
        worker = WorkerEnd(bench, 5)
        worker.hello()
        bench.until(lambda: bench.state is EngineState.RECOVERING)
    assert "adopted" not in caplog.text
    worker.join()
    assert "workers adopted, link epoch 6" in caplog.text


def test_a_worker_that_reads_nothing_is_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = bench.worker(5), bench.client()

    def send(channel: RouterChannel, peer: bytes, epoch: int, body: bytes) -> bool:
        return False

    with monkeypatch.context() as patch:
        patch.setattr(RouterChannel, "send", send)
        client.add(1)
        bench.until(lambda: worker.is_killed)
    assert bench.state is EngineState.RECOVERING
    bench.worker(6)
    client.finish(1)


def test_a_suspected_worker_gets_no_steps_until_it_is_cleared(bench: Bench) -> None:
    """A request that arrives meanwhile is not put into a step that may kill the worker."""
    worker, client = bench.worker(5), bench.client()
    worker.answers = False
    client.add(1)
    bench.until(lambda: len(worker.unanswered) == 2)
    bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 60.0))
    bench.turn()
    client.add(2)
    bench.until(lambda: bench.engine.stats().num_waiting_reqs == 1)
    assert bench.engine.stats().num_running_reqs == 1
    worker.answer_all()
    for _ in range(5):
        bench.turn()
    assert not worker.unanswered, "no further step was sent"
    bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 0.0))
    worker.answers = True
    client.finish(1, 2)
    assert client.tokens(1) == client.tokens(2) == all_tokens(4)


def test_suspicion_expires_if_its_end_is_not_received(bench: Bench) -> None:
    bench.worker(5)
    client = bench.client()
    bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 0.2))
    client.add(1)
    began = time.monotonic()
    bench.until(lambda: bench.engine.stats().num_running_reqs)
    assert time.monotonic() - began > 0.15
    client.finish(1)


def test_suspicion_ends_with_its_incarnation(bench: Bench) -> None:
    """This holds if the message arrives after the successor was adopted, too."""
    bench.worker(5)
    client = bench.client()
    bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 60.0))
    bench.worker(6)
    bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 60.0))
    client.add(1)
    client.finish(1)


def test_marks_are_kept_up_to_date_while_a_worker_is_suspected() -> None:
    """Results still arrive; what they clear or end must not be a suspect of the next core."""
    page, fd = ProgressPage.create("core")
    with Bench(progress_fd=fd) as bench:
        worker, client = bench.worker(5), bench.client()
        worker.answers = False
        client.add(1, max_tokens=2)
        bench.until(lambda: len(worker.unanswered) == 2)
        marks = page.read_marks()
        assert marks is not None
        assert len(marks.marks) == 2, "the stage and one request"
        bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 60.0))
        bench.turn()
        worker.answer_all()
        client.finish(1)
        assert page.read_marks() is None
    page.close()


def test_death_of_a_worker_is_logged_with_its_cause(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.worker(5)
    bench.until(lambda: bench.state is EngineState.READY)
    for _ in range(3):  # it is repeated
        bench.child.inbox.append(WorkerDied(0, 5, DeathCause.SIGNAL, 17))
        bench.turn()
    assert caplog.text.count("worker of epoch 5 died in step 17: signal") == 1


def test_deaths_of_the_predecessor_s_workers_are_not_logged_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.worker(5)
    bench.until(lambda: bench.state is EngineState.READY)
    for epoch, rank in ((3, 0), (4, 1)):
        bench.child.inbox.append(WorkerDied(rank, epoch, DeathCause.SIGNAL, 17))
        bench.turn()
    assert "died" not in caplog.text
    bench.child.inbox.append(WorkerDied(0, 5, DeathCause.SIGNAL, 18))
    bench.turn()
    assert "worker of epoch 5 died in step 18: signal" in caplog.text


@pytest.mark.parametrize(("cause", "warns"), [(DeathCause.ENDED, False), (DeathCause.OOM, True)])
def test_a_worker_that_ends_in_order_causes_no_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture, cause: DeathCause, warns: bool
) -> None:
    caplog.set_level(logging.INFO)
    bench.worker(5)
    bench.until(lambda: bench.state is EngineState.READY)
    bench.child.inbox.append(WorkerDied(0, 5, cause, None))
    bench.turn()
    [level] = [one.levelno for one in caplog.records if "worker of epoch 5" in one.getMessage()]
    assert level == (logging.WARNING if warns else logging.INFO)


@pytest.mark.parametrize(
    ("cause", "is_loaded_anew", "is_reported"),
    [
        (DeathCause.KILLED, True, True),
        (DeathCause.KILLED, False, False),
        (DeathCause.SIGNAL, True, False),
    ],
)
def test_status_reports_that_workers_load_the_model_unless_a_request_is_suspected(
    cause: DeathCause, is_loaded_anew: bool, is_reported: bool
) -> None:
    with Bench() as bench:
        worker = bench.worker(5)
        bench.until(lambda: bench.state is EngineState.READY)
        worker.kill_process()
        bench.child.inbox.append(WorkerDied(0, 5, cause, None, is_loaded_anew))
        bench.until(lambda: bench.state is EngineState.RECOVERING)
        bench.turn()
        assert bench.loop._engine.status().is_loading_anew == is_reported
        bench.worker(6)
        bench.until(lambda: bench.state is EngineState.READY)
        assert not bench.loop._engine.status().is_loading_anew


class RecordingEngine:
    def __init__(self) -> None:
        self.inherited: list[list[int]] = []

    def inherit_marks(self, marks: list[int]) -> None:
        self.inherited.append(marks)


@pytest.mark.parametrize(("died", "is_blamed"), [(4, True), (6, False)])
def test_a_dead_core_is_blamed_for_its_own_steps_only(died: int, is_blamed: bool) -> None:
    """A core that never computed has inherited the steps of one that was killed."""
    engine = RecordingEngine()
    unused: Any = None
    group = WorkerGroup(1, core_epoch=7)
    link = WorkerLink(unused, unused, group, cast(EngineCore, engine), unused, core_epoch=7)
    link.on_core_death(Death(died, DeathCause.DEADLINE, None), CoreMarks(4, [1, 11, 12]))
    assert engine.inherited == ([[1, 11, 12]] if is_blamed else [])


def test_workers_that_die_in_a_load_with_their_core_count_at_its_successor() -> None:
    """The load is in the progress page before a worker gets it, with the worker's epoch."""
    adapter = Adapter("a", "/adapters/a", b"a" * 32)
    page, fd = ProgressPage.create("core")
    for epoch in (5, 6, 7, 8):
        with Bench(progress_fd=fd, enable_lora=True) as bench:
            bench.loop._read_predecessor()
            for death in range(5, epoch):  # deaths are reported again for some seconds
                bench.child.inbox.append(WorkerDied(0, death, DeathCause.KILLED, None))
            worker, client = bench.worker(epoch), bench.client()
            worker.answers = False
            client.add(1, adapter=adapter)
            bench.until(lambda w=worker: w.unanswered)
            loads = page.read_loads()
            assert loads is not None
            assert loads.workers_epoch == epoch
    with Bench(progress_fd=fd, enable_lora=True) as bench:
        bench.loop._read_predecessor()
        bench.child.inbox.append(WorkerDied(0, 8, DeathCause.KILLED, None))
        bench.worker(9)
        client = bench.client()
        client.add(1, adapter=adapter)
        bench.until(lambda: client.refused)
        assert client.refused[0].error.code is ErrorCode.QUARANTINED
    page.close()
    os.close(fd)


@pytest.mark.parametrize("is_suspected", [True, False])
def test_a_prompt_that_is_prepared_in_part_keeps_no_core_busy_without_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_suspected: bool
) -> None:
    """Its preparation goes on with the next step that can be sent, not in a loop until then."""
    monkeypatch.setattr(kv_cache, "_HASHED_AT_ONCE", 16)
    worker, client = bench.worker(5), bench.client()
    prompt = [number % 1000 for number in range(3000)]
    client.send(CORE_EPOCH, AddRequest(1, prompt, SamplingParams(max_tokens=1)))
    bench.until(lambda: bench.engine.is_preparing)
    assert bench.loop._poll_ms() == 0
    if is_suspected:
        bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 60.0))
        bench.turn()
    else:
        worker.kill_process()
        bench.until(lambda: bench.state is EngineState.RECOVERING)
    bench.loop._report()  # the next one is far away
    assert bench.loop._poll_ms() > 0
    if is_suspected:
        bench.child.inbox.append(Suspect(Role.WORKER, 0, 5, 0.0))
    else:
        bench.worker(6)
    client.finish(1)

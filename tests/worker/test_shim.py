"""The worker's end of the link: adoption, and which messages it handles."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from protocol.adapters import Adapter
from protocol.core_worker import (
    AdapterLoaded,
    Adopt,
    BlocksLoaded,
    CachedRequestData,
    CompileGrammar,
    CoreToWorker,
    GrammarCompiled,
    LoadAdapter,
    LoadBlocks,
    ModelFacts,
    ModelRunnerOutput,
    SchedulerOutput,
    Sleep,
    StepFailed,
    StoreBlocks,
    UnloadAdapter,
    WorkerHello,
    WorkerToCore,
    decode_from_worker,
)
from protocol.lifecycle import Role, Stop
from protocol.message import ProtocolError, encode
from protocol.sampling import Grammar, GrammarKind
from protocol.transport.channel import HighWaterMark, Received, RouterChannel
from tests.unsupervised_child import UnsupervisedChild
from worker_proc import loop
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.grammar.compiler import GrammarCompiler, Vocabulary
from worker_proc.loop import QUIET_S, WorkerLoop
from worker_proc.runner import ComputedStep, LaunchedStep, StepAbandoned
from worker_proc.shim import WorkerShim

FACTS = ModelFacts("fake", 1000, 4096, 16, 512, [2])
OWN_EPOCH = 5
PID = 1234
TIMEOUT_S = 30.0


class FakeRunner:
    """Counts calls, and raises `error` if there is one."""

    facts = FACTS
    swap_cost_tokens = 3.5
    grammars: GrammarCompiler | None = None
    adapters: KeptAdapters[str] | None = None

    def __init__(self) -> None:
        self.num_resets = self.num_leaves = 0
        self.num_sleeps = 0
        self.missing_pieces = 1
        self.num_between_steps = self.owed_pieces = 0
        self.executed_at = self.prepared_at = 0.0
        self.error: Exception | None = None

    def leave(self) -> None:
        self.num_leaves += 1

    def reset(self, epoch: int = 0) -> None:
        self.num_resets += 1

    def on_wait(self, report: object) -> None:
        pass

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        if not is_idle:
            self.num_between_steps += 1
            self.owed_pieces -= 1
            return self.owed_pieces > 0
        self.prepared_at = self.prepared_at or time.monotonic()
        self.missing_pieces -= 1
        return self.missing_pieces > 0

    def sleep(self) -> None:
        if self.error is not None:
            raise self.error
        self.num_sleeps += 1

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.error is not None:
            raise self.error
        self.executed_at = time.monotonic()
        return ModelRunnerOutput(step.step_id, [7])

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        return ComputedStep(self.execute(step))


class Launched:
    """A step that a device computes until `is_done` is set, or until it is waited for."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.is_done = False
        self.error: Exception | None = None

    def finish(self) -> ModelRunnerOutput:
        self.is_done = True
        if self.error is not None:
            raise self.error
        return ModelRunnerOutput(self.step_id, [7])


class DeviceRunner(FakeRunner):
    """Launches steps; raises `error` then."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Launched] = []

    def launch(self, step: SchedulerOutput) -> Launched:
        if self.error is not None:
            raise self.error
        self.launched.append(Launched(step.step_id))
        return self.launched[-1]


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, [], CachedRequestData(), {}, 0, [], [])


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def shim(runner: FakeRunner) -> WorkerShim:
    return WorkerShim(runner, 0, PID, OWN_EPOCH)


def test_hello_carries_the_own_epoch_until_an_adoption(shim: WorkerShim) -> None:
    assert shim.hello() == WorkerHello(0, PID, FACTS, 3.5)
    assert shim.epoch == OWN_EPOCH
    assert shim.on_message(9, Adopt(0)) is None
    assert shim.epoch == 9
    shim.end_adoption()
    assert shim.epoch == OWN_EPOCH
    assert shim.hello() == WorkerHello(0, PID, FACTS, 3.5, last_link_epoch=9)


def test_steps_are_executed_in_the_order_of_their_numbers(shim: WorkerShim) -> None:
    shim.on_message(9, Adopt(3))
    assert shim.on_message(9, step(3)) == ModelRunnerOutput(3, [7])
    assert shim.on_message(9, step(4)) == ModelRunnerOutput(4, [7])
    failed = shim.on_message(9, step(6))
    assert failed == StepFailed(6, "ValueError: step 6 came instead of 5")
    assert isinstance(shim.failure, ValueError)


def test_only_rank_0_replies_with_tokens_and_every_rank_with_failures(runner: FakeRunner) -> None:
    shim = WorkerShim(runner, 1, PID, OWN_EPOCH)
    shim.on_message(9, Adopt(0))
    assert shim.on_message(9, step(0)) is None
    runner.error = RuntimeError("x" * 10_000)
    reply = shim.on_message(9, step(1))
    assert isinstance(reply, StepFailed)
    assert len(reply.error) == 4096
    assert shim.failure is runner.error


def test_sleep_is_executed_under_the_epoch_in_force_and_not_answered(
    shim: WorkerShim, runner: FakeRunner
) -> None:
    assert shim.on_message(9, Sleep()) is None
    shim.on_message(9, Adopt(0))
    assert shim.on_message(8, Sleep()) is None
    assert (runner.num_sleeps, shim.num_fenced_frames) == (0, 2)
    assert shim.on_message(9, Sleep()) is None
    assert runner.num_sleeps == 1
    assert shim.on_message(9, step(0)) == ModelRunnerOutput(0, [7])
    runner.error = RuntimeError("requests are mirrored")
    assert shim.on_message(9, Sleep()) is None
    assert shim.failure is runner.error


@pytest.mark.parametrize("epoch", [OWN_EPOCH, 8, 10])
def test_steps_of_another_epoch_are_dropped_and_counted(shim: WorkerShim, epoch: int) -> None:
    assert shim.on_message(epoch, step(0)) is None
    shim.on_message(9, Adopt(0))
    assert shim.on_message(epoch, step(0)) is None
    assert shim.num_fenced_frames == 2
    assert shim.on_message(9, step(0)) == ModelRunnerOutput(0, [7])


def test_an_adoption_forgets_everything_and_each_one_must_be_newer(
    shim: WorkerShim, runner: FakeRunner
) -> None:
    shim.on_message(OWN_EPOCH - 1, Adopt(0))
    assert (shim.link_epoch, runner.num_resets) == (None, 0)
    shim.on_message(9, Adopt(0))
    shim.on_message(9, step(0))
    for epoch in (8, 9):
        shim.on_message(epoch, Adopt(7))
    assert (shim.link_epoch, runner.num_resets, shim.num_fenced_frames) == (9, 1, 3)
    shim.on_message(10, Adopt(7))
    assert (shim.link_epoch, runner.num_resets) == (10, 2)
    assert shim.on_message(10, step(7)) == ModelRunnerOutput(7, [7])


def test_a_new_connection_may_belong_to_a_core_with_a_lower_link_epoch(shim: WorkerShim) -> None:
    """Re-adoptions raised the old link's epoch; the successor counts from its own."""
    shim.on_message(20, Adopt(0))
    shim.end_adoption()
    shim.on_message(6, Adopt(0))
    assert shim.link_epoch == 6


def test_a_step_is_launched_before_the_last_one_is_answered() -> None:
    runner = DeviceRunner()
    shim = WorkerShim(runner, 0, PID, OWN_EPOCH)
    shim.on_message(9, Adopt(0))
    assert (shim.on_message(9, step(0)), shim.take_output()) == (None, None)
    assert shim.on_message(9, step(1)) == ModelRunnerOutput(0, [7])
    first, second = runner.launched
    assert (first.is_done, second.is_done, shim.num_launched) == (True, False, 1)
    assert shim.take_output() is None
    second.is_done = True
    assert shim.take_output() == ModelRunnerOutput(1, [7])
    assert (shim.take_output(), shim.num_launched) == (None, 0)


def test_a_launch_that_fails_is_reported_after_the_step_before_it() -> None:
    runner = DeviceRunner()
    shim = WorkerShim(runner, 0, PID, OWN_EPOCH)
    shim.on_message(9, Adopt(0))
    shim.on_message(9, step(0))
    runner.error = RuntimeError("no memory")
    assert shim.on_message(9, step(1)) == ModelRunnerOutput(0, [7])
    assert shim.failure is None
    assert shim.take_output() == StepFailed(1, "RuntimeError: no memory")
    assert shim.failure is runner.error


def test_a_device_that_fails_fails_the_step_that_it_computed() -> None:
    runner = DeviceRunner()
    shim = WorkerShim(runner, 0, PID, OWN_EPOCH)
    shim.on_message(9, Adopt(0))
    shim.on_message(9, step(0))
    runner.launched[0].error = RuntimeError("illegal address")
    assert shim.on_message(9, step(1)) == StepFailed(0, "RuntimeError: illegal address")
    assert shim.failure is runner.launched[0].error


def test_after_a_step_that_is_abandoned_nothing_counts_until_the_next_adoption() -> None:
    """Blocks that it was to fill would be stored, and later steps build on it."""
    runner = FakeRunner()
    offload = FakeOffload()
    shim = WorkerShim(runner, 0, PID, OWN_EPOCH, offload=offload)  # type: ignore[arg-type]
    shim.on_message(9, Adopt(0))
    runner.error = StepAbandoned("another rank has left the adoption")
    assert shim.on_message(9, step(0)) is None
    assert shim.failure is None
    runner.error = None
    shim.on_message(9, StoreBlocks([1], [b"k"]))
    assert shim.on_message(9, LoadBlocks(1, [1], [b"k"])) is None
    assert shim.on_message(9, step(1)) is None
    assert shim.num_fenced_frames == 3
    assert offload.messages == []
    assert shim.take_prepared() == []
    shim.on_message(10, Adopt(0))
    assert isinstance(shim.on_message(10, step(0)), ModelRunnerOutput)


def test_one_rank_answers_for_all() -> None:
    for rank in range(3):
        shim = WorkerShim(FakeRunner(), rank, PID, OWN_EPOCH, answering_rank=2)
        shim.on_message(9, Adopt(0))
        assert (shim.on_message(9, step(0)) is not None) == (rank == 2)


def test_a_lost_adoption_is_left_once() -> None:
    """So that other ranks do not wait for this one."""
    runner = FakeRunner()
    shim = WorkerShim(runner, 0, PID, OWN_EPOCH)
    shim.end_adoption()
    assert not runner.num_leaves
    shim.on_message(9, Adopt(0))
    shim.end_adoption()
    shim.end_adoption()
    assert runner.num_leaves == 1


class FakeOffload:
    """Records what a worker is to store and to load."""

    def __init__(self) -> None:
        self.messages: list[StoreBlocks | LoadBlocks] = []

    def store(self, message: StoreBlocks) -> None:
        self.messages.append(message)

    def load(self, message: LoadBlocks) -> None:
        self.messages.append(message)

    def begin_adoption(self) -> None:
        pass

    def take_results(self) -> list[BlocksLoaded]:
        return [BlocksLoaded(1, 1)]


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_adoption_drops_the_step_that_is_launched(is_lost: bool) -> None:
    runner = DeviceRunner()
    shim = WorkerShim(runner, 0, PID, OWN_EPOCH)
    shim.on_message(9, Adopt(0))
    shim.on_message(9, step(0))
    runner.launched[0].is_done = True
    if is_lost:
        shim.end_adoption()
        assert shim.take_output() is None
    shim.on_message(10, Adopt(5))
    assert shim.take_output() is None
    assert shim.on_message(10, step(5)) is None
    assert runner.launched[-1].step_id == 5


# The loop ------------------------------------------------------------------------------------


class Bench:
    """A worker's loop and the core's socket, run in turns."""

    def __init__(self, run_dir: str, runner: FakeRunner) -> None:
        self.child = UnsupervisedChild(Role.WORKER, run_dir, OWN_EPOCH)
        self.core = self.bind()
        self.loop = WorkerLoop(self.child, runner, clock=time, poller=zmq.Poller())
        self.received: list[tuple[Received, WorkerToCore]] = []

    def bind(self) -> RouterChannel:
        return RouterChannel(
            self.child.context, self.child.core_worker_address, HighWaterMark.WORKER_LINK
        )

    def close(self) -> None:
        self.loop._core.close()
        self.core.close()
        self.child.context.term()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "the condition has not come true"
            assert self.loop.turn(5)
            for received in self.core.drain(16):
                self.received.append((received, decode_from_worker(received.body)))

    @property
    def hellos(self) -> list[Received]:
        return [item for item, message in self.received if isinstance(message, WorkerHello)]

    @property
    def replies(self) -> list[WorkerToCore]:
        return [item for _, item in self.received if not isinstance(item, WorkerHello)]

    def send(self, epoch: int, message: CoreToWorker) -> None:
        assert self.core.send(self.hellos[-1].peer, epoch, encode(message))


@pytest.fixture
def bench(tmp_path: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(loop, "HELLO_INTERVAL_S", 0.05)
    running = Bench(str(tmp_path), runner)
    yield running
    running.close()


def test_hello_is_repeated_until_a_core_adopts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "troika.worker")
    bench.until(lambda: len(bench.hellos) >= 3)
    timeout_ms = bench.loop._poll_ms()
    assert timeout_ms is not None
    assert timeout_ms <= 51
    assert {item.header.epoch for item in bench.hellos} == {OWN_EPOCH}
    bench.send(9, step(0))
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    assert bench.replies == [ModelRunnerOutput(0, [7])]
    assert bench.received[-1][0].header.epoch == 9
    assert "link epoch 9; 1 frames" in caplog.text


def test_no_hello_is_sent_to_a_core_that_has_adopted(bench: Bench) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    bench.until(lambda: bench.loop._poll_ms() is None)
    num_hellos = len(bench.hellos)
    deadline = time.monotonic() + 0.12
    bench.until(lambda: time.monotonic() > deadline)
    assert len(bench.hellos) == num_hellos


def test_memory_is_prepared_in_pieces_when_no_step_comes(bench: Bench, runner: FakeRunner) -> None:
    bench.until(lambda: runner.missing_pieces == 0)  # also before the first step
    runner.missing_pieces, runner.prepared_at = 3, 0.0
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    bench.until(lambda: runner.missing_pieces == 0)
    assert runner.prepared_at - runner.executed_at >= QUIET_S
    assert bench.loop._poll_ms() is None  # nothing is missing until another step comes
    bench.send(9, step(1))
    bench.until(lambda: runner.missing_pieces < 0)


def test_memory_is_prepared_after_the_reply_to_each_step(bench: Bench, runner: FakeRunner) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    bench.until(lambda: runner.num_between_steps == 1)
    bench.send(9, step(1))
    bench.until(lambda: runner.num_between_steps == 2)
    bench.until(lambda: len(bench.replies) == 2)


def test_owed_memory_is_prepared_until_the_next_step_arrives(
    bench: Bench, runner: FakeRunner
) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    runner.owed_pieces = 10**9
    for number in range(3):
        bench.send(9, step(number))
    bench.until(lambda: len(bench.replies) == 3)
    runner.owed_pieces, runner.num_between_steps = 9, 0
    bench.until(lambda: runner.owed_pieces == 0)
    assert not bench.loop._owes_memory
    assert runner.num_between_steps == 9


def test_a_core_that_is_silent_is_asked_again_and_one_that_beats_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core may have dropped its worker, and the next Hello may have been lost."""
    monkeypatch.setattr(loop, "SILENCE_S", 0.2)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: bench.replies)
    num_hellos, began = len(bench.hellos), time.monotonic()
    while time.monotonic() - began < 0.6:
        bench.core.beat()
        assert bench.loop.turn(5)
    assert len(bench.hellos) == num_hellos
    bench.until(lambda: len(bench.hellos) > num_hellos)
    bench.send(10, Adopt(1))
    bench.send(10, step(1))
    bench.until(lambda: len(bench.replies) == 2)


def test_the_next_core_is_greeted_and_adopts_under_any_epoch(bench: Bench) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(20, Adopt(0))
    bench.send(20, step(0))
    bench.until(lambda: bench.replies)
    bench.core.close()
    bench.core = bench.bind()
    before = len(bench.hellos)
    bench.until(lambda: len(bench.hellos) > before)
    bench.send(6, Adopt(4))
    bench.send(6, step(4))
    bench.until(lambda: ModelRunnerOutput(4, [7]) in bench.replies)


def test_a_step_that_raises_is_reported_and_ends_the_loop(bench: Bench, runner: FakeRunner) -> None:
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    runner.error = RuntimeError("no memory")
    bench.send(9, step(0))
    with pytest.raises(RuntimeError, match="no memory"):
        bench.until(lambda: False)
    deadline, received = time.monotonic() + TIMEOUT_S, list[WorkerToCore]()
    while not any(isinstance(message, StepFailed) for message in received):
        assert time.monotonic() < deadline
        bench.core.socket.poll(100)
        received += [decode_from_worker(item.body) for item in bench.core.drain(16)]
    replies = [message for message in received if not isinstance(message, WorkerHello)]
    assert replies == [StepFailed(0, "RuntimeError: no memory")]


def test_a_launched_step_is_answered_when_it_is_done(tmp_path: Path) -> None:
    """Also if no message comes; meanwhile the loop does not sleep."""
    runner = DeviceRunner()
    bench = Bench(str(tmp_path), runner)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: runner.launched)
    assert bench.loop._poll_ms() == 0
    assert not bench.replies
    runner.launched[0].is_done = True
    bench.until(lambda: bench.replies)
    assert bench.replies == [ModelRunnerOutput(0, [7])]
    bench.until(lambda: bench.loop._poll_ms() is None)
    bench.close()


def test_an_unreadable_message_of_the_core_ends_the_loop(bench: Bench) -> None:
    bench.until(lambda: bench.hellos)
    bench.core.send(bench.hellos[-1].peer, 9, b"\xc1")
    with pytest.raises(ProtocolError):
        bench.until(lambda: False)


def test_a_worker_stops_on_stop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    bench.child.inbox.append(Stop())
    bench.loop.run()


# Grammars ------------------------------------------------------------------------------------


def test_a_grammar_is_answered_when_it_is_ready_and_steps_continue_meanwhile(
    tmp_path: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SILENCE_S", TIMEOUT_S)  # the core sends nothing while it waits
    runner.grammars = GrammarCompiler(Vocabulary(1000, [2]))
    bench = Bench(str(tmp_path), runner)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    good, bad = (Grammar(GrammarKind.REGEX, source) for source in ("[a-z]+", "[a-z"))
    bench.send(9, CompileGrammar(3, bad))
    bench.send(9, CompileGrammar(4, good))
    bench.send(9, step(0))
    bench.until(lambda: len(bench.replies) == 3)
    first, second, third = bench.replies
    assert first == ModelRunnerOutput(0, [7])
    assert isinstance(second, GrammarCompiled)
    assert (second.grammar_id, third) == (3, GrammarCompiled(4))
    assert "unclosed" in second.error
    assert bench.received[-1][0].header.epoch == 9
    bench.send(9, CompileGrammar(5, good))
    bench.until(lambda: len(bench.replies) == 4)
    assert bench.replies[-1] == GrammarCompiled(5)
    bench.close()


def test_an_adapter_is_answered_when_it_is_loaded_and_steps_continue_meanwhile(
    tmp_path: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SILENCE_S", TIMEOUT_S)  # the core sends nothing while it waits
    may_read = threading.Event()

    def read(adapter: Adapter) -> str:
        assert may_read.wait(TIMEOUT_S)
        return adapter.name

    runner.adapters = KeptAdapters(read, 1)
    bench = Bench(str(tmp_path), runner)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    adapter = Adapter("a", "/a", b"a" * 32)
    bench.send(9, LoadAdapter(adapter))
    bench.send(9, step(0))
    bench.until(lambda: len(bench.replies) == 1)
    assert bench.replies == [ModelRunnerOutput(0, [7])]
    may_read.set()
    bench.until(lambda: len(bench.replies) == 2)
    assert bench.replies[-1] == AdapterLoaded(adapter.adapter_id)
    assert adapter.adapter_id in runner.adapters
    bench.send(9, UnloadAdapter(adapter.adapter_id))
    bench.until(lambda: adapter.adapter_id not in runner.adapters)
    bench.close()


def test_a_runner_without_adapters_refuses_them(shim: WorkerShim) -> None:
    shim.on_message(8, Adopt(0))
    adapter = Adapter("a", "/a", b"a" * 32)
    answer = shim.on_message(8, LoadAdapter(adapter))
    assert answer == AdapterLoaded(adapter.adapter_id, "this worker takes no adapters")


def test_a_runner_without_grammars_refuses_them(shim: WorkerShim) -> None:
    shim.on_message(8, Adopt(0))
    answer = shim.on_message(8, CompileGrammar(3, Grammar(GrammarKind.REGEX, "a")))
    assert answer == GrammarCompiled(3, "this worker cannot compile grammars")

"""The worker's end of the link: adoption, and which messages it handles."""

import pytest

from protocol.adapters import Adapter
from protocol.core_worker import (
    AdapterLoaded,
    Adopt,
    BlocksLoaded,
    CompileGrammar,
    GrammarCompiled,
    LoadAdapter,
    LoadBlocks,
    ModelRunnerOutput,
    Sleep,
    StepFailed,
    StoreBlocks,
    WorkerHello,
)
from protocol.sampling import Grammar, GrammarKind
from tests.worker.fake_runner import FACTS, DeviceRunner, FakeRunner, step
from tests.worker.loop_bench import OWN_EPOCH
from worker_proc.runner import StepAbandoned
from worker_proc.shim import WorkerShim

PID = 1234


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
    """Other ranks then do not wait for this one."""
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


# Grammars ------------------------------------------------------------------------------------


def test_a_runner_without_adapters_refuses_them(shim: WorkerShim) -> None:
    shim.on_message(8, Adopt(0))
    adapter = Adapter("a", "/a", b"a" * 32)
    answer = shim.on_message(8, LoadAdapter(adapter))
    assert answer == AdapterLoaded(adapter.adapter_id, "this worker takes no adapters")


def test_a_runner_without_grammars_refuses_them(shim: WorkerShim) -> None:
    shim.on_message(8, Adopt(0))
    answer = shim.on_message(8, CompileGrammar(3, Grammar(GrammarKind.REGEX, "a")))
    assert answer == GrammarCompiled(3, "this worker cannot compile grammars")

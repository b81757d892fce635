"""The worker's loop writes its phase, step and deadline into its progress page."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.core_worker import Adopt, ModelRunnerOutput, SchedulerOutput
from protocol.process import child_runtime
from protocol.process.progress_page import Phase, ProgressPage, ProgressRecord
from tests.unsupervised_child import UnsupervisedChild
from tests.worker import loop_bench
from tests.worker.fake_runner import DeviceRunner, FakeRunner, step
from tests.worker.loop_bench import OWN_EPOCH, Bench


class WatchedRunner(FakeRunner):
    """Reads the progress page while it computes."""

    def __init__(self, page: ProgressPage, fd: int) -> None:
        super().__init__()
        self.page = page
        self.fd = fd
        self.marks: list[ProgressRecord | None] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.marks.append(self.page.read())
        return super().execute(step)


@pytest.fixture
def runner() -> Iterator[WatchedRunner]:
    page, fd = ProgressPage.create("test")
    yield WatchedRunner(page, fd)
    page.close()
    os.close(fd)


@pytest.fixture
def bench(
    tmp_path: Path, runner: WatchedRunner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    monkeypatch.setattr(child_runtime, "show_stacks", lambda: None)
    monkeypatch.setattr(
        loop_bench,
        "UnsupervisedChild",
        lambda *arguments: UnsupervisedChild(*arguments, progress_fd=runner.fd, hang_timeout_s=3.0),
    )
    running = Bench(str(tmp_path), runner)
    yield running
    running.close()


def test_each_step_is_marked_before_it_is_computed(bench: Bench, runner: WatchedRunner) -> None:
    """The first step of a size has more time; an idle worker ticks."""
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    assert runner.page.last_completing_epoch == 0
    for step_id in range(2):
        bench.send(9, step(step_id))
    bench.until(lambda: len(bench.replies) == 2)
    marks = [mark for mark in runner.marks if mark is not None]
    assert [(mark.epoch, mark.phase, mark.step_id) for mark in marks] == [
        (OWN_EPOCH, Phase.STEP, 0),
        (OWN_EPOCH, Phase.STEP, 1),
    ]
    assert [mark.limit_s for mark in marks] == [60.0, 3.0]
    assert runner.page.last_completing_epoch == OWN_EPOCH
    assert bench.loop.turn(5)
    last = runner.page.read()
    assert last is not None
    assert last.step_id is None
    assert last.limit_s == 3.0
    bench.until(lambda: bench.loop._poll_ms() == 500)  # it wakes without a message


def test_a_rank_that_does_not_reply_records_its_steps(bench: Bench, runner: WatchedRunner) -> None:
    """A step of another epoch, and one that fails, are not completed."""
    bench.loop._shim._answers = False
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(8, step(0))
    bench.until(lambda: bench.loop._shim.num_fenced_frames)
    assert runner.page.last_completing_epoch == 0
    bench.send(9, step(0))
    bench.until(lambda: runner.page.last_completing_epoch == OWN_EPOCH)
    assert not bench.replies
    runner.page.write_completed(0)
    runner.error = ValueError("bad")
    bench.send(9, step(1))
    with pytest.raises(ValueError, match="bad"):
        bench.until(lambda: False)
    assert runner.page.last_completing_epoch == 0


def test_a_launched_step_keeps_its_deadline_until_it_is_done(
    tmp_path: Path, runner: WatchedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that never ends a step is noticed, although the loop goes on."""
    monkeypatch.setattr(
        loop_bench,
        "UnsupervisedChild",
        lambda *arguments: UnsupervisedChild(*arguments, progress_fd=runner.fd, hang_timeout_s=3.0),
    )
    device = DeviceRunner()
    bench = Bench(str(tmp_path), device)
    bench.until(lambda: bench.hellos)
    bench.send(9, Adopt(0))
    bench.send(9, step(0))
    bench.until(lambda: device.launched)
    began = runner.page.read()
    for _ in range(3):
        assert bench.loop.turn(0)
    assert runner.page.read() == began
    assert began is not None
    assert (began.phase, began.step_id, began.limit_s) == (Phase.STEP, 0, 60.0)
    bench.send(9, step(1))
    bench.until(lambda: bench.replies)
    later = runner.page.read()
    assert later is not None
    assert (later.phase, later.step_id, later.limit_s) == (Phase.STEP, 1, 120.0), "of both steps"
    assert runner.page.last_completing_epoch == OWN_EPOCH
    device.launched[1].is_done = True
    bench.until(lambda: len(bench.replies) == 2)
    assert bench.loop.turn(0)
    last = runner.page.read()
    assert last is not None
    assert last.phase is Phase.TURN
    bench.close()

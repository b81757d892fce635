"""The progress page: another process reads complete entries or none."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from protocol.config import RecoveryConfig
from protocol.lifecycle import DeathCause
from protocol.process.progress import ProgressReporter
from protocol.process.progress_page import (
    _LOADS,
    _PROGRESS_STRUCT,
    MAX_LOADS,
    MAX_MARKS,
    PAGE_BYTES,
    CoreLoads,
    CoreMarks,
    Death,
    MarkEdits,
    Phase,
    ProgressPage,
    ProgressRecord,
)
from tests.paths import ROOT
from tests.timing import within

RECOVERY = RecoveryConfig(hang_timeout_s=2.0, startup_timeout_s=100.0)
EPOCH = 7


@pytest.fixture
def shared() -> Iterator[tuple[ProgressPage, int]]:
    """A page and its descriptor."""
    page, fd = ProgressPage.create("test")
    yield page, fd
    page.close()
    os.close(fd)


@pytest.fixture
def page(shared: tuple[ProgressPage, int]) -> ProgressPage:
    return shared[0]


def whole(marks: Sequence[int]) -> MarkEdits:
    """The edits that replace all marks."""
    return MarkEdits(len(marks), dict(enumerate(marks)))


def test_new_page_is_empty(page: ProgressPage) -> None:
    assert page.read() == ProgressRecord(0, Phase.NONE, None, 0, 0)
    assert page.read_marks() is None
    assert page.read_loads() is None
    assert page.read_death() is None


def test_a_completed_step_belongs_to_one_incarnation(shared: tuple[ProgressPage, int]) -> None:
    """A successor that writes the same page has not completed it."""
    page, fd = shared
    assert page.last_completing_epoch == 0
    for epoch in (EPOCH, EPOCH + 1):
        reporter = ProgressReporter(fd, epoch, RECOVERY)
        reporter.step(3, 1.0)
        reporter.idle()
        assert page.last_completing_epoch != epoch
        reporter.step_completed()
        assert page.last_completing_epoch == epoch
        reporter.close()


def test_what_is_written_is_read_on_the_other_side(shared: tuple[ProgressPage, int]) -> None:
    """The other side maps the same descriptor again."""
    page, fd = shared
    other = ProgressPage(fd)
    page.write(EPOCH, Phase.STEP, 0, 5, 2**62)
    assert other.read() == ProgressRecord(EPOCH, Phase.STEP, 0, 5, 2**62)
    page.write(EPOCH, Phase.IDLE, None, 6, 7)
    assert other.read() == ProgressRecord(EPOCH, Phase.IDLE, None, 6, 7)
    other.close()


def test_torn_write_is_not_read_and_the_next_writer_repairs_it(page: ProgressPage) -> None:
    """The writer died between two words."""
    page.write(EPOCH, Phase.TURN, None, 1, 2)
    page._words[8] += 1  # the state at the beginning of a write
    page._words[11] = 12345
    assert page.read() is None
    page.write(EPOCH + 1, Phase.NONE, None, 0, 0)
    assert page.read() == ProgressRecord(EPOCH + 1, Phase.NONE, None, 0, 0)


def test_nonsense_in_a_page_is_not_read_and_harms_no_reader(
    page: ProgressPage,
) -> None:
    """A process with corrupted memory may write anything into the page."""
    rng = random.Random(0)
    for number in range(2000):
        for _ in range(rng.randint(1, 8)):
            page._words[rng.choice([8, 9, 10, 11, 12, 13, 16, 64, 65, 67])] = rng.choice(
                [0, 6, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)]
            )
        mark = page.read()
        assert mark is None or mark.phase in Phase, number
        page.read_marks()
    page.write(EPOCH, Phase.IDLE, None, 6, 7)
    assert page.read() == ProgressRecord(EPOCH, Phase.IDLE, None, 6, 7)


def test_reader_never_sees_two_writes_mixed() -> None:
    """Another process writes marks at full speed, each with equal fields."""
    page, fd = ProgressPage.create("test")
    script = (
        "import sys\nfrom protocol.process.progress_page import *\n"
        "page = ProgressPage(int(sys.argv[1]))\n"
        "for n in range(10**9): page.write(n, Phase.TURN, n, n, n)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(fd)], cwd=ROOT, pass_fds=[fd]) as it:
        try:
            deadline, seen = time.monotonic() + 60.0, set()
            while len(seen) < 2000:
                assert time.monotonic() < deadline
                mark = page.read()
                if mark is not None and mark.phase is Phase.TURN:
                    numbers = {mark.epoch, mark.step_id, mark.began_ns, mark.deadline_ns}
                    assert len(numbers) == 1, mark
                    seen |= numbers
        finally:
            it.kill()
    page.close()
    os.close(fd)


def test_marks_survive_their_writer(page: ProgressPage) -> None:
    page.write_marks(EPOCH, whole([11, 2**64 - 11]))
    assert page.read_marks() == CoreMarks(EPOCH, [11, 2**64 - 11])
    page.write_marks(EPOCH, MarkEdits(3, {1: 12, 2: 13}))
    assert page.read_marks() == CoreMarks(EPOCH, [11, 12, 13])
    page.write_marks(EPOCH, whole([]))
    assert page.read_marks() is None


def test_marks_that_were_not_written_completely_do_not_count(page: ProgressPage) -> None:
    page.write_marks(EPOCH, whole([1]))
    page._words[64] += 1
    assert page.read_marks() is None
    page.write_marks(EPOCH + 1, whole([2]))
    assert page.read_marks() == CoreMarks(EPOCH + 1, [2])


def test_marks_past_the_bound_are_cut(page: ProgressPage) -> None:
    page.write_marks(EPOCH, whole(range(MAX_MARKS + 3)))
    assert page.read_marks() == CoreMarks(EPOCH, list(range(MAX_MARKS)))


def test_loads_survive_their_writer(page: ProgressPage) -> None:
    page.write_marks(EPOCH, whole(range(MAX_MARKS)))
    page.write_loads(CoreLoads(EPOCH, [11, 2**64 - 11]))
    assert page.read_loads() == CoreLoads(EPOCH, [11, 2**64 - 11])
    page.write_loads(CoreLoads(EPOCH + 1, list(range(MAX_LOADS + 3))))
    assert page.read_loads() == CoreLoads(EPOCH + 1, list(range(MAX_LOADS)))
    assert page.read_marks() == CoreMarks(EPOCH, list(range(MAX_MARKS)))
    page.write_loads(CoreLoads(EPOCH, []))
    assert page.read_loads() is None


def test_loads_that_were_not_written_completely_do_not_count(page: ProgressPage) -> None:
    page.write_loads(CoreLoads(EPOCH, [1]))
    page._words[_LOADS] += 1
    assert page.read_loads() is None
    page.write_loads(CoreLoads(EPOCH, [2]))
    assert page.read_loads() == CoreLoads(EPOCH, [2])


@pytest.mark.parametrize("step_id", [None, 0, 5])
def test_a_death_is_read_as_it_was_written(page: ProgressPage, step_id: int | None) -> None:
    page.write_death(Death(3, DeathCause.OOM, step_id))
    assert page.read_death() == Death(3, DeathCause.OOM, step_id)


@pytest.mark.parametrize("cause", [6, 2**63])
def test_death_of_an_unknown_cause_is_not_read(
    shared: tuple[ProgressPage, int], cause: int
) -> None:
    """A new core that raised an error here could never start."""
    page, fd = shared
    page.write_death(Death(3, DeathCause.OOM, 1))
    os.pwrite(fd, cause.to_bytes(8, sys.byteorder), 17 * 8)
    assert page.read_death() is None


def test_page_cannot_be_taken_from_under_its_readers(shared: tuple[ProgressPage, int]) -> None:
    """A shorter file would kill its reader with SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(shared[1], 0)


def test_descriptor_of_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(ValueError, match="not hold a progress page"):
        ProgressPage(fd)
    os.close(fd)


def test_each_phase_has_its_time(shared: tuple[ProgressPage, int]) -> None:
    """A step has its own, a turn that of the setting, a load half of the start's."""
    page, fd = shared
    reporter = ProgressReporter(fd, EPOCH, RECOVERY)

    def last() -> tuple[Phase, float, int | None]:
        mark = page.read()
        assert mark is not None
        assert mark.epoch == EPOCH
        assert abs(mark.began_ns / 1e9 - time.monotonic()) < 60.0, "CLOCK_MONOTONIC"
        return mark.phase, mark.limit_s, mark.step_id

    assert last() == (Phase.STARTING, 50.0, None)
    reporter.load("weights", 1)
    assert last() == (Phase.LOAD, 50.0, None)
    reporter.idle()
    assert last() == (Phase.IDLE, 2.0, None)
    reporter.turn()
    assert last() == (Phase.TURN, 2.0, None)
    reporter.step(8, 3.5)
    assert last() == (Phase.STEP, 3.5, 8)
    assert reporter.tick_ms == 500
    assert reporter.page is not None
    reporter.page.close()


def test_a_wait_for_another_process_restarts_the_time_of_a_step(
    shared: tuple[ProgressPage, int],
) -> None:
    page, fd = shared
    reporter = ProgressReporter(fd, EPOCH, RECOVERY)
    reporter.step(7, 3.5)
    before = page.read()
    reporter.waits()
    after = page.read()
    assert before is not None
    assert after is not None
    assert after.deadline_ns > before.deadline_ns
    assert (after.phase, after.step_id, after.limit_s) == (Phase.STEP, 7, 3.5)


def test_only_visible_progress_extends_a_load(shared: tuple[ProgressPage, int]) -> None:
    page, fd = shared
    reporter = ProgressReporter(fd, EPOCH, RECOVERY)
    began = []
    for phase, done in (("weights", 1), ("weights", 1), ("weights", 2), ("pack", 2)):
        reporter.load(phase, done)
        mark = page.read()
        assert mark is not None
        began.append(mark.began_ns)
    assert began[0] == began[1] < began[2] < began[3]
    assert reporter.page is not None
    reporter.page.close()


def test_without_a_page_nothing_is_written_and_polls_may_last() -> None:
    reporter = ProgressReporter(None, EPOCH, RECOVERY)
    reporter.idle()
    reporter.step(1, 1.0)
    reporter.load("weights", 1)
    assert reporter.tick_ms is None


def test_a_mark_costs_less_than_five_times_its_words(shared: tuple[ProgressPage, int]) -> None:
    """The measure is a loop that reads the clock and packs the five words of a mark.

    A busy machine slows both loops down alike: on one that packs the words in 0.23 us, the bound
    is 1.2 us.
    """
    reporter = ProgressReporter(shared[1], EPOCH, RECOVERY)
    clock, pack, words = time.monotonic_ns, _PROGRESS_STRUCT.pack_into, bytearray(64)

    def write_words() -> None:
        for step_id in range(20_000):
            now = clock()
            pack(words, 8, EPOCH, 5, step_id, now, now + 1)

    def write_marks() -> None:
        for step_id in range(20_000):
            reporter.step(step_id, 2.0)

    def measure() -> dict[str, float]:
        words_s, marks_s = (
            min(thread_seconds(act) for _ in range(3)) for act in (write_words, write_marks)
        )
        return {"ratio": marks_s / words_s}

    within(5, measure, ratio=5.0)
    assert reporter.page is not None
    reporter.page.close()


def thread_seconds(act: Callable[[], None]) -> float:
    """Return the processor time of a call, without that of other threads."""
    began = time.thread_time()
    act()
    return time.thread_time() - began


def test_successor_with_another_page_inherits_what_was_left(
    shared: tuple[ProgressPage, int],
) -> None:
    """The death, the marks and the loads; its own progress stays."""
    page, _ = shared
    other, fd = ProgressPage.create("other")
    other.write_marks(1, whole([99]))  # of the time when it was another's page
    other.write(EPOCH, Phase.IDLE, None, 5, 6)
    page.write(EPOCH - 1, Phase.STEP, 3, 1, 2)
    page.write_marks(EPOCH - 1, whole([11, 12]))
    page.write_loads(CoreLoads(EPOCH - 2, [13]))
    page.write_death(Death(EPOCH - 1, DeathCause.OOM, 3))
    other.inherit(page)
    assert other.read_loads() == CoreLoads(EPOCH - 2, [13])
    assert other.read_marks() == CoreMarks(EPOCH - 1, [11, 12])
    assert other.read_death() == Death(EPOCH - 1, DeathCause.OOM, 3)
    assert other.read() == ProgressRecord(EPOCH, Phase.IDLE, None, 5, 6)
    other.close()
    os.close(fd)

"""The watcher in virtual time: suspicion, its end, and the times at which it checks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.lifecycle import Role
from protocol.process.progress_page import Phase, ProgressRecord
from scripts.supervisor.actions import Slot
from scripts.supervisor.watcher import HangStatus, Watcher

CORE, WORKER = Slot(Role.CORE), Slot(Role.WORKER)
LIVING = {CORE: 1, WORKER: 2}
LONGEST_LOOK_S = 1.0


def mark(
    slot: Slot, began: float, limit_s: float = 2.0, epoch: int | None = None
) -> ProgressRecord:
    began_ns = int(began * 1e9)
    epoch = LIVING[slot] if epoch is None else epoch
    return ProgressRecord(epoch, Phase.TURN, None, began_ns, began_ns + int(limit_s * 1e9))


class Night:
    """A watcher, its clock, and the marks that it reads."""

    def __init__(self) -> None:
        self.watcher = Watcher(LONGEST_LOOK_S)
        self.now = 100.0
        self.marks = {slot: mark(slot, self.now) for slot in LIVING}
        self.living = dict(LIVING)

    def look(self) -> list[tuple[Slot, HangStatus]]:
        reports = self.watcher.look(self.living, self.marks, self.now)
        return [(report.slot, report.status) for report in reports]

    def until(self, end: float) -> list[tuple[float, Slot, HangStatus]]:
        """Look whenever it is due until then; everything found, with the time."""
        found = []
        while True:
            found += [(round(self.now, 3), *report) for report in self.look()]
            assert self.watcher.next_look is not None
            if self.watcher.next_look > end:
                self.now = end
                return found
            self.now = self.watcher.next_look


def test_suspected_at_once_its_time_and_overdue_at_twice() -> None:
    night = Night()
    night.marks[CORE] = mark(CORE, 100.0, limit_s=50.0)
    assert night.until(110.0) == [
        (102.0, WORKER, HangStatus.SUSPECT),
        (104.0, WORKER, HangStatus.OVERDUE),
    ]


def test_visible_progress_restarts_the_time() -> None:
    """A load of hours is never suspected while it progresses."""
    night = Night()
    for number in range(50):
        night.marks = {slot: mark(slot, 100.0 + 1.9 * number) for slot in LIVING}
        assert night.until(100.0 + 1.9 * (number + 1)) == []


def test_progress_ends_a_suspicion() -> None:
    night = Night()
    night.marks[CORE] = mark(CORE, 100.0, limit_s=50.0)
    night.until(103.0)
    night.marks[WORKER] = mark(WORKER, 102.9)
    assert night.look() == [(WORKER, HangStatus.CLEARED)]
    assert night.until(104.8) == []


def test_phase_without_a_deadline_is_not_watched() -> None:
    night = Night()
    night.marks = {WORKER: ProgressRecord(2, Phase.NONE, None, 0, 0)}
    assert night.until(1000.0) == []


def test_mark_that_cannot_be_read_is_the_last_one() -> None:
    """The writer was stopped in the middle of a write, which never ends."""
    night = Night()
    night.look()
    night.marks = {}
    judged = [status for _, _, status in night.until(110.0)]
    assert judged == [HangStatus.SUSPECT] * 2 + [HangStatus.OVERDUE] * 2


def test_watcher_that_overslept_extends_every_deadline() -> None:
    """Processes that were suspected before get one too."""
    night = Night()
    night.marks[CORE] = mark(CORE, 100.0, limit_s=60.0)
    assert night.until(102.5) == [(102.0, WORKER, HangStatus.SUSPECT)]
    night.now = 107.0
    assert night.look() == [(WORKER, HangStatus.CLEARED)]
    assert night.until(109.5) == [(109.0, WORKER, HangStatus.SUSPECT)]
    assert night.until(112.0) == [(111.0, WORKER, HangStatus.OVERDUE)]


def test_watcher_that_is_a_little_late_kills_no_process_at_its_first_check() -> None:
    """At least half of the time lies between suspicion and death."""
    night = Night()
    night.marks = {WORKER: mark(WORKER, 96.5)}
    assert night.look() == [(WORKER, HangStatus.SUSPECT)]
    assert night.until(103.0) == [(101.0, WORKER, HangStatus.OVERDUE)]


def test_marks_of_another_incarnation_are_ignored() -> None:
    night = Night()
    night.until(103.0)
    night.living = {CORE: 1, WORKER: 3}
    night.marks = {CORE: mark(CORE, 103.0, 60.0), WORKER: mark(WORKER, 100.0)}
    assert night.until(110.0) == [(103.0, CORE, HangStatus.CLEARED)]
    night.marks[WORKER] = mark(WORKER, 110.0, epoch=3)
    assert night.until(112.5) == [(112.0, WORKER, HangStatus.SUSPECT)]


def test_idle_processes_need_one_check_a_second() -> None:
    """Two idle processes that tick every half second need one check a second."""
    night, num_looks = Night(), 0
    while night.now < 200.0:
        tick = night.now - night.now % 0.5
        night.marks = {slot: mark(slot, tick) for slot in LIVING}
        assert night.look() == []
        num_looks += 1
        assert night.watcher.next_look is not None
        night.now = night.watcher.next_look
    assert num_looks <= 101


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 1.9), st.floats(0.0, 12.0), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_a_process_that_keeps_its_deadlines_is_never_killed(
    steps: list[tuple[float, float, bool]],
) -> None:
    """This holds however long the machine or the watcher is stopped in between."""
    night, began = Night(), 100.0
    for duration, standstill, stops_all in steps:
        night.marks = {WORKER: mark(WORKER, began)}
        assert HangStatus.OVERDUE not in [j for _, _, j in night.until(night.now + duration)]
        if stops_all:  # all processes are frozen together, and wake together
            night.now += standstill
            assert (WORKER, HangStatus.OVERDUE) not in night.look()
        began = night.now

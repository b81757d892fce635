"""The processes and groups of ranks of the policy. Each object changes only its own fields."""

import logging
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from protocol.lifecycle import Drain, Fatal, ProcessState, Progress, Remarks, Role, Stop
from scripts.supervisor.actions import (
    Action,
    Kill,
    Note,
    Origin,
    Send,
    Slot,
    Start,
    api_slot,
    replica_slot,
)

MIN_SERVICE_S = 1.0
"""Seconds as Ready after which an idle process counts as useful, if its start took less time."""
_FIRST_BACKOFF_S = 0.1
_MAX_DOUBLINGS = 32


class Process:
    """One slot and its present incarnation. Only methods of this class change its fields."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.epoch = 0
        self.state = ProcessState.STOPPED
        self.num_restarts = -1
        self.is_alive = False
        self.is_doomed = False
        self.is_overdue = False
        """SIGKILL was sent because a deadline had passed."""
        self.started_at = 0.0
        self.ready_at: float | None = None
        self.deadline: float | None = None
        """Time at which the process is killed; progress of a start extends it."""
        self.asked: Drain | Stop | None = None
        self.last_progress: Progress | None = None
        self.fatal: Fatal | None = None
        self.remarks: list[str] = []

    @property
    def serves(self) -> bool:
        """Whether it is ready and was not killed."""
        return self.is_alive and not self.is_doomed and self.state is ProcessState.READY

    @property
    def is_coming(self) -> bool:
        """Whether it is starting and was not killed."""
        return self.is_alive and not self.is_doomed and self.state is ProcessState.STARTING

    def expect(self) -> None:
        """Show a start that waits for the zygote as starting."""
        self.state = ProcessState.STARTING

    def begin(
        self, epoch: int, now: float, deadline: float, origin: Origin = Origin.STARTED
    ) -> Start:
        assert not self.is_alive, f"{self.slot} has a process already"
        assert epoch > self.epoch
        self.epoch = epoch
        self.state = ProcessState.STARTING
        self.num_restarts += 1
        self.is_alive = True
        self.is_doomed = self.is_overdue = False
        self.started_at, self.ready_at = now, None
        self.deadline = deadline
        self.asked = self.last_progress = self.fatal = None
        self.remarks = []
        return Start(self.slot, epoch, origin)

    def on_message(self, message: object, deadline: float) -> None:
        """Extend the deadline of a start that continues. Repeated progress does not count."""
        if isinstance(message, Fatal):
            self.fatal = message
        if isinstance(message, Remarks):
            self.remarks = message.lines
            return
        if self.state is not ProcessState.STARTING or self.is_doomed:
            return
        if isinstance(message, Progress):
            if message == self.last_progress:
                return
            self.last_progress = message
        self.deadline = deadline

    def on_ready(self, now: float) -> bool:
        """End the start; returns whether this changed anything."""
        if self.state is not ProcessState.STARTING or self.is_doomed:
            return False
        self.state = ProcessState.READY
        self.ready_at = now
        self.deadline = None
        return True

    def on_death(self, *, is_final: bool) -> None:
        """Free the slot: the process was reaped, or promoted. A final death has no successor."""
        assert self.is_alive, f"{self.slot} died twice"
        self.is_alive = False
        self.deadline = None
        self.remarks = []
        self.state = ProcessState.STOPPED if is_final else ProcessState.BACKOFF

    def on_shutdown(self) -> None:
        """Remove the deadline: the shutdown has one for all processes."""
        self.deadline = None
        if not self.is_alive:
            self.state = ProcessState.STOPPED

    def exchange(self, predecessor: "Process") -> None:
        """Exchange slots with a predecessor that leaves."""
        self.slot, predecessor.slot = predecessor.slot, self.slot
        self.num_restarts = predecessor.num_restarts + 1

    def was_useful(self, now: float, step_id: int | None, *, has_completed_step: bool) -> bool:
        """Return whether this incarnation, which has just died, did useful work.

        It has completed a step, or it had none to compute and served for as long as its start took.
        Immediate restarts after such deaths cannot keep the processors busy with starts alone.
        """
        if has_completed_step:
            return True
        if self.ready_at is None or self.is_overdue or step_id is not None:
            return False
        return now - self.ready_at >= max(MIN_SERVICE_S, self.ready_at - self.started_at)

    def leave(self, deadline: float, message: Drain | Stop) -> list[Action]:
        """Request the process to end; it is killed at the deadline."""
        self.state = ProcessState.DRAINING
        self.deadline = deadline
        return self.ask(message)

    def drain(self) -> list[Action]:
        """Request the process to finish its requests, without a deadline for this process alone."""
        if self.state is ProcessState.READY:
            self.state = ProcessState.DRAINING
        return self.ask(Drain())

    def on_drained(self) -> None:
        """Record that it has finished; a process that was starting can now receive messages."""
        if self.state is ProcessState.STARTING:
            self.state = ProcessState.DRAINING

    def ask(self, message: Drain | Stop) -> list[Action]:
        """Request the process to end; `ask_again` repeats the request until it has ended."""
        self.asked = message
        return [Send(self.slot, message)]

    def ask_again(self) -> list[Action]:
        """Repeat the request to end, because the message may have been lost."""
        if self.asked is None or not self.is_alive or self.is_doomed:
            return []
        return [Send(self.slot, self.asked)]

    def extend_deadline(self, seconds: float) -> None:
        """Add time in which the supervisor did not run."""
        if self.deadline is not None:
            self.deadline += seconds

    def kill(self, *, is_overdue: bool = False, spares_zygote: bool = False) -> list[Action]:
        """Kill it, unless it is dead or was killed. `is_overdue`: it hangs."""
        if not self.is_alive or self.is_doomed:
            return []
        self.is_doomed = True
        self.is_overdue = is_overdue
        self.deadline = None
        return [Kill(self.slot, spares_zygote)]

    def on_deadline(self) -> list[Action]:
        """Kill the process. If it was requested to end and is late, it does not count as hung."""
        is_leaving = self.state is ProcessState.DRAINING
        what = "does not end in time" if is_leaving else "has made no progress in its start"
        severity = logging.WARNING if is_leaving else logging.ERROR
        note = Note(severity, f"{self.slot} {what}; it is killed")
        return [note, *self.kill(is_overdue=not is_leaving)]


class Group:
    """Processes that are replaced together: all ranks of one role, or one process alone.

    API processes, replicas and zygotes are alone. Only the methods of this class change its fields.
    """

    def __init__(self, slots: Sequence[Slot], spare_slot: Slot | None = None) -> None:
        self.role = slots[0].role
        self.name = str(slots[0])
        self.processes = [Process(slot) for slot in slots]
        self._spare_slot = spare_slot
        self.spare: Process | None = None
        """One more process during a planned restart: the successor, then the predecessor."""
        self.is_leaving = False
        """The processes were requested to end and will be replaced, so their deaths do not
        count."""
        self.resume_at: float | None = None
        """Time at which the successors start, if all predecessors are dead by then."""
        self.is_failing = False
        """True if one rank has died and the others were killed."""
        self.num_deaths = 0
        """Number of consecutive deaths without useful work before them, including the last."""
        self.num_failures = 0
        """Number of these deaths that were not caused by SIGKILL or SIGTERM."""

    @property
    def members(self) -> list[Process]:
        """All processes, the spare one included."""
        return [*self.processes, *([] if self.spare is None else [self.spare])]

    @property
    def is_vacant(self) -> bool:
        """Whether its slots are free; a spare process does not count."""
        return not any(process.is_alive for process in self.processes)

    @property
    def serves(self) -> bool:
        return all(process.serves for process in self.processes)

    @property
    def is_coming(self) -> bool:
        """Whether processes are starting and none is missing."""
        are_coming = all(process.serves or process.is_coming for process in self.processes)
        return are_coming and not self.serves

    @property
    def is_ready(self) -> bool:
        return all(process.state is ProcessState.READY for process in self.processes)

    @property
    def ready_since(self) -> float | None:
        """Time at which the last rank of this incarnation became ready; None: not all are ready."""
        return latest(process.ready_at for process in self.processes)

    def begin(
        self, next_epoch: Callable[[], int], now: float, deadline: float, origin: Origin
    ) -> list[Action]:
        """Start all processes. Those of one incarnation of the group have consecutive epochs."""
        self.resume_at = None
        self.is_failing = self.is_leaving = False
        return [process.begin(next_epoch(), now, deadline, origin) for process in self.processes]

    def resume(self, at: float) -> None:
        """Start the processes at that time, or once the slots are free."""
        self.resume_at = at

    def vacate(self, now: float) -> None:
        """Free the slots of a standby that was promoted, which is its useful work."""
        for process in self.processes:
            process.on_death(is_final=False)
        self.num_deaths = self.num_failures = 0
        self.resume_at = now

    def count_death(self, status: int, *, was_useful: bool) -> None:
        """Count a death; one after useful work begins a new row."""
        if was_useful:
            self.num_deaths = self.num_failures = 0
        self.num_deaths += 1
        self.num_failures += status not in (-signal.SIGKILL, -signal.SIGTERM)

    def replace(self, at: float) -> list[Action]:
        """Kill the remaining ranks after a death, and start all of them again.

        A rank that is not forked yet, and its zygote, are not involved in the death of another.
        """
        self.is_failing = True
        self.resume_at = at
        spare = self.spare
        is_leaving = spare is not None and spare.state is ProcessState.DRAINING
        doomed = self.processes if is_leaving else self.members
        return [action for process in doomed for action in process.kill(spares_zygote=True)]

    def on_shutdown(self) -> None:
        """Start no further processes."""
        self.resume_at = None
        for process in self.members:
            process.on_shutdown()

    def leave(self, deadline: float, message: Drain | Stop) -> list[Action]:
        self.is_leaving = True
        return [action for p in self.processes for action in p.leave(deadline, message)]

    def begin_spare(self, epoch: int, now: float, deadline: float) -> list[Action]:
        """Start a successor alongside the process."""
        assert self._spare_slot is not None
        self.spare = Process(self._spare_slot)
        return [self.spare.begin(epoch, now, deadline)]

    def promote_spare(self) -> tuple[Process, Process]:
        """Exchange process and spare; returns the new process and its predecessor."""
        (old,), new = self.processes, self.spare
        assert new is not None
        self.processes, self.spare = [new], old
        new.exchange(old)
        return new, old

    def remove_spare(self) -> Process:
        spare, self.spare = self.spare, None
        assert spare is not None
        return spare

    def delay_s(self, longest_s: float, rng: random.Random) -> float:
        """Return the pause before the next start: none, then one that doubles, with jitter."""
        if self.num_deaths == 1:
            return 0.0
        doublings = min(self.num_deaths - 2, _MAX_DOUBLINGS)
        return min(_FIRST_BACKOFF_S * 2.0**doublings, longest_s) * rng.uniform(0.5, 1.0)


class Groups:
    """All groups of an engine, in the order in which they are started."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._groups = list(groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __contains__(self, role: Role) -> bool:
        return bool(self.of(role))

    def __getitem__(self, role: Role) -> Group:
        """Return the only group of a role, or the first."""
        return self.of(role)[0]

    def of(self, role: Role) -> list[Group]:
        """Return the groups of a role: one per API, replica or zygote; otherwise at most one."""
        return [group for group in self._groups if group.role is role]

    def find(self, slot: Slot) -> tuple[Group, Process]:
        return next((g, p) for g in self._groups for p in g.members if p.slot == slot)


def make_groups(num_ranks: Mapping[Role, int]) -> Groups:
    """Return groups of `num_ranks[role]` processes of each role, in the mapping's order."""
    groups: list[Group] = []
    for role, number in num_ranks.items():
        if role is Role.API:
            for index in range(number):
                spare = api_slot(index, number, is_spare=True)
                groups.append(Group([api_slot(index, number)], spare))
        elif role is Role.REPLICA:
            groups += [Group([replica_slot(index)]) for index in range(number)]
        elif role is Role.ZYGOTE:
            groups += [Group([Slot(role, rank)]) for rank in range(number)]
        else:
            groups.append(Group([Slot(role, rank) for rank in range(number)]))
    return Groups(groups)


def latest(times: Iterable[float | None]) -> float | None:
    """Return the greatest of the times; None if one of them is None."""
    known = list(times)
    return None if None in known else max(time for time in known if time is not None)


def phase_name(phase: str) -> str:
    """Return a phase of a start as it is shown to users."""
    return phase.replace("_", " ")

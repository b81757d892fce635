"""Supervision as a state machine: events and a clock in, actions out. No sockets, no processes.

The ranks of one role form a group that lives and dies together. A group is started again only when
the death of all its processes is known, with a greater epoch and after a pause that doubles with
every death in a row. The first start is special: what would fail again ends the engine.
"""

import enum
import logging
import random
from collections.abc import Callable, Mapping

from protocol.config import RecoveryConfig
from protocol.lifecycle import (
    Drain,
    Drained,
    Fatal,
    Hello,
    ProcessState,
    Progress,
    Ready,
    Role,
    Stop,
)
from protocol.progress_page import Mark
from scripts.supervisor.crash_loop import CrashLoop
from scripts.supervisor.death_causes import Evidence, classify, story
from scripts.supervisor.planned_restarts import PlannedRestarts
from scripts.supervisor.succession import HANDOVER_TIMEOUT_S, HELPERS, Succession
from scripts.supervisor.supervised import (
    Action,
    Announce,
    DumpStacks,
    Exit,
    Group,
    Note,
    Origin,
    Process,
    Show,
    Slot,
    Tell,
)
from scripts.supervisor.testimony import Testimony
from scripts.supervisor.watcher import Judgement, Verdict, Watcher

STOP_GRACE_S = 5.0
"""From Stop to SIGKILL, for all processes together."""
CRASH_LOOP_DEATHS = 5
_LONGEST_LOOK_S = 1.0
_NO_EVIDENCE = Evidence()
_STOP_ORDER = (Role.API, Role.CORE, Role.WORKER, *HELPERS)
_DRAIN_ORDER = (Role.API, Role.CORE)


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()


class Supervision:
    """Decides which process runs when. Every method returns what is to be done, in order."""

    def __init__(
        self,
        recovery: RecoveryConfig,
        num_ranks: Mapping[Role, int],
        next_epoch: Callable[[], int],
        rng: random.Random,
        *,
        is_api_alone: bool = False,
    ) -> None:
        """Supervise `num_ranks[role]` processes of each role, started in the mapping's order.

        Args:
            recovery: deadlines and pauses.
            num_ranks: by role.
            next_epoch: issues epochs, ever increasing.
            rng: for jitter.
            is_api_alone: whether an API must have ended before its successor starts.
        """
        self._recovery = recovery
        self._next_epoch = next_epoch
        self._rng = rng
        self._groups = {role: Group(role, number) for role, number in num_ranks.items()}
        self._succession = Succession(self._groups)
        self._planned = PlannedRestarts(self._groups, recovery, next_epoch, is_api_alone)
        self._phase = _Phase.RUNNING
        self._was_ready = False
        self._deadline: float | None = None
        """Of draining or stopping."""
        self._fronts = [role for role in _DRAIN_ORDER if role in self._groups]
        self._stages = [role for role in _STOP_ORDER if role in self._groups]
        self._told: set[Role] = set()
        self._is_front_drained = False
        self._exit_status = 0
        self._watcher = Watcher(min(_LONGEST_LOOK_S, recovery.hang_timeout_s / 2))
        self._testimony = Testimony(self._groups.get(Role.CORE))
        self._crash_loop = CrashLoop(recovery.give_up_after_s, self._groups)
        self.failure: str | None = None
        """Why the engine gave up."""

    @property
    def processes(self) -> list[Process]:
        """All slots, for reports."""
        return [process for group in self._groups.values() for process in group.members]

    @property
    def is_ready(self) -> bool:
        """Whether every process serves that is needed for requests."""
        needed = [group for role, group in self._groups.items() if role not in HELPERS]
        return self._phase is _Phase.RUNNING and all(group.is_ready for group in needed)

    @property
    def state(self) -> ProcessState:
        """The engine as a whole."""
        if self._phase is not _Phase.RUNNING:
            return ProcessState.DRAINING
        return ProcessState.READY if self.is_ready else ProcessState.STARTING

    def find(self, epoch: int) -> Process | None:
        """The living process of that epoch."""
        return next((p for p in self.processes if p.is_alive and p.epoch == epoch), None)

    def next_deadline(self) -> float | None:
        """When `tick` is due at the latest; None: only after an event."""
        times = [self._deadline, self._planned.deadline]
        times += [process.deadline for process in self.processes]
        times += [self._due_at(group) for group in self._groups.values()]
        return min((time for time in times if time is not None), default=None)

    @property
    def next_look(self) -> float | None:
        """When `look` is due at the latest; None: it was not called yet."""
        return self._watcher.next_look

    # Events -------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        """Start everything; nobody waits, but a worker for its zygote."""
        actions: list[Action] = []
        for role, group in self._groups.items():
            group.resume_at = now
            if role is Role.ZYGOTE or self._due_at(group) is not None:
                actions += self._start(group, now)
            elif role is Role.WORKER:
                group.processes[0].state = ProcessState.STARTING
        return actions

    def on_message(
        self, epoch: int, message: Hello | Progress | Ready | Fatal | Drained, now: float
    ) -> list[Action]:
        """A child has spoken. Words of the dead are ignored."""
        process = self.find(epoch)
        if process is None:
            return []
        if process.state is ProcessState.STARTING and process.moves_on(message):
            process.deadline = now + self._recovery.startup_timeout_s
        match message:
            case Progress():
                return [Show(process.slot, message)]
            case Ready():
                return self._on_ready(process, message, now)
            case Fatal():
                process.fatal = message
            case Drained():
                return self._on_drained(process, now)
        return []

    def on_death(
        self, slot: Slot, status: int, now: float, evidence: Evidence = _NO_EVIDENCE
    ) -> list[Action]:
        """A child is dead and reaped; `status` is negative for a signal."""
        group = self._groups[slot.role]
        process = group.members[slot.rank]
        assert process.is_alive, f"{slot} died twice"
        process.is_alive = False
        process.deadline = None
        if process is group.spare:
            return self._on_spare_death(group, process, status, now)
        if self._phase is _Phase.STOPPING:
            process.state = ProcessState.STOPPED
            return self._advance_stop()
        process.state = ProcessState.BACKOFF
        if group.is_failing:
            return self._resume(group, now)
        cause = classify(
            status, process.fatal, is_overdue=process.is_overdue, is_oom=evidence.is_oom
        )
        text = story(process, status, cause, evidence.step_id)
        words = self._testimony.death(process, cause, evidence.step_id)
        if group.is_leaving:
            return words + self._on_left(group, text, now)
        group.count_death(status, now)
        self._crash_loop.death(slot.role, cause, now)
        if self._is_hopeless(group, process) or self._crash_loop.is_over(now):
            return self._give_up(process, text, now)
        actions: list[Action] = [Note(logging.WARNING, text), *words]
        if self._phase is _Phase.DRAINING and slot.role is self._fronts[0]:
            return actions + self._begin_stop(now)
        group.is_failing = True
        group.resume_at = now + group.delay_s(self._recovery.restart_backoff_max_s, self._rng)
        return actions + group.kill() + self._resume(group, now) + self._crash_loop.news(now)

    def on_restart(self, role: Role, now: float) -> tuple[str | None, list[Action]]:
        """Asked to replace the processes of a role. Returns why not, or None; and what to do."""
        if self._phase is not _Phase.RUNNING:
            return "the engine is stopping", []
        return self._planned.ask(role, now)

    def on_signal(self, now: float) -> list[Action]:
        """Asked to end: drain first; asked again: end at once."""
        if self._phase is _Phase.RUNNING:
            self._phase = _Phase.DRAINING
            self._deadline = now + self._recovery.shutdown_timeout_s
            text = "finishing what runs; another signal stops at once"
            return [Note(logging.INFO, text), *self._drain_next(now)]
        if self._phase is _Phase.DRAINING:
            self._exit_status = 1
        return self.on_orphaned(now)

    def on_orphaned(self, now: float) -> list[Action]:
        """Nobody waits for results any more: kill everything."""
        stop = [] if self._phase is _Phase.STOPPING else self._begin_stop(now)
        return stop + self._kill_all()

    def tick(self, now: float) -> list[Action]:
        """Do what is due by now."""
        actions: list[Action] = []
        for process in self.processes:
            if process.deadline is not None and process.deadline <= now:
                limit_s = self._recovery.startup_timeout_s
                text = f"{process.slot} has made no progress for {limit_s:g} s; it is killed"
                actions += [Note(logging.ERROR, text), *process.kill_overdue()]
        for group in self._groups.values():
            actions += self._resume(group, now)
        actions += self._planned.tick(now)
        if self._deadline is None or now < self._deadline:
            return actions
        if self._phase is _Phase.DRAINING:
            text = f"requests still run after {self._recovery.shutdown_timeout_s:g} s"
            return [*actions, Note(logging.WARNING, text), *self._begin_stop(now)]
        return actions + self._end_stop(now)

    # Watching -----------------------------------------------------------------------------------

    def look(self, marks: Mapping[Slot, Mark], now: float) -> list[Action]:
        """Find out who hangs, from what could be read of the progress pages."""
        living = {p.slot: p.epoch for p in self.processes if p.is_alive and not p.is_doomed}
        verdicts = self._watcher.look(living, marks, now)
        return [action for verdict in verdicts for action in self._act_on(verdict)]

    def _act_on(self, verdict: Verdict) -> list[Action]:
        slot, mark = verdict.slot, verdict.mark
        process = self._groups[slot.role].processes[slot.rank]
        step = "" if mark.step_id is None else f" {mark.step_id}"
        what = f"{slot} ({mark.phase.name.lower()}{step})"
        if verdict.judgement is Judgement.CLEARED:
            note = Note(logging.WARNING, f"{what} goes on after {verdict.age_s:.1f} s")
            return [note, *self._testimony.suspicion(process, False)]
        text = f"{what} has shown no progress for {verdict.age_s:.1f} s"
        if verdict.judgement is Judgement.SUSPECT:
            suspicion = self._testimony.suspicion(process, True)
            return [Note(logging.WARNING, text), DumpStacks(slot), *suspicion]
        return [Note(logging.ERROR, f"{text}; it is killed"), *process.kill_overdue()]

    # Starting -----------------------------------------------------------------------------------

    def _start(self, group: Group, now: float) -> list[Action]:
        origin = self._succession.origin(group.role)
        group.begin()
        if origin is Origin.PROMOTED:
            self._succession.hand_over(now)
        is_alone = origin is Origin.STARTED
        deadline = now + (self._recovery.startup_timeout_s if is_alone else HANDOVER_TIMEOUT_S)
        return [process.begin(self._next_epoch(), deadline, origin) for process in group.processes]

    def _due_at(self, group: Group) -> float | None:
        if group.role in HELPERS and self._phase is not _Phase.RUNNING:
            return None
        return self._succession.due_at(group)

    def _resume(self, group: Group, now: float) -> list[Action]:
        due = self._due_at(group)
        return [] if due is None or now < due else self._start(group, now)

    def _on_ready(self, process: Process, message: Ready, now: float) -> list[Action]:
        if process.state is not ProcessState.STARTING or process.is_doomed:
            return []
        process.state = ProcessState.READY
        process.deadline = None
        group = self._groups[process.slot.role]
        actions: list[Action] = [Show(process.slot, message), *self._testimony.pending()]
        if process is group.spare:
            return actions + self._planned.on_spare_ready(group, now)
        if group.is_ready:
            group.ready_since = now
        if self.is_ready and not self._was_ready:
            self._was_ready = True
            actions.append(Announce())
        return actions + self._crash_loop.news(now)

    # Dying --------------------------------------------------------------------------------------

    def _is_hopeless(self, group: Group, process: Process) -> bool:
        """Only a first start is given up: afterwards there are requests to come back for."""
        if self._was_ready or self._phase is not _Phase.RUNNING or group.role is Role.STANDBY:
            return False
        told = process.fatal is not None and not process.fatal.retry
        return told or group.num_failures >= CRASH_LOOP_DEATHS

    def _give_up(self, process: Process, text: str, now: float) -> list[Action]:
        hint = process.fatal.hint if process.fatal is not None else ""
        self.failure = text + (f"\nhint: {hint}" if hint else "")
        self._exit_status = 1
        return self._begin_stop(now)

    def _on_left(self, group: Group, text: str, now: float) -> list[Action]:
        """Who was asked to leave has left."""
        group.is_failing = True
        group.resume_at = now
        return [Note(logging.INFO, text), *group.kill(), *self._resume(group, now)]

    def _on_spare_death(
        self, group: Group, process: Process, status: int, now: float
    ) -> list[Action]:
        note = Note(logging.INFO, f"{process.slot} ended with status {status}")
        actions = [note, *self._planned.on_spare_death(group)]
        if self._phase is _Phase.STOPPING:
            return actions + self._advance_stop()
        return actions + self._advance_drain(now)

    # Ending -------------------------------------------------------------------------------------

    def _drain_next(self, now: float) -> list[Action]:
        """Outermost first: what the API has accepted still needs the core."""
        if not self._fronts or self._recovery.shutdown_timeout_s == 0:
            return self._begin_stop(now)
        front = self._groups[self._fronts[0]].processes[0]
        if front.state is not ProcessState.READY:
            return self._begin_stop(now)
        front.state = ProcessState.DRAINING
        return [Tell(front.slot, Drain())]

    def _on_drained(self, process: Process, now: float) -> list[Action]:
        """Only the front is asked to say that; who is replaced ends by itself."""
        if self._phase is not _Phase.DRAINING or process.slot.role is not self._fronts[0]:
            return []
        self._is_front_drained = True
        return self._advance_drain(now)

    def _advance_drain(self, now: float) -> list[Action]:
        """The next front, if nobody of this one has anything to finish."""
        if not self._is_front_drained or self._groups[self._fronts[0]].spare is not None:
            return []
        self._is_front_drained = False
        self._fronts.pop(0)
        return self._drain_next(now)

    def _begin_stop(self, now: float) -> list[Action]:
        self._phase = _Phase.STOPPING
        self._deadline = now + STOP_GRACE_S
        for group in self._groups.values():
            group.resume_at = None
        for process in self.processes:
            process.deadline = None
            process.state = process.state if process.is_alive else ProcessState.STOPPED
        return self._advance_stop()

    def _advance_stop(self) -> list[Action]:
        while self._stages and self._groups[self._stages[0]].is_gone:
            self._stages.pop(0)
        if not self._stages:
            self._deadline = None
            return [Exit(self._exit_status)]
        role = self._stages[0]
        if role in self._told:
            return []
        self._told.add(role)
        return [action for p in self._groups[role].members for action in _stop(p)]

    def _end_stop(self, now: float) -> list[Action]:
        kills = self._kill_all()
        if kills:
            self._deadline = now + STOP_GRACE_S
            return [Note(logging.WARNING, "processes that do not stop are killed"), *kills]
        self._deadline = None
        return [Note(logging.ERROR, "processes survived SIGKILL"), Exit(1)]

    def _kill_all(self) -> list[Action]:
        return [action for group in self._groups.values() for action in group.kill()]


def _stop(process: Process) -> list[Action]:
    """Whoever is still starting does not listen yet, and helpers have nothing to lose."""
    if not process.is_alive:
        return []
    if process.state is ProcessState.STARTING or process.slot.role in HELPERS:
        return process.kill()
    return [Tell(process.slot, Stop())]

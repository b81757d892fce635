"""Supervision as a state machine: events and a clock in, actions out. No sockets, no processes.

The ranks of one role form a group that lives and dies together. A group is started again only when
the death of all its processes is known, with a greater epoch and after a pause that doubles with
every death in a row. The first start is special: what would fail again ends the engine.
"""

import logging
import random
from collections.abc import Callable, Mapping

from protocol.config import RecoveryConfig
from protocol.lifecycle import (
    REPEAT_S,
    Drained,
    Fatal,
    Hello,
    ProcessState,
    Progress,
    Ready,
    Role,
)
from protocol.progress_page import ProgressRecord
from scripts.supervisor.crash_loop import CrashLoop
from scripts.supervisor.death_causes import Evidence, classify, story
from scripts.supervisor.ending import Ending
from scripts.supervisor.planned_restarts import PlannedRestarts
from scripts.supervisor.succession import HANDOVER_TIMEOUT_S, HELPERS, STANDBY_OF, Succession
from scripts.supervisor.supervised import (
    Action,
    Announce,
    DumpStacks,
    Group,
    Note,
    Origin,
    Process,
    Show,
    Slot,
)
from scripts.supervisor.testimony import Testimony
from scripts.supervisor.watcher import Judgement, Verdict, Watcher

CRASH_LOOP_DEATHS = 5
_LONGEST_LOOK_S = 1.0
_LONGEST_TURN_S = 1.0
"""Between two of them; a supervisor that takes twice as long stood still."""
_NO_EVIDENCE = Evidence()


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
        self._ending = Ending(self._groups, recovery)
        self.was_ready = False
        """Whether everybody was, at once; from then on no start is given up."""
        self._turned_at = self._repeat_at = 0.0
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
        return not self._ending.has_begun and all(group.is_ready for group in needed)

    @property
    def state(self) -> ProcessState:
        """The engine as a whole."""
        if self._ending.has_begun:
            return ProcessState.DRAINING
        return ProcessState.READY if self.is_ready else ProcessState.STARTING

    def find(self, epoch: int) -> Process | None:
        """The living process of that epoch."""
        return next((p for p in self.processes if p.is_alive and p.epoch == epoch), None)

    def next_deadline(self) -> float:
        """When `tick` is due at the latest."""
        times = [self._turned_at + _LONGEST_TURN_S, self._ending.deadline, self._planned.deadline]
        times += [process.deadline for process in self.processes]
        times += [self._due_at(group) for group in self._groups.values()]
        return min(time for time in times if time is not None)

    @property
    def next_look(self) -> float | None:
        """When `look` is due at the latest; None: it was not called yet."""
        return self._watcher.next_look

    # Events -------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        """Start everything; nobody waits, but a worker for its zygote."""
        self._turned_at = now
        actions: list[Action] = []
        for role, group in self._groups.items():
            group.resume_at = now
            if role is Role.ZYGOTE or self._due_at(group) is not None:
                actions += self._start(group, now)
            elif role is Role.WORKER:
                group.processes[0].state = ProcessState.STARTING
        return actions

    def on_turn(self, now: float) -> None:
        """To be called first where anything is: who waits, waits on the supervisor's time.

        Time in which it stood still itself is nobody's fault. A turn's own time passes for all, so
        that nobody waits for ever where every turn takes long.
        """
        stood_s = now - self._turned_at - _LONGEST_TURN_S
        self._turned_at = now
        if stood_s > _LONGEST_TURN_S:
            self._planned.pardon(stood_s)
            self._ending.pardon(stood_s)
            for process in self.processes:
                if process.deadline is not None:
                    process.deadline += stood_s

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
                return self._ending.on_drained(process.slot.role, now)
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
        if self._ending.is_stopping:
            process.state = ProcessState.STOPPED
            return self._ending.advance_stop()
        process.state = ProcessState.BACKOFF
        if group.is_failing:
            return self._resume(group, now)
        cause = classify(
            status, process.fatal, is_overdue=process.is_overdue, is_oom=evidence.is_oom
        )
        text = story(process, status, cause, evidence.step_id)
        words = self._testimony.death(process, cause, evidence.step_id, now)
        if group.is_leaving:
            self._crash_loop.left(group.role, now)
            return words + self._on_left(group, text, now)
        group.count_death(status, now)
        self._crash_loop.death(group.role, cause, now)
        if self._is_hopeless(group, process) or self._crash_loop.is_over(now):
            return self._give_up(process, text, now)
        actions: list[Action] = [Note(logging.WARNING, text), *words]
        if self._ending.is_front(group.role) and not self._ending.comes_back(group.role):
            return actions + self._ending.on_drained(group.role, now)
        group.is_failing = True
        group.resume_at = now + group.delay_s(self._recovery.restart_backoff_max_s, self._rng)
        kills = group.kill_rest()
        return actions + kills + self._resume(group, now) + self._crash_loop.news(now)

    def on_restart(self, role: Role, now: float) -> tuple[str | None, list[Action]]:
        """Asked to replace the processes of a role. Returns why not, or None; and what to do."""
        if self._ending.has_begun:
            return "the engine is stopping", []
        return self._planned.ask(role, now)

    def on_signal(self, now: float) -> list[Action]:
        """Asked to end: drain first; asked again: end at once."""
        return self._planned.cancel() + self._ending.on_signal(now)

    def on_orphaned(self, now: float) -> list[Action]:
        """Nobody waits for results any more: kill everything."""
        return self._planned.cancel() + self._ending.kill_all(now)

    def tick(self, now: float) -> list[Action]:
        """Do what is due by now."""
        actions: list[Action] = []
        for process in self.processes:
            if process.deadline is not None and process.deadline <= now:
                actions += process.run_out()
        for group in self._groups.values():
            actions += self._resume(group, now)
        actions += self._planned.tick(now) + self._ending.tick(now)
        if now >= self._repeat_at:
            self._repeat_at = now + REPEAT_S
            actions += self._repeat(now)
        return actions

    def _repeat(self, now: float) -> list[Action]:
        """What holds is said again: who should have heard it may not have."""
        asked = [action for process in self.processes for action in process.ask_again()]
        return asked + self._testimony.pending(now) + self._crash_loop.standing(now)

    # Watching -----------------------------------------------------------------------------------

    def look(self, marks: Mapping[Slot, ProgressRecord], now: float) -> list[Action]:
        """Find out who hangs, from what could be read of the progress pages."""
        living = {p.slot: p.epoch for p in self.processes if p.is_alive and not p.is_doomed}
        verdicts = self._watcher.look(living, marks, now)
        return [action for verdict in verdicts for action in self._act_on(verdict)]

    def _act_on(self, verdict: Verdict) -> list[Action]:
        slot, mark = verdict.slot, verdict.mark
        process = self._groups[slot.role].members[slot.rank]
        step = "" if mark.step_id is None else f" {mark.step_id}"
        what = f"{slot} ({mark.phase.name.lower()}{step})"
        if verdict.judgement is Judgement.CLEARED:
            note = Note(logging.WARNING, f"{what} goes on after {verdict.age_s:.1f} s")
            return [note, *self._testimony.suspicion(process, 0.0)]
        text = f"{what} has shown no progress for {verdict.age_s:.1f} s"
        if verdict.judgement is Judgement.SUSPECT:
            suspicion = self._testimony.suspicion(process, 1.5 * mark.limit_s + 1.0)
            return [Note(logging.WARNING, text), DumpStacks(slot), *suspicion]
        return [Note(logging.ERROR, f"{text}; it is killed"), *process.kill_overdue()]

    # Starting -----------------------------------------------------------------------------------

    def _start(self, group: Group, now: float) -> list[Action]:
        origin = self._succession.origin(group.role)
        group.begin(now)
        if origin is Origin.PROMOTED:
            self._succession.hand_over(group.role, now)
        is_alone = origin is Origin.STARTED
        deadline = now + (self._recovery.startup_timeout_s if is_alone else HANDOVER_TIMEOUT_S)
        return [process.begin(self._next_epoch(), deadline, origin) for process in group.processes]

    def _due_at(self, group: Group) -> float | None:
        if self._ending.has_begun and group.role in (*HELPERS, Role.API):
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
        actions: list[Action] = [Show(process.slot, message), *self._testimony.pending(now)]
        if process is group.spare:
            return actions + self._planned.on_spare_ready(group, now)
        if group.is_ready:
            group.ready_since = now
            actions += self._ending.on_ready(group.role, now)
        if self.is_ready and not self.was_ready:
            self.was_ready = True
            actions.append(Announce())
        return actions + self._crash_loop.news(now)

    # Dying --------------------------------------------------------------------------------------

    def _is_hopeless(self, group: Group, process: Process) -> bool:
        """Only a first start is given up: afterwards there are requests to come back for."""
        is_standby = group.role in STANDBY_OF.values()
        if self.was_ready or self._ending.has_begun or is_standby:
            return False
        told = process.fatal is not None and not process.fatal.retry
        return told or group.num_failures >= CRASH_LOOP_DEATHS

    def _give_up(self, process: Process, text: str, now: float) -> list[Action]:
        hint = process.fatal.hint if process.fatal is not None else ""
        self.failure = text + (f"\nhint: {hint}" if hint else "")
        return self._planned.cancel() + self._ending.give_up(now)

    def _on_left(self, group: Group, text: str, now: float) -> list[Action]:
        """Who was asked to leave has left."""
        note = Note(logging.INFO, text)
        if self._ending.is_front(group.role) and not self._ending.comes_back(group.role):
            return [note, *self._ending.on_drained(group.role, now)]
        group.is_failing = True
        group.resume_at = now
        return [note, *group.kill_rest(), *self._resume(group, now)]

    def _on_spare_death(
        self, group: Group, process: Process, status: int, now: float
    ) -> list[Action]:
        note = Note(logging.INFO, f"{process.slot} ended with status {status}")
        actions = [note, *self._planned.on_spare_death(group)]
        if self._ending.is_stopping:
            return actions + self._ending.advance_stop()
        return actions + self._ending.advance_drain(now)

"""The supervisor's decisions, as a state machine: events and times in, actions out.

Theory of operation. The ranks of one role form a group and are replaced together. Each API process
is a group by itself, because it holds only its own requests; so are the supervisor of each replica
and the zygote of each rank. A group is started again, with greater epochs, only when all its
processes are dead and reaped. After useful work (`Process.was_useful`) it is restarted at once; the
pause doubles only while successors die without having done any. Before the engine has been ready
once, a failure that would repeat ends it.

The policy knows no sockets and no processes. Its methods take events and the time, and return
actions, to be executed in order. Each `Process` and `Group` changes its own fields. Parts of the
policy are in separate modules: how successors are started (failover.py), planned restarts
(planned_restarts.py), the end (shutdown.py), hangs (watcher.py), crash loops (crash_loop.py), and
causes and notices of deaths (deaths.py).
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
    Remarks,
    Role,
)
from protocol.process.progress_page import ProgressRecord
from scripts.supervisor.actions import Action, Announce, DumpStacks, Note, Origin, Show, Slot
from scripts.supervisor.crash_loop import CrashLoop
from scripts.supervisor.deaths import DeathNotices, Evidence, classify, describe_death
from scripts.supervisor.failover import HANDOVER_TIMEOUT_S, HELPERS, STANDBY_OF, UNNEEDED, Failover
from scripts.supervisor.planned_restarts import PlannedRestarts
from scripts.supervisor.process_state import Group, Process, make_groups
from scripts.supervisor.shutdown import Shutdown
from scripts.supervisor.watcher import HangReport, HangStatus, Watcher

CRASH_LOOP_DEATHS = 5
_LONGEST_LOOK_S = 1.0
_LONGEST_TURN_S = 1.0
"""Time between two turns; a supervisor that takes twice as long was stopped."""


class SupervisorPolicy:
    """Decides which process runs when. Events return the actions that follow."""

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

        `next_epoch` returns a new epoch, greater than all before; `rng` is for jitter;
        `is_api_alone`: see `PlannedRestarts`.
        """
        self._recovery = recovery
        self._next_epoch = next_epoch
        self._rng = rng
        self._groups = make_groups(num_ranks)
        self._failover = Failover(self._groups)
        self._planned = PlannedRestarts(self._groups, recovery, next_epoch, is_api_alone)
        self._shutdown = Shutdown(self._groups, recovery)
        self.was_ready = False
        """True once all processes were ready at the same time; no start is given up after that."""
        self._turned_at = self._repeat_at = 0.0
        self._watcher = Watcher(min(_LONGEST_LOOK_S, recovery.hang_timeout_s / 2))
        self._death_notices = DeathNotices(self._groups.of(Role.CORE))
        self._crash_loop = CrashLoop(recovery.give_up_after_s, self._groups)
        self.failure: str | None = None

    @property
    def processes(self) -> list[Process]:
        return [process for group in self._groups for process in group.members]

    @property
    def is_ready(self) -> bool:
        """Whether all processes that requests need are serving."""
        needed = [group for group in self._groups if group.role not in UNNEEDED]
        return not self._shutdown.has_begun and all(group.is_ready for group in needed)

    @property
    def is_ending(self) -> bool:
        """Whether the shutdown has begun."""
        return self._shutdown.has_begun

    @property
    def state(self) -> ProcessState:
        if self._shutdown.has_begun:
            return ProcessState.DRAINING
        return ProcessState.READY if self.is_ready else ProcessState.STARTING

    def find(self, epoch: int) -> Process | None:
        """Return the process of that epoch, if it is alive."""
        return next((p for p in self.processes if p.is_alive and p.epoch == epoch), None)

    def next_deadline(self) -> float:
        """Return the time by which `tick` must be called."""
        times = [self._turned_at + _LONGEST_TURN_S, self._shutdown.deadline, self._planned.deadline]
        times += [process.deadline for process in self.processes]
        times += [self._due_at(group) for group in self._groups]
        return min(time for time in times if time is not None)

    @property
    def next_look(self) -> float | None:
        """The time by which `look` must be called; None before the first call."""
        return self._watcher.next_look

    def begin(self, now: float) -> list[Action]:
        """Start all processes at once; only workers wait for their zygotes."""
        self._turned_at = now
        actions: list[Action] = []
        for group in self._groups:
            group.resume(now)
            if group.role is Role.ZYGOTE or self._due_at(group) is not None:
                actions += self._start(group, now)
            elif group.role is Role.WORKER:
                for process in group.processes:
                    process.expect()
        return actions

    def on_turn(self, now: float) -> None:
        """Begin a turn: extend all deadlines by time in which the supervisor did not run.

        Ordinary turns add nothing, so that deadlines pass even where every turn is slow.
        """
        stopped_s = now - self._turned_at - _LONGEST_TURN_S
        self._turned_at = now
        if stopped_s > _LONGEST_TURN_S:
            self._planned.extend_deadlines(stopped_s)
            self._shutdown.extend_deadlines(stopped_s)
            for process in self.processes:
                process.extend_deadline(stopped_s)

    def on_message(
        self, epoch: int, message: Hello | Progress | Ready | Fatal | Drained | Remarks, now: float
    ) -> list[Action]:
        """Handle a message of a child; those of dead processes are ignored."""
        process = self.find(epoch)
        if process is None:
            return []
        process.on_message(message, now + self._recovery.startup_timeout_s)
        match message:
            case Progress():
                return [Show(process.slot, message)]
            case Ready():
                return self._on_ready(process, message, now)
            case Drained():
                group, _ = self._groups.find(process.slot)
                return self._shutdown.on_drained(group, now)
        return []

    def on_death(self, slot: Slot, status: int, now: float, evidence: Evidence) -> list[Action]:
        """Handle the death of a child that was reaped; `status` is negative for a signal."""
        group, process = self._groups.find(slot)
        process.on_death(is_final=self._shutdown.is_stopping)
        if process is group.spare:
            note = Note(logging.INFO, f"{slot} ended with status {status}")
            spare_actions = self._planned.on_spare_death(group)
            return [note, *spare_actions, *self._shutdown.advance(now)]
        if self._shutdown.is_stopping:
            return self._shutdown.advance(now)
        if group.is_failing:
            return self._resume(group, now)
        step_id = evidence.step_id
        cause = classify(process, status, is_oom=evidence.is_oom)
        text = describe_death(process, status, cause, step_id)
        loads_anew = self._failover.loads_anew()
        notices = self._death_notices.death(process, cause, step_id, now, is_loaded_anew=loads_anew)
        self._crash_loop.death(group.role, None if group.is_leaving else cause, now)
        if group.is_leaving:
            return [*notices, Note(logging.INFO, text), *self._replace(group, now, now)]
        was_useful = process.was_useful(
            now, step_id, has_completed_step=evidence.has_completed_step
        )
        group.count_death(status, was_useful=was_useful)
        if self._is_hopeless(group, process) or self._crash_loop.is_over(now):
            return self._give_up(process, text, now)
        is_end = status == 0 and self._shutdown.is_front(group.role)
        actions: list[Action] = [Note(logging.INFO if is_end else logging.WARNING, text), *notices]
        delay_s = group.delay_s(self._recovery.restart_backoff_max_s, self._rng)
        actions += self._replace(group, now + delay_s, now)
        return actions + self._crash_loop.report(now)

    def _replace(self, group: Group, at: float, now: float) -> list[Action]:
        """Start the successors at that time; a front that is not restarted counts as drained."""
        if self._shutdown.is_front(group.role) and not self._shutdown.comes_back(group.role):
            return self._shutdown.on_drained(group, now)
        return [*group.replace(at), *self._resume(group, now)]

    def on_restart(
        self, role: Role, now: float, index: int | None = None
    ) -> tuple[str | None, list[Action]]:
        """Replace the processes of a role, or one API process; return a refusal, or actions."""
        if self._shutdown.has_begun:
            return "the engine is stopping", []
        return self._planned.ask(role, now, index)

    def on_signal(self, now: float) -> list[Action]:
        """Drain and end the engine; end it at once at the second signal."""
        return self._planned.cancel() + self._shutdown.on_signal(now)

    def on_stop(self, now: float) -> list[Action]:
        """End the engine without finishing its requests: the supervisor above a replica asks."""
        stops = [] if self._shutdown.is_stopping else self._shutdown.stop(now)
        return self._planned.cancel() + stops

    def on_run_dir_lost(self, failure: str, now: float) -> list[Action]:
        """Finish the open requests and end, because another engine has the run directory."""
        self.failure = failure
        self._shutdown.fail()
        return [] if self.is_ending else self.on_signal(now)

    def on_orphaned(self, now: float) -> list[Action]:
        """Kill all processes, because the parent is gone."""
        return self._planned.cancel() + self._shutdown.kill_all(now)

    def tick(self, now: float) -> list[Action]:
        """Act on all deadlines that have passed."""
        actions: list[Action] = []
        for process in self.processes:
            if process.deadline is not None and process.deadline <= now:
                actions += process.on_deadline()
        for group in self._groups:
            actions += self._resume(group, now)
        actions += self._planned.tick(now) + self._shutdown.tick(now)
        if now >= self._repeat_at:
            self._repeat_at = now + REPEAT_S
            actions += self._repeat(now)
        return actions

    def _repeat(self, now: float) -> list[Action]:
        """Resend the current state, because a message may have been lost."""
        actions = [action for process in self.processes for action in process.ask_again()]
        actions += self._death_notices.pending(now)
        return actions + self._crash_loop.report(now, is_repeat=True)

    def look(self, marks: Mapping[Slot, ProgressRecord], now: float) -> list[Action]:
        """Find processes that hang, from the marks in their progress pages."""
        living = {p.slot: p.epoch for p in self.processes if p.is_alive and not p.is_doomed}
        reports = self._watcher.look(living, marks, now)
        return [action for report in reports for action in self._act_on(report)]

    def _act_on(self, report: HangReport) -> list[Action]:
        slot, mark = report.slot, report.mark
        _, process = self._groups.find(slot)
        step = "" if mark.step_id is None else f" {mark.step_id}"
        what = f"{slot} ({mark.phase.name.lower()}{step})"
        if report.status is HangStatus.CLEARED:
            note = Note(logging.WARNING, f"{what} continues after {report.age_s:.1f} s")
            return [note, *self._death_notices.suspicion(process, 0.0)]
        text = f"{what} has shown no progress for {report.age_s:.1f} s"
        if report.status is HangStatus.SUSPECT:
            suspicion = self._death_notices.suspicion(process, 1.5 * mark.limit_s + 1.0)
            note = Note(logging.WARNING, f"{text}; the stacks of its threads follow")
            return [note, DumpStacks(slot), *suspicion]
        return [Note(logging.ERROR, f"{text}; it is killed"), *process.kill(is_overdue=True)]

    def _start(self, group: Group, now: float) -> list[Action]:
        origin = self._failover.origin(group.role)
        if origin is Origin.PROMOTED:
            self._failover.hand_over(group.role, now)
        is_alone = origin is Origin.STARTED
        timeout_s = self._recovery.startup_timeout_s if is_alone else HANDOVER_TIMEOUT_S
        return group.begin(self._next_epoch, now, now + timeout_s, origin)

    def _due_at(self, group: Group) -> float | None:
        if self._shutdown.has_begun and group.role in (*HELPERS, Role.API):
            return None
        return self._failover.due_at(group)

    def _resume(self, group: Group, now: float) -> list[Action]:
        due = self._due_at(group)
        return [] if due is None or now < due else self._start(group, now)

    def _on_ready(self, process: Process, message: Ready, now: float) -> list[Action]:
        if not process.on_ready(now):
            return []
        group, _ = self._groups.find(process.slot)
        actions: list[Action] = [Show(process.slot, message), *self._death_notices.pending(now)]
        if process is group.spare:
            return actions + self._planned.on_spare_ready(group, now)
        if group.is_ready:
            actions += self._shutdown.on_ready(group, now)
        if self.is_ready and not self.was_ready:
            self.was_ready = True
            actions.append(Announce())
        return actions + self._crash_loop.report(now)

    def _is_hopeless(self, group: Group, process: Process) -> bool:
        """Return whether to give up: only before the first Ready, as later there are requests."""
        if self.was_ready or self._shutdown.has_begun or group.role in STANDBY_OF.values():
            return False
        is_final = process.fatal is not None and not process.fatal.retry
        return is_final or group.num_failures >= CRASH_LOOP_DEATHS

    def _give_up(self, process: Process, text: str, now: float) -> list[Action]:
        hint = process.fatal.hint if process.fatal is not None else ""
        self.failure = text + (f"\nhint: {hint}" if hint else "")
        return self._planned.cancel() + self._shutdown.give_up(now)

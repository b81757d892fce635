"""The end of an engine: requests are finished, then processes are stopped, then killed.

No sockets, no clock. The states follow one another and never go back:

| state    | event                           | next state                                     |
|----------|---------------------------------|------------------------------------------------|
| RUNNING  | signal                          | DRAINING; STOPPING with a timeout of 0, or     |
|          |                                 | without a front                                |
| RUNNING  | start given up, no parent       | STOPPING                                       |
| DRAINING | front drained, or gone for good | DRAINING the next front; STOPPING after last   |
| DRAINING | deadline                        | STOPPING                                       |
| DRAINING | signal, no parent               | STOPPING, and all processes are killed         |
| STOPPING | all processes of a role dead    | STOPPING the next role; ENDED after last       |
| STOPPING | signal, no parent, deadline     | STOPPING, and all processes are killed         |
| STOPPING | deadline, all killed before     | ENDED, with status 1                           |

The front is the outermost role that still has to finish. To finish, the API needs the core or the
replicas, and its requests that continue at other machines need the block server. The front is
drained once each of its groups is. `advance` enters the next stage as long as the current one is
complete.
"""

import enum
import logging

from protocol.config import RecoveryConfig
from protocol.lifecycle import ProcessState, Role, Stop
from scripts.supervisor.actions import Action, Exit, Note
from scripts.supervisor.failover import HELPERS
from scripts.supervisor.process_state import Group, Groups, Process

STOP_GRACE_S = 5.0
"""Time from Stop to SIGKILL, for all processes together."""
_STOP_ORDER = (
    *(Role.API, Role.PLACER, Role.REPLICA, Role.CORE, Role.WORKER, Role.BLOCK_SERVER),
    *HELPERS,
)
_DRAIN_ORDER = (Role.API, Role.REPLICA, Role.CORE, Role.BLOCK_SERVER)
_MAX_FAILURES = 3
"""Number of consecutive failures after which a front is not started again."""


class _State(enum.Enum):
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class Shutdown:
    """Draining, stopping, and the exit status. The methods return actions."""

    def __init__(self, groups: Groups, recovery: RecoveryConfig) -> None:
        self._groups = groups
        self._timeout_s = recovery.shutdown_timeout_s
        self._state = _State.RUNNING
        self._fronts = [role for role in _DRAIN_ORDER if role in groups]
        """Roles that still have to finish, outermost first."""
        self._draining: set[Group] = set()
        """Groups of the current front that have not finished."""
        self._were_ready: set[Role] = set()
        self._stages = [role for role in _STOP_ORDER if role in groups]
        self._stopped: Role | None = None
        self._exit_status = 0
        self.deadline: float | None = None
        """Time at which draining or stopping ends."""

    @property
    def has_begun(self) -> bool:
        return self._state is not _State.RUNNING

    @property
    def is_stopping(self) -> bool:
        """Whether dead processes are no longer replaced."""
        return self._state in (_State.STOPPING, _State.ENDED)

    def is_front(self, role: Role) -> bool:
        """Return whether that role is finishing its requests."""
        return self._state is _State.DRAINING and self._fronts[0] is role

    def comes_back(self, role: Role) -> bool:
        """Return whether a role is restarted while it drains: the core, whose clients resend."""
        is_needed = role is Role.CORE and self._has_served and self.is_front(role)
        return is_needed and self._groups[role].num_failures <= _MAX_FAILURES

    @property
    def _has_served(self) -> bool:
        """Whether there may be requests: none is accepted before there are workers."""
        return self._were_ready >= {Role.CORE, Role.WORKER}

    def on_signal(self, now: float) -> list[Action]:
        """Drain at the first signal, kill all processes at the second."""
        if self._state is _State.RUNNING:
            self._state = _State.DRAINING
            self.deadline = now + self._timeout_s
            what = "stopping"
            if self._timeout_s > 0 and self._has_served:
                what = f"finishing open requests, for {self._timeout_s:g} s at most"
            note = Note(logging.INFO, f"{what}; another signal stops at once")
            if self._timeout_s == 0 or not self._fronts:
                return [note, *self.stop(now)]
            return [note, *self._drain_front(), *self.advance(now)]
        if self._state is _State.DRAINING:
            self._exit_status = 1
        return self.kill_all(now)

    def kill_all(self, now: float) -> list[Action]:
        return [*([] if self.is_stopping else self.stop(now)), *self._kills()]

    def fail(self) -> None:
        """Exit with status 1 at the end."""
        self._exit_status = 1

    def give_up(self, now: float) -> list[Action]:
        """Stop all processes, and exit with status 1."""
        self.fail()
        return self.stop(now)

    def on_drained(self, group: Group, now: float) -> list[Action]:
        """Record that a group of the front has finished its requests, or is gone for good."""
        if not self.is_front(group.role):
            return []
        group.processes[0].on_drained()
        self._draining.discard(group)
        return self.advance(now)

    def on_ready(self, group: Group, now: float) -> list[Action]:
        """Request a front that was restarted to drain: its clients resend their requests."""
        self._were_ready.add(group.role)
        return [*self._drain_front(), *self.advance(now)] if self.comes_back(group.role) else []

    def tick(self, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []
        if self._state is _State.DRAINING:
            text = f"requests are not finished after {self._timeout_s:g} s"
            return [Note(logging.WARNING, text), *self.stop(now)]
        kills = self._kills()
        if kills:
            self.deadline = now + STOP_GRACE_S
            return [Note(logging.WARNING, "processes that do not stop are killed"), *kills]
        return [Note(logging.ERROR, "processes survived SIGKILL"), *self._end(1)]

    def extend_deadlines(self, seconds: float) -> None:
        if self.deadline is not None:
            self.deadline += seconds

    def advance(self, now: float) -> list[Action]:
        """Leave every stage that is complete, and enter the next one."""
        actions: list[Action] = []
        while self._state is _State.DRAINING and not self._draining:
            if any(group.spare is not None for group in self._groups.of(self._fronts[0])):
                break  # a predecessor has not ended yet
            self._fronts.pop(0)
            if self._fronts:
                actions += self._drain_front()
            else:
                self._begin_stopping(now)
        if self._state is not _State.STOPPING:
            return actions
        while self._stages and not any(p.is_alive for p in self._members(self._stages[0])):
            self._stages.pop(0)
        if not self._stages:
            return actions + self._end(self._exit_status)
        if self._stopped is not self._stages[0]:
            self._stopped = self._stages[0]
            for process in self._members(self._stopped):
                actions += _stop(process)
        return actions

    def _members(self, role: Role) -> list[Process]:
        return [process for group in self._groups.of(role) for process in group.members]

    def _drain_front(self) -> list[Action]:
        """Request the current front to finish its requests, if it may have any."""
        self._draining.clear()
        return [a for group in self._groups.of(self._fronts[0]) for a in self._drain(group)]

    def _drain(self, group: Group) -> list[Action]:
        front, is_api = group.processes[0], group.role is Role.API
        # An API accepts requests before it is ready: while the engine recovers.
        is_early = is_api and front.state is ProcessState.STARTING and self._has_served
        if is_early or front.state is ProcessState.READY:
            self._draining.add(group)
            return front.drain()
        is_leaving = group.is_leaving and front.is_alive
        if is_leaving or self.comes_back(group.role):
            self._draining.add(group)
        return []

    def stop(self, now: float) -> list[Action]:
        """Start no further processes, and stop one role after the other."""
        self._begin_stopping(now)
        return self.advance(now)

    def _begin_stopping(self, now: float) -> None:
        self._state = _State.STOPPING
        self.deadline = now + STOP_GRACE_S
        for group in self._groups:
            group.on_shutdown()

    def _end(self, status: int) -> list[Action]:
        self._state = _State.ENDED
        self.deadline = None
        return [Exit(status)]

    def _kills(self) -> list[Action]:
        members = [process for group in self._groups for process in group.members]
        return [action for process in members for action in process.kill()]


def _stop(process: Process) -> list[Action]:
    """Stop the process, or kill it if it is a helper or is starting and reads no messages yet."""
    if process.state is ProcessState.STARTING or process.slot.role in HELPERS:
        return process.kill()
    return process.ask(Stop()) if process.is_alive else []

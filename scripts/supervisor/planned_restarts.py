"""Planned restarts: processes are replaced on request, without errors and with short pauses.

A worker is asked to end after its running step, once its standby is ready. So is the core, whose
clients then resend their requests; it ends without a standby if none gets ready soon. Two APIs run
for a while: the successor takes new connections from the same socket, and the predecessor finishes
its requests. Several API processes are replaced one after the other.
"""

import logging
from collections import deque
from collections.abc import Callable

from protocol.config import RecoveryConfig
from protocol.lifecycle import Drain, ProcessState, Role, Stop
from scripts.supervisor.actions import Action, Note, Swap
from scripts.supervisor.failover import STANDBY_OF
from scripts.supervisor.process_state import Group, Groups, Process

RESTARTABLE = (Role.WORKER, Role.CORE, Role.API)
LEAVE_GRACE_S = 5.0
"""Time from Stop to SIGKILL for one process."""
ALREADY_REPLACED = "is being replaced already"
"""End of the reason for refusing a second restart during the first."""
CORE_PATIENCE_S = 2.0
"""Longest wait in seconds for a core's standby; without one the pause is only slightly longer."""


class PlannedRestarts:
    """The planned restarts of an engine: at most one of each role at a time."""

    def __init__(
        self,
        groups: Groups,
        recovery: RecoveryConfig,
        next_epoch: Callable[[], int],
        is_api_alone: bool,
    ) -> None:
        """Manage the restarts of all groups of an engine.

        `is_api_alone`: an API must have ended before its successor starts, because only one can
        hold the journal. New connections wait in the socket's queue meanwhile.
        """
        self._groups = groups
        self._is_api_alone = is_api_alone
        self._recovery = recovery
        self._next_epoch = next_epoch
        self._waits_until: dict[Role, float] = {}
        self._apis: deque[Group] = deque()
        """API processes to be replaced; the first one is being replaced."""
        self._is_begun = False
        """Whether the replacement of the first has begun."""

    @property
    def deadline(self) -> float | None:
        """Time by which `tick` must be called."""
        return min(self._waits_until.values(), default=None)

    def ask(
        self, role: Role, now: float, index: int | None = None
    ) -> tuple[str | None, list[Action]]:
        """Begin to replace the processes of a role, or one API process.

        Returns the reason for a refusal, or None, and the actions that follow.
        """
        self._drop_replaced()
        groups = self._groups.of(role)
        if index is not None and role is Role.API:
            groups = groups[index : index + 1]
        if role not in RESTARTABLE or not groups:
            which = f"{role}" if index is None else f"{role} with index {index}"
            return f"no {which} that could be restarted", []
        for group in groups:
            if group.spare is not None and group.spare.state is ProcessState.DRAINING:
                return f"the {group.name} before this one still finishes its requests", []
            is_waiting = role in self._waits_until or group in self._apis
            if not group.serves or group.spare is not None or is_waiting:
                return f"the {group.name} {ALREADY_REPLACED}", []
        if role is Role.API:
            self._apis += groups
            return None, self._advance_apis(now)
        group = groups[0]
        if STANDBY_OF[role] not in self._groups:
            return None, group.leave(now + LEAVE_GRACE_S, Stop())
        is_worker = role is Role.WORKER
        patience_s = self._recovery.startup_timeout_s if is_worker else CORE_PATIENCE_S
        self._waits_until[role] = now + patience_s
        return None, self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Replace the roles whose standby is ready; cancel the others at their deadline."""
        actions = [a for role in list(self._waits_until) for a in self._prepare(role, now)]
        return actions + self._advance_apis(now)

    def _advance_apis(self, now: float) -> list[Action]:
        """Begin to replace the next API process once the one before it is replaced."""
        self._drop_replaced()
        while self._apis and not self._is_begun:
            group = self._apis[0]
            if group.serves:
                self._is_begun = True
                return self._replace_api(group, now)
            self._apis.popleft()  # it has died, and its successor starts anyway
        return []

    def _drop_replaced(self) -> None:
        """Remove the first API process from the queue if its successor serves."""
        group = self._apis[0] if self._is_begun else None
        if group is None or not group.serves:
            return
        if group.spare is None or not _is_successor(group.spare, group):
            self._apis.popleft()
            self._is_begun = False

    def _replace_api(self, group: Group, now: float) -> list[Action]:
        if self._is_api_alone:
            return group.leave(self._drain_deadline(now), Drain(is_replaced=True))
        deadline = now + self._recovery.startup_timeout_s
        return group.begin_spare(self._next_epoch(), now, deadline)

    def _prepare(self, role: Role, now: float) -> list[Action]:
        group, standby = self._groups[role], self._groups[STANDBY_OF[role]]
        if group.serves and not standby.serves and now < self._waits_until[role]:
            return []
        del self._waits_until[role]
        if not group.serves:  # it is replaced anyway
            return []
        if standby.serves or role is Role.CORE:
            return group.leave(now + LEAVE_GRACE_S, Stop())
        return [Note(logging.ERROR, f"the {role} stays: no standby gets ready to replace it")]

    def extend_deadlines(self, seconds: float) -> None:
        self._waits_until = {role: due + seconds for role, due in self._waits_until.items()}

    def cancel(self) -> list[Action]:
        """Cancel the restarts that have not begun, at the end of the engine."""
        self._waits_until.clear()
        self._give_up_apis()
        spares = [group.spare for group in self._groups if group.spare is not None]
        return [action for spare in spares if spare.is_coming for action in spare.kill()]

    def on_spare_ready(self, group: Group, now: float) -> list[Action]:
        """Exchange API and successor; the old one finishes its requests."""
        new, old = group.promote_spare()
        return [
            Swap(new.slot, old.slot),
            *old.leave(self._drain_deadline(now), Drain(is_replaced=True)),
            Note(logging.INFO, f"{new.slot} serves; its predecessor finishes its requests"),
        ]

    def on_spare_death(self, group: Group) -> list[Action]:
        """Remove a predecessor that has ended, or a successor that has died."""
        spare = group.remove_spare()
        was_replaced = spare.is_doomed and not spare.is_overdue
        if was_replaced or not _is_successor(spare, group):
            return []
        self._give_up_apis()  # successors of the others would fail in the same way
        return [Note(logging.ERROR, f"the {group.name} stays: its successor has died")]

    def _give_up_apis(self) -> None:
        self._apis.clear()
        self._is_begun = False

    def _drain_deadline(self, now: float) -> float:
        return now + self._recovery.shutdown_timeout_s + LEAVE_GRACE_S


def _is_successor(spare: Process, group: Group) -> bool:
    """Return whether the spare process is the successor of the current one, not its predecessor."""
    return spare.epoch > group.processes[0].epoch

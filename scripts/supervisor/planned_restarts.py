"""Planned restarts: processes are replaced on request, without errors and with short pauses.

A worker is asked to end after its running step, once its standby is ready. So is the core, whose
clients then resend their requests; it ends without a standby if none gets ready soon. Two APIs run
for a while: the successor takes new connections from the same socket, and the predecessor finishes
its requests.
"""

import logging
from collections.abc import Callable, Mapping

from protocol.config import RecoveryConfig
from protocol.lifecycle import Drain, ProcessState, Role, Stop
from scripts.supervisor.actions import Action, Note, Swap
from scripts.supervisor.failover import STANDBY_OF
from scripts.supervisor.process_state import Group

RESTARTABLE = (Role.WORKER, Role.CORE, Role.API)
LEAVE_GRACE_S = 5.0
"""From Stop to SIGKILL for one process."""
CORE_PATIENCE_S = 2.0
"""The longest wait for a core's standby: without one the pause is only a little longer."""


class PlannedRestarts:
    """At most one of each role at a time."""

    def __init__(
        self,
        groups: Mapping[Role, Group],
        recovery: RecoveryConfig,
        next_epoch: Callable[[], int],
        is_api_alone: bool,
    ) -> None:
        """Take all groups of an engine.

        `is_api_alone`: an API must have ended before its successor starts, because only one can
        hold the journal. New connections wait in the socket's queue meanwhile.
        """
        self._groups = groups
        self._is_api_alone = is_api_alone
        self._recovery = recovery
        self._next_epoch = next_epoch
        self._waits_until: dict[Role, float] = {}

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        return min(self._waits_until.values(), default=None)

    def ask(self, role: Role, now: float) -> tuple[str | None, list[Action]]:
        """Begin to replace a role's processes. Returns why not, or None; and actions."""
        group = self._groups.get(role)
        if role not in RESTARTABLE or group is None:
            return f"no {role} that could be restarted", []
        if group.spare is not None and group.spare.state is ProcessState.DRAINING:
            return f"the {role} before this one still finishes its requests", []
        if not group.serves or group.spare is not None or role in self._waits_until:
            return already_replaced(role), []
        if role is Role.API and self._is_api_alone:
            return None, group.leave(self._drain_deadline(now), Drain(is_replaced=True))
        if role is Role.API:
            deadline = now + self._recovery.startup_timeout_s
            return None, group.begin_spare(self._next_epoch(), now, deadline)
        if STANDBY_OF[role] not in self._groups:
            return None, group.leave(now + LEAVE_GRACE_S, Stop())
        is_worker = role is Role.WORKER
        patience_s = self._recovery.startup_timeout_s if is_worker else CORE_PATIENCE_S
        self._waits_until[role] = now + patience_s
        return None, self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Replace the roles whose standby is ready; give up the others at their deadline."""
        return [action for role in list(self._waits_until) for action in self._prepare(role, now)]

    def _prepare(self, role: Role, now: float) -> list[Action]:
        group, standby = self._groups[role], self._groups[STANDBY_OF[role]].processes[0]
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
        """Give up the restarts that were not begun, at the end of the engine."""
        self._waits_until.clear()
        spares = [group.spare for group in self._groups.values() if group.spare is not None]
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
        if spare.is_doomed or spare.epoch < group.processes[0].epoch:
            return []
        return [Note(logging.ERROR, f"the {group.role} stays: its successor has died")]

    def _drain_deadline(self, now: float) -> float:
        return now + self._recovery.shutdown_timeout_s + LEAVE_GRACE_S


def already_replaced(role: Role) -> str:
    """The reason for refusing a second restart during the first."""
    return f"the {role} is being replaced already"

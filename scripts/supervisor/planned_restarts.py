"""Replacing processes that are well, because somebody asks for it: nothing fails, little waits.

A worker is asked to end after its running step, once its standby is ready. So is the core, whose
clients then say again what they have; it ends without a standby if none gets ready soon. Of the
API two run for a while: the successor takes new connections from the same socket, and who leaves
finishes what it has.
"""

import logging
from collections.abc import Callable, Mapping

from protocol.config import RecoveryConfig
from protocol.lifecycle import Drain, ProcessState, Role, Stop
from scripts.supervisor.succession import STANDBY_OF
from scripts.supervisor.supervised import Action, Group, Note, Process, Slot, Swap

RESTARTABLE = (Role.API, Role.CORE, Role.WORKER)
LEAVE_GRACE_S = 5.0
"""From Stop to SIGKILL for one process."""
CORE_PATIENCE_S = 2.0
"""The longest wait for a core's standby: without one it is away only a little longer."""


class PlannedRestarts:
    """At most one of each role at a time."""

    def __init__(
        self,
        groups: Mapping[Role, Group],
        recovery: RecoveryConfig,
        next_epoch: Callable[[], int],
        is_api_alone: bool,
    ) -> None:
        """Take all groups of an engine, and how its processes are started.

        Args:
            groups: by role.
            recovery: deadlines.
            next_epoch: issues epochs.
            is_api_alone: whether an API must have ended before its successor starts, since both
                would use what only one can have; new connections wait in the socket's queue then.
        """
        self._groups = groups
        self._is_api_alone = is_api_alone
        self._recovery = recovery
        self._next_epoch = next_epoch
        self._waits_until: dict[Role, float] = {}
        """For its standby: a role's restart is prepared until then."""

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to say at the latest."""
        return min(self._waits_until.values(), default=None)

    def ask(self, role: Role, now: float) -> tuple[str | None, list[Action]]:
        """Begin to replace a role's processes.

        Returns:
            Why not, or None; and what is to be done.
        """
        group = self._groups.get(role)
        if role not in RESTARTABLE or group is None:
            return f"no {role} that could be restarted", []
        if group.spare is not None and group.spare.state is ProcessState.DRAINING:
            return f"the {role} before this one still finishes its requests", []
        is_whole = all(process.serves for process in group.processes)
        if not is_whole or group.spare is not None or role in self._waits_until:
            return already_replaced(role), []
        if role is Role.API:
            return None, self._replace_api(group, now)
        if STANDBY_OF[role] not in self._groups:
            return None, _leave(group, now)
        is_slow = role is Role.WORKER
        longest_s = self._recovery.startup_timeout_s if is_slow else CORE_PATIENCE_S
        self._waits_until[role] = now + longest_s
        return None, self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Replace those whose standby is ready, or give that up."""
        return [action for role in list(self._waits_until) for action in self._prepare(role, now)]

    def _prepare(self, role: Role, now: float) -> list[Action]:
        group, standby = self._groups[role], self._groups[STANDBY_OF[role]].processes[0]
        if not all(process.serves for process in group.processes):  # it is replaced anyway
            del self._waits_until[role]
            return []
        is_late = now >= self._waits_until[role]
        if not standby.serves and not is_late:
            return []
        del self._waits_until[role]
        if standby.serves or role is Role.CORE:
            return _leave(group, now)
        text = f"the {role} stays: no standby gets ready to replace it"
        return [Note(logging.ERROR, text)]

    def pardon(self, stood_s: float) -> None:
        """So long nobody looked."""
        self._waits_until = {role: due + stood_s for role, due in self._waits_until.items()}

    def cancel(self) -> list[Action]:
        """The engine ends: replace nobody any more. Who leaves already goes on with that."""
        self._waits_until.clear()
        spares = [group.spare for group in self._groups.values() if group.spare is not None]
        return [action for spare in spares if spare.is_coming for action in spare.kill()]

    def on_spare_ready(self, group: Group, now: float) -> list[Action]:
        """The successor takes the place of who has served, who finishes what it has."""
        (old,), new = group.processes, group.spare
        assert new is not None
        group.processes, group.spare = [new], old
        new.slot, old.slot = old.slot, new.slot
        new.num_restarts = old.num_restarts + 1
        return [
            Swap(new.slot, old.slot),
            *old.leave(self._drain_deadline(now), Drain(is_replaced=True)),
            Note(logging.INFO, f"{new.slot} serves; its predecessor finishes what it has"),
        ]

    def on_spare_death(self, group: Group) -> list[Action]:
        """Who has left is gone, or its successor has not come."""
        spare, group.spare = group.spare, None
        assert spare is not None
        if spare.is_doomed or spare.epoch < group.processes[0].epoch:
            return []
        return [Note(logging.ERROR, f"the {group.role} stays: its successor has died")]

    def _drain_deadline(self, now: float) -> float:
        return now + self._recovery.shutdown_timeout_s + LEAVE_GRACE_S

    def _replace_api(self, group: Group, now: float) -> list[Action]:
        if self._is_api_alone:
            group.is_leaving = True
            (api,) = group.processes
            return api.leave(self._drain_deadline(now), Drain(is_replaced=True))
        spare = group.spare = Process(Slot(group.role, len(group.processes)))
        return [spare.begin(self._next_epoch(), now + self._recovery.startup_timeout_s)]


def already_replaced(role: Role) -> str:
    """Why a second restart is refused while the first goes on."""
    return f"the {role} is being replaced already"


def _leave(group: Group, now: float) -> list[Action]:
    group.is_leaving = True
    deadline = now + LEAVE_GRACE_S
    return [action for p in group.processes for action in p.leave(deadline, Stop())]

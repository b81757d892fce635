"""Replacing processes that are well, because somebody asks for it: nothing fails, little waits.

A worker is asked to end after its running step, once its standby is ready. The core is asked to
end; its clients say again what they have. Of the API two run for a while: the successor takes new
connections from the same socket, and who leaves finishes what it has.
"""

import logging
from collections.abc import Callable, Mapping

from protocol.config import RecoveryConfig
from protocol.lifecycle import Drain, ProcessState, Role, Stop
from scripts.supervisor.supervised import Action, Group, Note, Process, Slot, Swap

RESTARTABLE = (Role.API, Role.CORE, Role.WORKER)
LEAVE_GRACE_S = 5.0
"""From Stop to SIGKILL for one process: as long as a step may take."""


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
        self._worker_waits_until: float | None = None
        """For its standby: a worker's restart is prepared until then."""

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to say at the latest."""
        return self._worker_waits_until

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
        if not group.is_ready or group.spare is not None or self._is_prepared(role):
            return f"the {role} is being replaced already", []
        if role is Role.API:
            return None, self._replace_api(group, now)
        if role is Role.WORKER and Role.STANDBY in self._groups:
            self._worker_waits_until = now + self._recovery.startup_timeout_s
            return None, self.tick(now)
        return None, _leave(group, now)

    def tick(self, now: float) -> list[Action]:
        """Replace the worker as soon as its standby is ready, or give that up."""
        if self._worker_waits_until is None:
            return []
        worker, standby = self._groups[Role.WORKER], self._groups[Role.STANDBY].processes[0]
        if not worker.is_ready:  # it has been replaced without being asked
            self._worker_waits_until = None
            return []
        if standby.serves:
            self._worker_waits_until = None
            return _leave(worker, now)
        if now < self._worker_waits_until:
            return []
        self._worker_waits_until = None
        return [Note(logging.ERROR, "the worker stays: no standby gets ready to replace it")]

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
        if spare.epoch < group.processes[0].epoch:
            return []
        return [Note(logging.ERROR, f"the {group.role} stays: its successor has died")]

    def _is_prepared(self, role: Role) -> bool:
        return role is Role.WORKER and self._worker_waits_until is not None

    def _drain_deadline(self, now: float) -> float:
        return now + self._recovery.shutdown_timeout_s + LEAVE_GRACE_S

    def _replace_api(self, group: Group, now: float) -> list[Action]:
        if self._is_api_alone:
            group.is_leaving = True
            (api,) = group.processes
            return api.leave(self._drain_deadline(now), Drain(is_replaced=True))
        spare = group.spare = Process(Slot(group.role, len(group.processes)))
        return [spare.begin(self._next_epoch(), now + self._recovery.startup_timeout_s)]


def _leave(group: Group, now: float) -> list[Action]:
    group.is_leaving = True
    deadline = now + LEAVE_GRACE_S
    return [action for p in group.processes for action in p.leave(deadline, Stop())]

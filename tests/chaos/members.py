"""Finds the processes of an engine and of its replicas by the status of their supervisors."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from protocol.process.run_dir import replica_dir
from protocol.process.status import StatusLink
from scripts.testing import is_alive


class Member(NamedTuple):
    """A process of an engine."""

    role: str
    replica: int | None
    """None: the process is a child of the outer supervisor, or that supervisor itself."""
    rank: int
    pid: int


class Members:
    """Queries the supervisor of an engine, and those of its replicas."""

    def __init__(self, run_dir: str, timeout_s: float) -> None:
        """Start connecting; the supervisor may come later. `timeout_s` holds for each query."""
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._link = StatusLink(run_dir)
        self._replicas: dict[int, StatusLink] = {}

    def outer(self) -> StatusReply | None:
        """Query the outer supervisor once; None if it does not answer."""
        return self._link.query(self._timeout_s)

    def whole(self) -> StatusReply | None:
        """Return the outer reply with the processes of all replicas; None: there is no reply.

        It is ready if the supervisors of all replicas answer and are ready, too.
        """
        reply = self.outer()
        if reply is None:
            return None
        rows, are_ready = list(reply.processes), reply.ready
        for row in _replicas(reply):
            inner = self._inner(row)
            are_ready = are_ready and inner is not None and inner.ready
            rows += [] if inner is None else inner.processes
        return msgspec.structs.replace(reply, processes=rows, ready=are_ready)

    def living(self, role: str) -> list[Member]:
        """Return the living processes of a role, in the order of replicas and ranks."""
        reply = self.outer()
        if reply is None:
            return []
        found = list(_members(reply, role, None))
        if not found:
            for row in _replicas(reply):
                inner = self._inner(row)
                found += [] if inner is None else _members(inner, role, row.rank)
        return found

    def of_replica(self, replica: int) -> list[Member]:
        """Return the living processes of a replica, its supervisor first."""
        reply = self.outer()
        rows = [] if reply is None else [row for row in _replicas(reply) if row.rank == replica]
        found: list[Member] = []
        for inner in map(self._inner, rows):
            found += [] if inner is None else _members(inner, None, replica)
        return sorted(found, key=lambda member: member.role != Role.SUPERVISOR)

    def close(self) -> None:
        """Disconnect."""
        for link in (self._link, *self._replicas.values()):
            link.close()

    def _inner(self, row: ProcessStatus) -> StatusReply | None:
        """Query the supervisor of a replica; None if it does not serve, or does not answer."""
        if row.state is not ProcessState.READY:
            return None
        link = self._replicas.get(row.rank)
        if link is None:
            link = self._replicas[row.rank] = StatusLink(replica_dir(self._run_dir, row.rank))
        return link.query(self._timeout_s)


def _replicas(reply: StatusReply) -> list[ProcessStatus]:
    return [row for row in reply.processes if row.role is Role.REPLICA]


def _members(reply: StatusReply, role: str | None, replica: int | None) -> Iterator[Member]:
    """Yield the living processes of a reply; `role` None: of every role."""
    for row in reply.processes:
        if row.pid is not None and role in (None, str(row.role)) and is_alive(row.pid):
            number = row.rank if row.role is Role.REPLICA else replica
            yield Member(str(row.role), number, row.rank, row.pid)

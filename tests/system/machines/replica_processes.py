"""The processes of a replica, as the status of its supervisor lists them."""

import contextlib
import os
import signal

from protocol.lifecycle import ProcessStatus, Role
from protocol.process.launch import EngineProcesses
from protocol.process.run_dir import replica_dir
from protocol.process.status import StatusLink
from scripts.testing import TIMEOUT_S


def kill_all(engine: EngineProcesses, replica: int) -> None:
    """Kill the supervisor and all processes of a replica."""
    for row in rows_of(engine, replica):
        if row.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has left with one of the others
                os.kill(row.pid, signal.SIGKILL)


def drain(engine: EngineProcesses, replica: int) -> None:
    """Ask the supervisor of a replica to end in order."""
    [pid] = [row.pid for row in rows_of(engine, replica) if row.role is Role.SUPERVISOR]
    assert pid is not None
    os.kill(pid, signal.SIGTERM)


def rows_of(engine: EngineProcesses, replica: int) -> list[ProcessStatus]:
    with contextlib.closing(StatusLink(replica_dir(engine.run_dir, replica))) as link:
        reply = link.query(TIMEOUT_S)
    assert reply is not None
    return reply.processes

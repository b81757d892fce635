"""Kills processes of an engine, and waits until their successors are ready."""

import os
import signal
from pathlib import Path

from protocol.lifecycle import ProcessState, ProcessStatus, Role
from scripts.testing import TIMEOUT_S, Engine, eventually, is_alive


def find(engine: Engine, role: Role) -> ProcessStatus | None:
    """Return the status of one process, whether the engine is ready or not."""
    reply = engine.status()
    return None if reply is None else next((r for r in reply.processes if r.role is role), None)


def wait_for(
    engine: Engine, role: Role, above: int = 0, timeout_s: float = TIMEOUT_S
) -> ProcessStatus:
    """Wait until a process with a greater epoch is ready; RuntimeError: the engine has ended."""

    def ask() -> ProcessStatus | None:
        engine.check()
        row = find(engine, role)
        if row is None or row.state is not ProcessState.READY or row.epoch <= above:
            return None
        return row if row.pid is not None else None

    return eventually(ask, f"{role} above epoch {above} is ready", timeout_s)


def pid_of(row: ProcessStatus) -> int:
    assert row.pid is not None
    return row.pid


def kill_and_wait(engine: Engine, victims: list[ProcessStatus]) -> None:
    """Kill processes at once, in this order, and wait until all are replaced."""
    for row in victims:
        os.kill(pid_of(row), signal.SIGKILL)
    for row in victims:
        wait_for(engine, row.role, row.epoch)


def check_zombies(engine: Engine) -> None:
    """Wait until the supervisor has no zombie children; it looks for them once a second."""
    children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children")

    def is_clean() -> bool:
        return all(map(is_alive, map(int, children.read_text().split())))

    eventually(is_clean, "the dead are reaped")

"""The operating system that the real loops get in a simulation: poller, processes, failpoints.

The clock is `World.clock`, the sockets are in `sockets`. The loops take all of these as arguments.
Only failpoints are patched: they are functions that each module binds when it is imported.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import zmq

import core_proc.links.worker_link
import core_proc.loop
import protocol.client.open_requests
import worker_proc.loop
import worker_proc.null.runner
from tests.simulation.sockets import SimulatedSocket
from tests.simulation.wire import Wire
from tests.simulation.world import KilledHere, Violation, World

FAILPOINT_MODULES = (
    *(core_proc.loop, core_proc.links.worker_link),
    *(protocol.client.open_requests, worker_proc.loop, worker_proc.null.runner),
)
"""A process can be killed at the failpoints of these modules."""
_READABLE = int(zmq.POLLIN)


class SimulatedPoller:
    """A `zmq.Poller` that never waits: the world wakes its process when something is readable."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pidfds: set[int] = set()
        self._sockets: list[SimulatedSocket] = []

    def register(self, socket: Any, flags: int = _READABLE) -> None:
        """Poll a socket or a pidfd; other objects are ignored."""
        if isinstance(socket, int):
            self._pidfds.add(socket)
        elif isinstance(socket, SimulatedSocket):
            self._sockets.append(socket)

    def unregister(self, socket: Any) -> None:
        """Stop polling a socket or a pidfd."""
        if isinstance(socket, int):
            self._pidfds.discard(socket)
        elif isinstance(socket, SimulatedSocket):
            self._sockets.remove(socket)

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        """Return the pidfds of dead processes, sockets with an unread message, and the like."""
        ready: list[tuple[Any, int]] = [
            (socket, _READABLE) for socket in self._sockets if socket.inbox
        ]
        dead = self._pidfds & self._world.dead_pidfds
        if self._world.readable_fds:
            dead |= self._pidfds & self._world.readable_fds
        return [*((fd, _READABLE) for fd in sorted(dead)), *ready] if dead else ready


class SimulatedProcesses:
    """The `protocol.transport.runtime.ProcessControl` of the process whose code runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def getpid(self) -> int:
        assert self._world.current is not None
        return self._world.current.pid

    def pidfd_open(self, pid: int) -> int:
        fd = self._world.open_pidfd(pid)
        if fd is None:
            raise ProcessLookupError(pid)
        return fd

    def kill(self, pidfd: int) -> None:
        """Fail the run: the core has no reason to kill a simulated process."""
        process, sender = self._world.process_of(pidfd), self._world.current
        assert process is not None
        assert sender is not None
        self._world.counts["killed by core"] += 1
        raise Violation(f"misbehaved: {sender.name} kills {process.name}")

    def close(self, fd: int) -> None:
        """Do nothing: descriptors are plain numbers here."""


def _failpoint(world: World, wire: Wire) -> Callable[..., None]:
    def failpoint(name: str, when: bool = True) -> None:
        rate = wire.failpoint_rate
        if rate and when and world.current is not None and world.random() < rate:
            world.counts[f"kill at {name}"] += 1
            raise KilledHere

    return failpoint


def _no_failpoint(name: str, when: bool = True) -> None:
    """A failpoint at which no process is killed."""


@contextlib.contextmanager
def patched_failpoints(world: World, wire: Wire) -> Iterator[None]:
    """Kill processes at failpoints with the wire's `failpoint_rate`, read again at each one."""
    failpoint = _failpoint(world, wire) if wire.failpoint_rate else _no_failpoint
    before = [(module, module.failpoint) for module in FAILPOINT_MODULES]
    try:
        for module in FAILPOINT_MODULES:
            vars(module)["failpoint"] = failpoint
        yield
    finally:
        for module, original in before:
            vars(module)["failpoint"] = original

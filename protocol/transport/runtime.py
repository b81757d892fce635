"""The parts of the operating system that the loops use: clock, poller, sockets and processes.

A loop takes these as arguments, so that tests and the simulation can run the real code in virtual
time. The real clock is the module `time` itself and the real poller a `zmq.Poller`: no wrapper
stands between a loop and the system.
"""

import os
import signal
from typing import Any, Protocol

import zmq


class Clock(Protocol):
    """The part of the module `time` that the loops use."""

    def monotonic(self) -> float: ...
    def monotonic_ns(self) -> int: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Poller(Protocol):
    """The part of a `zmq.Poller` that the loops use."""

    def register(self, socket: Any, flags: int = ...) -> None: ...
    def unregister(self, socket: Any) -> None: ...
    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]: ...


class SocketFactory(Protocol):
    """The part of a `zmq.Context` that the loops use."""

    def socket(self, socket_type: int) -> zmq.Socket[bytes]: ...
    def term(self) -> None: ...
    def destroy(self, linger: int | None = None) -> None: ...


class ProcessControl(Protocol):
    """Watches and kills processes that this one did not start."""

    def getpid(self) -> int: ...
    def pidfd_open(self, pid: int) -> int: ...
    def kill(self, pidfd: int) -> None: ...
    def close(self, fd: int) -> None: ...


class SystemProcesses:
    """The processes of the system; `kill` raises OSError if the process has ended."""

    getpid = staticmethod(os.getpid)
    pidfd_open = staticmethod(os.pidfd_open)
    close = staticmethod(os.close)

    @staticmethod
    def kill(pidfd: int) -> None:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

"""Detects the deaths of processes at the other ends of a link, by pidfds in the loop's poller."""

import contextlib
from collections.abc import Iterable

import zmq

from protocol.transport.runtime import Poller, ProcessControl


class PidfdMonitor:
    """The processes behind the connections of one socket, by the identity of the connection."""

    def __init__(self, poller: Poller, processes: ProcessControl) -> None:
        self._poller = poller
        self._processes = processes
        self._pidfds: dict[bytes, int] = {}
        self._peers: dict[int, bytes] = {}

    def add(self, peer: bytes, pid: int) -> bool:
        """Monitor a process, instead of any other of this peer; False if that is impossible."""
        self.remove(peer)
        if pid <= 0 or pid == self._processes.getpid():
            return False
        try:
            pidfd = self._processes.pidfd_open(pid)
        except (OSError, OverflowError):
            return False
        self._pidfds[peer] = pidfd
        self._peers[pidfd] = peer
        self._poller.register(pidfd, zmq.POLLIN)
        return True

    def remove(self, peer: bytes) -> None:
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            del self._peers[pidfd]
            self._poller.unregister(pidfd)
            self._processes.close(pidfd)

    def kill(self, peer: bytes) -> None:
        """Send SIGKILL; a pidfd cannot name another process that has got the same pid since."""
        pidfd = self._pidfds.get(peer)
        if pidfd is not None:
            with contextlib.suppress(OSError):
                self._processes.kill(pidfd)

    def dead(self, ready: Iterable[object]) -> list[bytes]:
        """Return the peers that a poll found dead; call it first, as descriptors may be reused."""
        peers = self._peers
        return [peers[item] for item in ready if isinstance(item, int) and item in peers]

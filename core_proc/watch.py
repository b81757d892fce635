"""Notices the deaths of processes at the other ends of the links, through pidfds in a poller."""

import contextlib
from collections.abc import Iterable

import zmq

from protocol.runtime import Poller, ProcessControl


class DeathWatch:
    """The processes behind the connections of one socket, by the identity of the connection."""

    def __init__(self, poller: Poller, processes: ProcessControl) -> None:
        self._poller = poller
        self._processes = processes
        self._pidfds: dict[bytes, int] = {}
        self._peers: dict[int, bytes] = {}

    def add(self, peer: bytes, pid: int) -> bool:
        """Watch a process instead of the one that this peer was; False if that is not possible."""
        self.remove(peer)
        pidfd = self._open_pidfd(pid)
        if pidfd < 0:
            return False
        self._pidfds[peer] = pidfd
        self._peers[pidfd] = peer
        self._poller.register(pidfd, zmq.POLLIN)
        return True

    def remove(self, peer: bytes) -> None:
        """Watch a peer no longer, if it was watched."""
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            del self._peers[pidfd]
            self._poller.unregister(pidfd)
            self._processes.close(pidfd)

    def kill(self, peer: bytes) -> None:
        """Send SIGKILL; the pidfd makes sure that it hits this process and no other."""
        pidfd = self._pidfds.get(peer)
        if pidfd is not None:
            with contextlib.suppress(OSError):
                self._processes.kill(pidfd)

    def dead(self, ready: Iterable[object]) -> list[bytes]:
        """Peers whose death is among what a poll found.

        To be asked before anything else is done with `ready`: a descriptor that is closed may
        return as another process's.
        """
        peers = self._peers
        return [peers[item] for item in ready if isinstance(item, int) and item in peers]

    def _open_pidfd(self, pid: int) -> int:
        """Descriptor that becomes readable at the death of `pid`; -1 if it cannot be watched."""
        if pid <= 0 or pid == self._processes.getpid():
            return -1
        try:
            return self._processes.pidfd_open(pid)
        except (OSError, OverflowError):
            return -1

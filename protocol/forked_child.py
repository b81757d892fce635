"""The parent's side of processes that are not started but forked: a zygote, and its workers.

A forked worker is a child like any other, once it is there: its zygote forks it twice, and this
process, as the subreaper, becomes its parent.
"""

import os
import time
from contextlib import ExitStack

from protocol.child_handle import Child
from protocol.config import EngineConfig
from protocol.lifecycle import Fatal, Progress, Ready
from protocol.message import ProtocolError
from protocol.zygote_link import (
    Forked,
    ForkFailed,
    ForkWorker,
    LinkClosed,
    ZygoteLink,
    decode_from_zygote,
    socket_pair,
)

_UNKNOWN_STATUS = 127
_RECEIVE_LIMIT = 64


class ForkedChild(Child):
    """One running process that this one has not started itself."""

    def __init__(self, pid: int, epoch: int, parent_write: int) -> None:
        """Watch a process that is already a child of this one, dead or alive.

        Args:
            pid: of the child.
            epoch: its incarnation.
            parent_write: write end of its parent pipe; belongs to this object from now on.

        Raises:
            OSError: it cannot be watched; the pipe is closed, which ends it.
        """
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            os.close(parent_write)
            raise
        self.pid = pid
        self._parent_write = parent_write
        self._status: int | None = None
        self.epoch = epoch
        self.started_at = time.monotonic()

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._status is None and self.pidfd >= 0:
            self._status = _reaped(self.pidfd)
        return self._status


class ForkServer:
    """A zygote, and the workers that it has been asked for."""

    def __init__(self, config: EngineConfig, epoch: int, progress_fd: int | None = None) -> None:
        """Start the zygote, which reports in a progress page.

        Raises:
            OSError: it cannot be started; nothing is left behind.
        """
        with ExitStack() as stack:
            ours, theirs = socket_pair()
            stack.callback(ours.close)
            with theirs:
                self.child = Child(
                    "worker_proc",
                    config,
                    epoch=epoch,
                    listen_fd=theirs.fileno(),
                    progress_fd=progress_fd,
                    arguments=["--zygote"],
                )
            stack.pop_all()
        self.link = ZygoteLink(ours, decode_from_zygote)
        self._asked: dict[int, int] = {}
        """Write ends of parent pipes of workers that are not there yet, by epoch."""

    def fork(
        self, epoch: int, rank: int, progress_fd: int | None = None, *, is_standby: bool
    ) -> None:
        """Ask for a worker; `Forked` or `ForkFailed` follows, or the end of the zygote.

        Raises:
            OSError: the zygote cannot be asked.
        """
        parent_read, parent_write = os.pipe()
        fds = {"parent_fd": parent_read}
        if progress_fd is not None:
            fds["progress_fd"] = progress_fd
        message = ForkWorker(epoch, rank, is_standby, list(fds))
        try:
            if not self.link.send(message, list(fds.values())):
                raise OSError("the zygote does not read")
        except LinkClosed as error:
            os.close(parent_write)
            raise OSError("the zygote is gone") from error
        except OSError:
            os.close(parent_write)
            raise
        finally:
            os.close(parent_read)
        self._asked[epoch] = parent_write

    def receive(self) -> list[Progress | Ready | Fatal | Forked | ForkFailed]:
        """What the zygote has said since, in order, and a bounded part of it.

        Raises:
            ProtocolError: what it says makes no sense; it should be killed.
        """
        messages: list[Progress | Ready | Fatal | Forked | ForkFailed] = []
        try:
            for _ in range(_RECEIVE_LIMIT):
                received = self.link.receive()
                if received is None:
                    break
                message, fds = received
                if fds:
                    for fd in fds:
                        os.close(fd)
                    raise ProtocolError("a zygote has no descriptors to send")
                messages.append(message)
        except LinkClosed:
            pass  # its pidfd says more
        return messages

    def claim(self, forked: Forked) -> ForkedChild:
        """Take over a worker that was asked for.

        Raises:
            ProtocolError: nobody has asked for it.
            OSError: it cannot be watched; it ends by itself.
        """
        parent_write = self._asked.pop(forked.epoch, None)
        if parent_write is None:
            raise ProtocolError(f"nobody has asked for a worker with epoch {forked.epoch}")
        return ForkedChild(forked.pid, forked.epoch, parent_write)

    def disown(self, epoch: int) -> bool:
        """Give up a worker that was asked for: if it comes to life after all, it ends by itself.

        Returns:
            Whether it was asked for.
        """
        parent_write = self._asked.pop(epoch, None)
        if parent_write is not None:
            os.close(parent_write)
        return parent_write is not None

    @property
    def asked(self) -> list[int]:
        """Epochs of workers that are not there yet."""
        return list(self._asked)

    def close(self) -> None:
        """After the end of the zygote: close everything, and give up whoever is not there yet."""
        for epoch in self.asked:
            self.disown(epoch)
        self.link.close()
        self.child.close()


def reap_strangers(known: frozenset[int]) -> None:
    """Reap dead children that nobody knows: workers that were given up before they had a name.

    Args:
        known: pids whose owners reap them.
    """
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in known:
            return
        os.waitpid(info.si_pid, os.WNOHANG)


def _reaped(pidfd: int) -> int | None:
    """Exit status of a child, negative for a signal, and reap it; None while it runs."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:  # somebody else has reaped it, as where SIGCHLD is ignored
        return _UNKNOWN_STATUS
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

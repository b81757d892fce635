"""The parent's side of a zygote and of the workers that it forks.

The zygote forks each worker twice, and this process, as the subreaper, becomes its parent: from
then on a forked worker is a child like any other.
"""

import contextlib
import os
from contextlib import ExitStack

from protocol.config import EngineConfig
from protocol.message import ProtocolError
from protocol.process.child_handle import Child, ChildHandle
from protocol.process.zygote_link import (
    Forked,
    ForkWorker,
    FromZygote,
    LinkClosed,
    ZygoteLink,
    close_all,
    decode_from_zygote,
    socket_pair,
)

_RECEIVE_LIMIT = 64


class ForkServer:
    """A zygote, and the workers that were requested from it."""

    def __init__(
        self, config: EngineConfig, epoch: int, progress_fd: int | None = None, *, rank: int = 0
    ) -> None:
        """Start the zygote of a rank's workers; an OSError leaves nothing behind.

        It reports in a progress page.
        """
        with ExitStack() as stack:
            ours, theirs = socket_pair()
            stack.callback(ours.close)
            with theirs:
                self.child = Child(
                    "worker_proc",
                    config,
                    epoch=epoch,
                    rank=rank,
                    listen_fd=theirs.fileno(),
                    progress_fd=progress_fd,
                    arguments=["--zygote"],
                )
            stack.pop_all()
        self.link = ZygoteLink(ours, decode_from_zygote)
        self._asked: dict[int, int] = {}
        """Write ends of the parent pipes of requested workers, by epoch."""

    def fork(self, epoch: int, progress_fd: int | None = None, *, is_standby: bool) -> None:
        """Request a worker; `Forked`, `ForkFailed` or the zygote's end follows. OSError: unsent."""
        parent_read, parent_write = os.pipe()
        fds = {"parent_fd": parent_read}
        if progress_fd is not None:
            fds["progress_fd"] = progress_fd
        message = ForkWorker(epoch, is_standby, list(fds))
        try:
            if not self.link.send(message, list(fds.values())):
                raise OSError("the zygote does not read")
        except (LinkClosed, OSError) as error:
            os.close(parent_write)
            raise OSError(str(error) or "the zygote is gone") from error
        finally:
            os.close(parent_read)
        self._asked[epoch] = parent_write

    def receive(self) -> list[FromZygote]:
        """Return a bounded number of arrived messages; ProtocolError: one of them is invalid."""
        messages: list[FromZygote] = []
        with contextlib.suppress(LinkClosed):  # its pidfd reports the death
            while len(messages) < _RECEIVE_LIMIT and (received := self.link.receive()) is not None:
                message, fds = received
                if fds:
                    close_all(fds)
                    raise ProtocolError("a zygote has no descriptors to send")
                messages.append(message)
        return messages

    def claim(self, forked: Forked) -> ChildHandle:
        """Take over a requested worker; ProtocolError: it was not requested, or given up.

        OSError: it cannot be watched; it ends by itself.
        """
        parent_write = self._asked.pop(forked.epoch, None)
        if parent_write is None:
            raise ProtocolError(f"no worker with epoch {forked.epoch} was requested")
        return ChildHandle(forked.pid, forked.epoch, parent_write)

    def disown(self, epoch: int) -> bool:
        """Give up a worker, which ends by itself if it starts; return whether it was requested."""
        parent_write = self._asked.pop(epoch, None)
        if parent_write is not None:
            os.close(parent_write)
        return parent_write is not None

    def close(self) -> None:
        """Close everything and give up requested workers, after the end of the zygote."""
        for epoch in list(self._asked):
            self.disown(epoch)
        self.link.close()
        self.child.close()


def reap_unknown_children(known: frozenset[int]) -> None:
    """Reap dead children that are not `known`: workers given up before they were claimed."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in known:
            return
        os.waitpid(info.si_pid, os.WNOHANG)

"""The processes of a supervisor: one for each slot at most, with its pidfd in the poller."""

import os
import socket
from collections.abc import Container

import zmq

from protocol.child import Child, rss_bytes
from protocol.config import EngineConfig
from protocol.lifecycle import ProcessState, ProcessStatus, Role
from scripts.pages import Pages
from scripts.supervised import Process, Slot

MODULES = {Role.API: "api_proc", Role.CORE: "core_proc", Role.WORKER: "worker_proc"}
SUPERVISOR_EPOCH = 0


class ProcessTable:
    """Starts, kills and buries; it decides nothing."""

    def __init__(
        self,
        config: EngineConfig,
        poller: zmq.Poller,
        pages: Pages,
        listener: socket.socket | None,
    ) -> None:
        """Start processes with this configuration.

        Args:
            config: complete, as every child gets it.
            poller: gets the pidfd of each process.
            pages: the progress pages to hand on.
            listener: what the API serves on.
        """
        self._config = config
        self._poller = poller
        self._pages = pages
        self._listener = listener
        self._children: dict[Slot, Child] = {}

    def start(self, slot: Slot, epoch: int) -> None:
        """Start the next incarnation of a slot whose last one is buried.

        Raises:
            OSError: it cannot be started; nothing is left behind.
        """
        assert slot not in self._children, f"{slot} would live twice"
        listen_fd = None
        if slot.role is Role.API:
            assert self._listener is not None
            listen_fd = self._listener.fileno()
        child = Child(
            MODULES[slot.role],
            self._config,
            epoch=epoch,
            rank=slot.rank,
            listen_fd=listen_fd,
            progress_fd=self._pages.begin(slot, epoch),
        )
        self._children[slot] = child
        self._poller.register(child.pidfd, zmq.POLLIN)

    def find(self, slot: Slot) -> Child | None:
        """The process of a slot; None for one that was never there or is buried."""
        return self._children.get(slot)

    def dead(self, ready: Container[int]) -> list[Slot]:
        """Whose pidfd is among what a poll has found."""
        return [slot for slot, child in self._children.items() if child.pidfd in ready]

    def bury(self, slot: Slot) -> None:
        """Let go of a process that is dead and reaped."""
        child = self._children.pop(slot)
        assert child.poll() is not None, "only the dead are buried"
        self._poller.unregister(child.pidfd)
        child.close()

    def kill(self, slot: Slot) -> None:
        """Send SIGKILL to whoever is there."""
        child = self._children.get(slot)
        if child is not None:
            child.kill()

    def dump_stacks(self, slot: Slot) -> None:
        """Have whoever is there, and has reported in its page, print its stacks."""
        child = self._children.get(slot)
        if child is not None:
            child.dump_stacks()

    def row(self, process: Process) -> ProcessStatus:
        """One line of a status report."""
        child = self._children.get(process.slot)
        return ProcessStatus(
            process.slot.role,
            process.slot.rank,
            None if child is None else child.pid,
            process.epoch,
            process.state,
            0 if child is None else child.rss_bytes(),
            process.num_restarts,
        )


def supervisor_row(state: ProcessState) -> ProcessStatus:
    """The supervisor's own line, with the state of the engine as a whole."""
    pid = os.getpid()
    return ProcessStatus(Role.SUPERVISOR, 0, pid, SUPERVISOR_EPOCH, state, rss_bytes(pid), 0)

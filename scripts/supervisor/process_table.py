"""The processes of a supervisor: one for each slot at most, with its pidfd in the poller."""

import logging
import os
import socket
from collections.abc import Container, Sequence

import msgspec
import zmq

from protocol.config import EngineConfig
from protocol.lifecycle import ProcessState, ProcessStatus, Role
from protocol.message import ProtocolError
from protocol.process.child_handle import Child, ChildHandle, rss_bytes
from protocol.transport.runtime import Poller
from protocol.zygote_link import ForkFailed
from scripts.supervisor.actions import Origin, Slot, Start
from scripts.supervisor.failover import HELPERS
from scripts.supervisor.forks import Event, Forked, ZygoteClient
from scripts.supervisor.pages import Pages
from scripts.supervisor.peers import SUPERVISOR_EPOCH
from scripts.supervisor.process_state import Process
from scripts.supervisor.system import System

MODULES = {
    Role.API: "api_proc",
    Role.CORE: "core_proc",
    Role.WORKER: "worker_proc",
    Role.STANDBY_CORE: "core_proc",
}
log = logging.getLogger("troika.supervisor")

ZYGOTE = Slot(Role.ZYGOTE)


class ProcessTable:
    """Starts, kills and reaps processes; it takes no decisions."""

    def __init__(
        self,
        config: EngineConfig,
        poller: Poller,
        pages: Pages,
        listener: socket.socket | None,
        system: System,
    ) -> None:
        """Start processes with this configuration.

        Args:
            config: complete, as every child gets it.
            poller: gets the pidfd of each process.
            pages: the progress pages to hand on.
            listener: what the API serves on.
            system: how processes are started.
        """
        self._config = config
        self._poller = poller
        self._pages = pages
        self._listener = listener
        self._children: dict[Slot, ChildHandle] = {}
        self._forks = ZygoteClient(poller, system)
        self._start_child = system.start_child
        self._asked: dict[int, Slot] = {}
        """Slots of processes that the zygote was asked to fork, by epoch."""

    def start(self, action: Start) -> None:
        """Start the next incarnation of a slot whose last one was reaped.

        A forked process exists once `fork_events` has returned its `Forked`.

        Raises:
            OSError: it cannot be started; nothing is left behind.
        """
        slot, epoch = action.slot, action.epoch
        assert slot not in self._children, f"{slot} has a process already"
        assert action.origin is not Origin.PROMOTED, "see promote"
        progress_fd = self._pages.begin(slot, epoch)
        if action.origin is Origin.FORKED:
            is_standby = slot.role is Role.STANDBY
            self._forks.ask(epoch, slot.rank, progress_fd, is_standby=is_standby)
            self._asked[epoch] = slot
        elif slot.role is Role.ZYGOTE:
            self._enter(slot, self._forks.start_zygote(self._config, epoch, progress_fd))
        else:
            self._enter(slot, self._new_child(slot, epoch, progress_fd))

    def promote(self, standby: Slot, slot: Slot, epoch: int) -> None:
        """Move the process of a standby to a slot whose process was reaped."""
        assert slot not in self._children, f"{slot} would live twice"
        child = self._children[slot] = self._children.pop(standby)
        child.epoch = epoch

    def _new_child(self, slot: Slot, epoch: int, progress_fd: int | None) -> Child:
        listen_fd = None
        if slot.role is Role.API:
            assert self._listener is not None
            listen_fd = self._listener.fileno()
        return self._start_child(
            MODULES[slot.role],
            self._config,
            epoch=epoch,
            rank=slot.rank,
            listen_fd=listen_fd,
            progress_fd=progress_fd,
            arguments=["--standby"] if slot.role is Role.STANDBY_CORE else [],
        )

    def _enter(self, slot: Slot, child: ChildHandle) -> None:
        self._children[slot] = child
        self._poller.register(child.pidfd, zmq.POLLIN)

    def fork_events(self) -> list[tuple[Slot, Event]]:
        """Receive the results of forks, and messages of the zygote."""
        try:
            return self._attend(self._forks.receive())
        except ProtocolError as error:
            log.error("the zygote is killed: %s", error)
            self.kill(ZYGOTE)
            return []

    def _attend(self, events: Sequence[Event]) -> list[tuple[Slot, Event]]:
        found: list[tuple[Slot, Event]] = []
        for event in events:
            match event:
                case Forked():
                    slot = self._asked.pop(event.child.epoch)
                    self._enter(slot, event.child)
                    found.append((slot, event))
                case ForkFailed():
                    given_up = self._asked.pop(event.epoch, None)
                    found += [] if given_up is None else [(given_up, event)]
                case _:
                    found.append((ZYGOTE, event))
        return found

    def keep_num_blocks(self, num_gpu_blocks: int) -> None:
        """Start workers with as many KV blocks as the first one found memory for.

        The core would have to begin anew with a worker that has another number of them.

        Args:
            num_gpu_blocks: of a process that is ready; 0: it may differ between workers.
        """
        if not num_gpu_blocks:
            return
        cache = msgspec.structs.replace(self._config.cache, num_gpu_blocks_override=num_gpu_blocks)
        self._config = msgspec.structs.replace(self._config, cache=cache)

    def hello(self, epoch: int, pid: int, peer: bytes) -> None:
        """Keep the connection of a process whose fork was not reported yet."""
        self._forks.hello(epoch, pid, peer)

    def swap(self, one: Slot, other: Slot) -> None:
        """Exchange the processes of two slots."""
        children = self._children
        children[one], children[other] = children[other], children[one]

    def find(self, slot: Slot) -> ChildHandle | None:
        """The process of a slot; None if there is none, or it was reaped."""
        return self._children.get(slot)

    def dead(self, ready: Container[int]) -> list[ChildHandle]:
        """The dead among the descriptors that a poll has found; reaping one may move another."""
        dead = [(slot, child) for slot, child in self._children.items() if child.pidfd in ready]
        # Helpers first, so that no dead standby is promoted.
        return [child for _, child in sorted(dead, key=lambda pair: pair[0].role not in HELPERS)]

    def slot_of(self, child: ChildHandle) -> Slot:
        """The present slot of a process."""
        return next(slot for slot, other in self._children.items() if other is child)

    def reap(self, slot: Slot) -> list[tuple[Slot, Event]]:
        """Remove a dead process; returns the forks that fail with a dead zygote."""
        child = self._children.pop(slot)
        assert child.poll() is not None, f"{slot} is alive"
        self._poller.unregister(child.pidfd)
        found = self._attend(self._forks.zygote_died()) if slot == ZYGOTE else []
        child.close()
        return found

    def reap_strangers(self) -> None:
        """Reap dead workers that were given up before their fork was reported."""
        self._forks.reap(frozenset(child.pid for child in self._children.values()))

    def kill(self, slot: Slot) -> bool:
        """Send SIGKILL to the process of a slot.

        A process that the zygote has not forked yet is given up, and so is the zygote.

        Returns:
            False if there is no process whose death will be reported.
        """
        child = self._children.get(slot)
        if child is not None:
            child.kill()
            return True
        epochs = [epoch for epoch, asked in self._asked.items() if asked == slot]
        for epoch in epochs:
            del self._asked[epoch]
            self._forks.give_up(epoch)
            self.kill(ZYGOTE)
        return not epochs

    def dump_stacks(self, slot: Slot) -> None:
        """Make the process of a slot print the stacks of its threads."""
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
            0 if child is None else rss_bytes(child.pid),
            process.num_restarts,
        )


def num_ranks(config: EngineConfig, *, has_api: bool) -> dict[Role, int]:
    """How many processes of each role an engine has, in the order in which they are started."""
    has_standby = bool(config.recovery.standby_workers)
    return {
        **({Role.ZYGOTE: 1} if has_standby else {}),
        Role.WORKER: config.parallel.tensor_parallel_size,
        **({Role.STANDBY: 1} if has_standby else {}),
        Role.CORE: 1,
        **({Role.STANDBY_CORE: 1} if config.recovery.standby_cores else {}),
        **({Role.API: 1} if has_api else {}),
    }


def supervisor_row(state: ProcessState) -> ProcessStatus:
    """The supervisor's own line, with the state of the engine as a whole."""
    pid = os.getpid()
    return ProcessStatus(Role.SUPERVISOR, 0, pid, SUPERVISOR_EPOCH, state, rss_bytes(pid), 0)

"""The processes of a supervisor: for each slot its process, connection and progress page."""

import contextlib
import os
import socket
from collections.abc import Container, Iterable
from dataclasses import dataclass

import msgspec
import zmq

from protocol.config import EngineConfig
from protocol.lifecycle import ProcessState, ProcessStatus, Promote, Ready, Role
from protocol.message import Message, encode
from protocol.process.child_handle import ChildHandle, rss_bytes
from protocol.process.progress_page import Death, Phase, ProgressPage, ProgressRecord
from protocol.transport.channel import PeerGone, RouterChannel
from protocol.transport.runtime import Poller
from scripts.supervisor.actions import Origin, RecordDeath, Slot, Start
from scripts.supervisor.deaths import Evidence
from scripts.supervisor.failover import HELPERS, STANDBY_OF
from scripts.supervisor.process_state import Process
from scripts.supervisor.replica import replica_config
from scripts.supervisor.roles import ARGUMENTS, MODULES
from scripts.supervisor.system import System
from scripts.supervisor.zygotes import StartEvent, Zygotes

_SUPERVISOR_EPOCH = 0


@dataclass(slots=True)
class _Row:
    """Everything that belongs to one slot. The page outlives the processes that write to it."""

    page: ProgressPage
    page_fd: int
    child: ChildHandle | None = None
    peer: bytes | None = None


class ProcessTable:
    """Starts, kills and reaps processes, and sends to them; it takes no decisions."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Iterable[Slot],
        listener: socket.socket | None,
        link: RouterChannel,
        poller: Poller,
        *,
        system: System,
    ) -> None:
        """Make a page for each slot. `poller` gets the pidfd of each process."""
        self._config = config
        self._listener = listener
        self._link = link
        self._poller = poller
        self._system = system
        self._rows = {
            slot: _Row(*ProgressPage.create(f"{slot.role}-{slot.rank}")) for slot in slots
        }
        self._zygotes = Zygotes(poller, self._enter)
        self._num_blocks: dict[Slot, tuple[int, int]] = {}
        """KV blocks and state blocks of each rank of the worker."""

    def close(self) -> None:
        for row in self._rows.values():
            row.page.close()
            os.close(row.page_fd)

    # Starts -------------------------------------------------------------------------------------

    def start(self, action: Start) -> None:
        """Start the next incarnation of a slot whose last one was reaped; OSError: nothing is left.

        A forked process exists once `start_events` has received the report about it.
        """
        slot, epoch = action.slot, action.epoch
        row = self._rows[slot]
        assert row.child is None, f"{slot} has a process already"
        if action.origin is Origin.PROMOTED:
            self._promote(slot, epoch)
            return
        row.page.write(epoch, Phase.NONE, None, 0, 0)
        if action.origin is Origin.FORKED:
            self._zygotes.fork(slot, epoch, row.page_fd)
        elif slot.role is Role.ZYGOTE:
            started = self._system.start_fork_server(
                self._config, epoch, row.page_fd, rank=slot.rank
            )
            self._zygotes.add(slot.rank, started)
            self._enter(slot, started.child)
        else:
            listener, rank, config = None, slot.rank, self._config
            if slot.role is Role.REPLICA:
                config = replica_config(config, rank)
            if slot.role is Role.API:  # a successor has the index of its predecessor
                listener, rank = self._listener, rank % self._config.api.api_server_count
            child = self._system.start_child(
                MODULES[slot.role],
                config,
                epoch=epoch,
                rank=rank,
                listen_fd=None if listener is None else listener.fileno(),
                progress_fd=row.page_fd,
                arguments=ARGUMENTS.get(slot.role, []),
            )
            self._enter(slot, child)

    def _promote(self, slot: Slot, epoch: int) -> None:
        """Promote the standby; the message has the epoch that it knows."""
        standby = Slot(STANDBY_OF[slot.role], slot.rank)
        row = self._rows[standby]
        assert row.child is not None
        row.page.inherit(self._rows[slot].page)
        self.send(standby, Promote(epoch))
        self.swap(standby, slot)
        row.child.epoch = epoch

    def start_events(self) -> list[StartEvent]:
        """Return what zygotes report about themselves, and failed forks; enter forked workers."""
        return self._zygotes.receive()

    def _enter(self, slot: Slot, child: ChildHandle, peer: bytes | None = None) -> None:
        """Enter a process, and its connection if that is known already."""
        row = self._rows[slot]
        row.child, row.peer = child, peer
        self._poller.register(child.pidfd, zmq.POLLIN)

    def keep_num_blocks(self, slot: Slot, ready: Ready) -> None:
        """Start workers with as many blocks as the first ones found memory for.

        With other numbers of blocks the core would have to start again. With several ranks the
        least number counts, once all numbers are known. 0: any number.
        """
        if not ready.num_gpu_blocks:
            return
        self._num_blocks[slot] = (ready.num_gpu_blocks, ready.num_state_blocks)
        if len(self._num_blocks) == self._config.parallel.num_ranks:
            num_gpu_blocks, num_state_blocks = map(
                min, zip(*self._num_blocks.values(), strict=True)
            )
            cache = msgspec.structs.replace(
                self._config.cache,
                num_gpu_blocks_override=num_gpu_blocks,
                num_state_blocks_override=num_state_blocks or None,
            )
            self._config = msgspec.structs.replace(self._config, cache=cache)

    def swap(self, one: Slot, other: Slot) -> None:
        """Exchange two slots: processes keep their connection and the page that they write."""
        rows = self._rows
        rows[one], rows[other] = rows[other], rows[one]

    # Deaths -------------------------------------------------------------------------------------

    def dead(self, ready: Container[int]) -> list[ChildHandle]:
        """Return the dead processes among a poll's descriptors; reaping one may move another."""
        # Helpers first, so that no dead standby is promoted.
        slots = sorted(self._rows, key=lambda slot: slot.role not in HELPERS)
        children = [self._rows[slot].child for slot in slots]
        return [child for child in children if child is not None and child.pidfd in ready]

    def slot_of(self, child: ChildHandle) -> Slot:
        return next(slot for slot, row in self._rows.items() if row.child is child)

    def reap(self, slot: Slot) -> list[StartEvent]:
        """Remove a dead process; returns the forks that fail with a dead zygote."""
        row = self._rows[slot]
        assert row.child is not None
        assert row.child.poll() is not None, f"{slot} is alive"
        self._poller.unregister(row.child.pidfd)
        events = self._zygotes.remove(slot.rank) if slot.role is Role.ZYGOTE else []
        row.child.close()
        if row.peer is not None:
            self._link.forget(row.peer)
        row.child = row.peer = None
        return events

    def reap_unknown_children(self) -> None:
        """Reap dead workers that were given up before their fork was reported."""
        children = [row.child for row in self._rows.values()]
        self._system.reap_unknown_children(frozenset(child.pid for child in children if child))

    def kill(self, slot: Slot, *, spares_zygote: bool = False) -> bool:
        """Send SIGKILL to the process of a slot.

        False: its zygote has not forked it yet. It is given up, and ends by itself once it is
        forked; no pidfd reports the death. The zygote is killed, unless it is to be spared.
        """
        child = self._rows[slot].child
        if child is not None:
            child.kill()
            return True
        if not self._zygotes.give_up(slot):
            return True
        if not spares_zygote:
            self.kill(Slot(Role.ZYGOTE, slot.rank))
        return False

    def dump_stacks(self, slot: Slot) -> None:
        if (child := self._rows[slot].child) is not None:
            child.dump_stacks()

    # Connections --------------------------------------------------------------------------------

    def connect(self, slot: Slot, epoch: int, peer: bytes, pid: int | None) -> None:
        """Enter the connection that a message came from.

        A Hello, which names the pid, takes precedence. It may be lost, or come before the report
        of the fork.
        """
        row = self._rows[slot]
        if row.child is None:
            if pid is not None:
                self._zygotes.connect(epoch, pid, peer)
        elif pid == row.child.pid or (pid is None and row.peer is None):
            row.peer = peer

    def send(self, slot: Slot, message: Message) -> None:
        """Send under the epoch of the slot. Lost messages are repeated, or a deadline passes."""
        row = self._rows[slot]
        if row.child is not None and row.peer is not None:
            self._send(row.peer, row.child.epoch, message)

    def answer(self, peer: bytes, message: Message) -> None:
        self._send(peer, _SUPERVISOR_EPOCH, message)
        self.forget_peer(peer)

    def forget_peer(self, peer: bytes) -> None:
        """Drop the state of a connection that belongs to no slot."""
        if all(row.peer != peer for row in self._rows.values()):
            self._link.forget(peer)

    def _send(self, peer: bytes, epoch: int, message: Message) -> None:
        with contextlib.suppress(PeerGone):
            self._link.send(peer, epoch, encode(message))

    # Pages and reports --------------------------------------------------------------------------

    def marks(self) -> dict[Slot, ProgressRecord]:
        """Return the marks of all readable pages."""
        found = {slot: row.page.read() for slot, row in self._rows.items()}
        return {slot: mark for slot, mark in found.items() if mark is not None}

    def evidence(self, slot: Slot, epoch: int, *, is_oom: bool) -> Evidence:
        """Return the observations about a dead incarnation that its page contains."""
        page = self._rows[slot].page
        mark = page.read()
        step_id = None if mark is None or mark.epoch != epoch else mark.step_id
        return Evidence(step_id, is_oom, page.last_completing_epoch == epoch)

    def record_death(self, death: RecordDeath) -> None:
        """Write the last incarnation's death to the page, for the next one."""
        self._rows[death.slot].page.write_death(Death(death.epoch, death.cause, death.step_id))

    def pid(self, slot: Slot) -> int | None:
        child = self._rows[slot].child
        return None if child is None else child.pid

    def status(self, processes: Iterable[Process], state: ProcessState) -> list[ProcessStatus]:
        """Return a line for each process; the first, for the supervisor, has the engine's state."""
        own = (Slot(Role.SUPERVISOR), os.getpid(), _SUPERVISOR_EPOCH, state, 0)
        lines = [
            (p.slot, self.pid(p.slot), p.epoch, p.state, max(p.num_restarts, 0)) for p in processes
        ]
        return [
            ProcessStatus(
                slot.role,
                slot.rank,
                pid,
                epoch,
                state,
                rss_bytes(pid or 0),
                number,
                str(slot),
                slot.role is Role.API and slot.rank >= self._config.api.api_server_count,
            )
            for slot, pid, epoch, state, number in [own, *lines]
        ]

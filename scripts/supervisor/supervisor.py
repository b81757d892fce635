"""The supervisor's sockets, signals and processes; supervision.py decides what to do with them."""

import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from protocol.channel import (
    HighWaterMark,
    Received,
    RouterChannel,
    client_address,
    lifecycle_address,
)
from protocol.child_handle import ChildHandle
from protocol.child_runtime import EXIT_FATAL
from protocol.config import EngineConfig
from protocol.failpoints import failpoint
from protocol.lifecycle import (
    Fatal,
    Hello,
    Progress,
    Promote,
    RestartQuery,
    RestartReply,
    StatusQuery,
    StatusReply,
    decode_to_supervisor,
)
from protocol.message import ProtocolError
from protocol.zygote_link import ForkFailed
from scripts.supervisor.console import Console
from scripts.supervisor.death_causes import Evidence
from scripts.supervisor.forks import Event, Forked, ZygoteMessage
from scripts.supervisor.pages import Pages
from scripts.supervisor.peers import Peers
from scripts.supervisor.process_table import (
    ZYGOTE,
    ProcessTable,
    num_ranks,
    supervisor_row,
)
from scripts.supervisor.run_dirs import RunDir
from scripts.supervisor.startup import served_name, url_of
from scripts.supervisor.succession import STANDBY_OF
from scripts.supervisor.supervised import (
    Action,
    Announce,
    DumpStacks,
    Exit,
    Kill,
    LeaveWord,
    Note,
    Origin,
    Show,
    Slot,
    Start,
    Swap,
    Tell,
)
from scripts.supervisor.supervision import Supervision
from scripts.supervisor.system import System

_DRAIN_LIMIT = 256
_LAST_WORDS_S = 0.5
"""Longest wait for the reason of a process that has ended by itself, which it gives just before;
that decides whether a first start is given up, and when it is, what it is told to have died of."""
_LATER_WORDS_S = 0.1
_CANNOT_START = 127


class Supervisor:
    """Runs one engine from start to end."""

    def __init__(
        self,
        config: EngineConfig,
        run_dir: RunDir,
        console: Console,
        *,
        listener: socket.socket | None,
        parent_fd: int | None,
        started_at: float,
        system: System,
    ) -> None:
        """Listen for children; `run` starts them.

        Args:
            config: complete, as every child gets it.
            listener: socket for the API; None: no API.
            parent_fd: its EOF, or the end of this process's parent, ends everything at once.
            started_at: monotonic time from which the start is counted.
            system: clock, poller, sockets and processes.
        """
        self._config = config
        self._console = console
        self._listener = listener
        # Both: a fork of the parent may hold the pipe open beyond the parent's end.
        self._parent_fds = [] if parent_fd is None else [parent_fd, os.pidfd_open(os.getppid())]
        self._started_at = started_at
        self._clock = system.clock
        self.supervision = Supervision(
            config.recovery,
            num_ranks(config, has_api=listener is not None),
            run_dir.next_epoch,
            system.make_rng(),
            is_api_alone=config.api.journal_dir is not None,
        )
        self._pages = Pages(process.slot for process in self.supervision.processes)
        self._oom_counter = system.make_oom_counter()
        self.num_fenced_frames = 0
        """Messages of the dead, dropped."""
        self._stillborn: list[Slot] = []
        self._exit_status: int | None = None
        self.was_orphaned = False
        self._context = system.make_context()
        self._link = RouterChannel(
            self._context, lifecycle_address(run_dir.path), HighWaterMark.LIFECYCLE_LINK
        )
        self._peers = Peers(self._link)
        self._poller = system.make_poller()
        self._poller.register(self._link.socket, zmq.POLLIN)
        for fd in self._parent_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._table = ProcessTable(config, self._poller, self._pages, listener, system)

    @property
    def url(self) -> str | None:
        """Address of the HTTP server."""
        return None if self._listener is None else url_of(self._listener)

    def run(self, signal_fd: int) -> int:
        """Start everything, and serve until the end.

        Args:
            signal_fd: readable when a signal to stop has come, one byte each.

        Returns:
            The exit status.
        """
        self._poller.register(signal_fd, zmq.POLLIN)
        self._perform(self.supervision.begin(self._clock.monotonic()))
        while self._exit_status is None:
            ready = dict(self._poller.poll(self._poll_ms()))
            self.supervision.on_turn(self._clock.monotonic())
            if signal_fd in ready:
                os.read(signal_fd, 64)
                self._perform(self.supervision.on_signal(self._clock.monotonic()))
            if any(fd in ready for fd in self._parent_fds):
                self._on_orphaned()
            self.turn(ready)
            self._console.tick(self._clock.monotonic())
        self._pages.close()
        self._link.close()
        self._context.term()
        return self._exit_status

    def turn(self, ready: Mapping[Any, int]) -> None:
        """Do what follows from what has happened, and what is due."""
        self._on_births(self._table.births())
        self._drain_link()
        self._reap(ready)
        self._perform(self.supervision.tick(self._clock.monotonic()))
        self._look()

    def _poll_ms(self) -> int:
        if self._stillborn:
            return 0
        supervision = self.supervision
        deadlines = [supervision.next_deadline(), supervision.next_look, self._console.next_tick()]
        deadline = min(due for due in deadlines if due is not None)
        return max(0, int((deadline - self._clock.monotonic()) * 1000) + 1)

    def _look(self) -> None:
        """Who hangs? The pages are read when the earliest deadline in them is over."""
        now = self._clock.monotonic()
        due = self.supervision.next_look
        if due is None or now >= due:
            self._perform(self.supervision.look(self._pages.marks(), now))

    # Events -------------------------------------------------------------------------------------

    def _on_orphaned(self) -> None:
        for fd in self._parent_fds:
            self._poller.unregister(fd)
        self._parent_fds.clear()
        self.was_orphaned = True
        self._perform(self.supervision.on_orphaned(self._clock.monotonic()))

    def _drain_link(self) -> None:
        for received in self._link.drain(_DRAIN_LIMIT):
            try:
                self._on_message(received)
            except ProtocolError as error:
                self._console.note(logging.ERROR, f"unreadable lifecycle message: {error}")

    def _on_message(self, received: Received) -> None:
        message = decode_to_supervisor(received.body)
        if isinstance(message, StatusQuery):
            self._peers.answer(received.peer, self._status())
            return
        if isinstance(message, RestartQuery):
            self._on_restart_query(received.peer, message)
            return
        epoch = received.header.epoch
        process = self.supervision.find(epoch)
        if process is None:
            self.num_fenced_frames += 1
            self._peers.pass_over(received.peer)
            return
        child = self._table.find(process.slot)
        if isinstance(message, Hello):
            if child is None:
                self._table.hello(epoch, message.pid, received.peer)
            elif child.pid == message.pid:
                self._peers.learn(process.slot, received.peer)
        elif child is not None:
            self._peers.meet(process.slot, received.peer)
        self._perform(self.supervision.on_message(epoch, message, self._clock.monotonic()))

    def _on_restart_query(self, peer: bytes, query: RestartQuery) -> None:
        refusal, actions = self.supervision.on_restart(query.role, self._clock.monotonic())
        self._peers.answer(peer, RestartReply(refusal is None, refusal or ""))
        self._perform(actions)

    def _on_births(self, events: Sequence[tuple[Slot, Event]]) -> None:
        """What the zygote says, and what has become of those that it was to fork."""
        for slot, event in events:
            match event:
                case Forked():
                    if event.peer is not None:
                        self._peers.learn(slot, event.peer)
                case ForkFailed():
                    self._die_unborn(slot, event.epoch, event.error)
                case ZygoteMessage():
                    now = self._clock.monotonic()
                    self._perform(self.supervision.on_message(event.epoch, event.message, now))

    def _die_unborn(self, slot: Slot, epoch: int, error: str) -> None:
        """One that cannot be started dies at once, and says why."""
        fatal = Fatal("start", error)
        self._perform(self.supervision.on_message(epoch, fatal, self._clock.monotonic()))
        self._stillborn.append(slot)

    def _reap(self, ready: Mapping[Any, int]) -> None:
        """Report the dead, after their last words."""
        stillborn, self._stillborn = self._stillborn, []
        for slot in stillborn:
            self._console.ended(slot)
            self._perform(self.supervision.on_death(slot, _CANNOT_START, self._clock.monotonic()))
        for child in self._table.dead(ready):
            self._bury(child)
        self._table.reap_strangers()

    def _bury(self, child: ChildHandle) -> None:
        status = child.poll()
        assert status is not None, "a readable pidfd means a dead process"
        if status == EXIT_FATAL:
            self._hear_last_words(child.epoch)
        slot = self._table.slot_of(child)
        if slot == ZYGOTE:
            self._on_births(self._table.births())
        self._on_births(self._table.bury(slot))
        self._peers.forget(slot)
        self._console.ended(slot)
        failpoint("supervisor.after_death")
        is_oom = status == -signal.SIGKILL and self._oom_counter.take()
        evidence = Evidence(self._pages.step_of(slot, child.epoch), is_oom)
        self._perform(self.supervision.on_death(slot, status, self._clock.monotonic(), evidence))

    def _hear_last_words(self, epoch: int) -> None:
        process = self.supervision.find(epoch)
        was_ready = self.supervision.was_ready
        deadline = self._clock.monotonic() + (_LATER_WORDS_S if was_ready else _LAST_WORDS_S)
        while process is not None and process.fatal is None:
            left_ms = int((deadline - self._clock.monotonic()) * 1000)
            if left_ms <= 0 or not self._link.socket.poll(left_ms):
                return
            self._drain_link()

    def _status(self) -> StatusReply:
        rows = [supervisor_row(self.supervision.state)]
        rows += [self._table.row(process) for process in self.supervision.processes]
        return StatusReply(rows, self.supervision.is_ready, self.url, self.supervision.failure)

    # Actions ------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case Kill():
                    if not self._table.kill(action.slot):
                        self._stillborn.append(action.slot)
                case DumpStacks():
                    self._table.dump_stacks(action.slot)
                case LeaveWord():
                    self._pages.leave_word(action)
                case Tell():
                    self._tell(action)
                case Swap():
                    self._table.swap(action.one, action.other)
                    self._pages.exchange(action.one, action.other)
                    self._peers.exchange(action.one, action.other)
                case Show():
                    self._show(action)
                case Announce():
                    self._announce()
                case Note():
                    self._console.note(action.severity, action.text)
                case Exit():
                    self._exit_status = action.status

    def _start(self, action: Start) -> None:
        self._console.starting(slot := action.slot, self._clock.monotonic())
        try:
            if action.origin is Origin.PROMOTED:
                self._promote(slot, action.epoch)
            else:
                self._table.start(action)
        except OSError as error:
            self._die_unborn(slot, action.epoch, str(error))
            return
        failpoint("supervisor.after_start")

    def _promote(self, slot: Slot, epoch: int) -> None:
        """It hears of its new epoch under the one it has."""
        standby = Slot(STANDBY_OF[slot.role])
        self._pages.promote(standby, slot)
        self._tell(Tell(standby, Promote(epoch)))
        self._peers.exchange(standby, slot)
        self._table.promote(standby, slot, epoch)

    def _tell(self, action: Tell) -> None:
        child = self._table.find(action.slot)
        if child is not None:
            self._peers.tell(action.slot, child.epoch, action.message)

    def _show(self, action: Show) -> None:
        now = self._clock.monotonic()
        if isinstance(action.message, Progress):
            self._console.progress(action.slot, action.message, now)
        else:
            self._console.ready(action.slot, action.message, now)
            self._table.keep_num_blocks(action.message.num_gpu_blocks)

    def _announce(self) -> None:
        name = served_name(self._config)
        place = f"{self.url}/v1" if self.url else client_address(str(self._config.run.run_dir))
        seconds = self._clock.monotonic() - self._started_at
        self._console.line(f"Troika serves {name} at {place} (ready in {seconds:.1f} s)")

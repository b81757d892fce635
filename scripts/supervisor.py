"""The supervisor: `python -m scripts.supervisor [MODEL] [flags]` starts an engine and keeps it.

Here are its sockets, signals and processes; scripts/supervision.py decides what to do.
"""

import argparse
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from protocol.channel import (
    HighWaterMark,
    PeerGone,
    Received,
    RouterChannel,
    client_address,
    lifecycle_address,
)
from protocol.config import ConfigError, EngineConfig
from protocol.failpoints import reach
from protocol.launch import failure_file
from protocol.lifecycle import (
    Fatal,
    Hello,
    Progress,
    Role,
    StatusQuery,
    StatusReply,
    decode_to_supervisor,
)
from protocol.message import Message, ProtocolError, encode
from protocol.process import EXIT_FATAL, configure_logging
from scripts.console import Console
from scripts.death_causes import Evidence, OomCounter
from scripts.pages import Pages
from scripts.process_table import SUPERVISOR_EPOCH, ProcessTable, supervisor_row
from scripts.run_dirs import RunDir, RunDirBusyError
from scripts.startup import complete, open_listener, parse, served_name, url_of, watch_signals
from scripts.supervised import (
    Action,
    Announce,
    DumpStacks,
    Exit,
    Kill,
    LeaveWord,
    Note,
    Show,
    Slot,
    Start,
    Tell,
)
from scripts.supervision import Supervision

_DRAIN_LIMIT = 256
_LAST_WORDS_MS = 100
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
    ) -> None:
        """Listen for children; `run` starts them.

        Args:
            config: complete, as every child gets it.
            listener: socket for the API; None: no API.
            parent_fd: its EOF, or the end of this process's parent, ends everything at once.
            started_at: monotonic time from which the start is counted.
        """
        self._config = config
        self._console = console
        self._listener = listener
        # Both: a fork of the parent may hold the pipe open beyond the parent's end.
        self._parent_fds = [] if parent_fd is None else [parent_fd, os.pidfd_open(os.getppid())]
        self._started_at = started_at
        num_ranks = {Role.WORKER: config.parallel.tensor_parallel_size, Role.CORE: 1}
        if listener is not None:
            num_ranks[Role.API] = 1
        self.supervision = Supervision(
            config.recovery, num_ranks, run_dir.next_epoch, random.Random()
        )
        self._pages = Pages(process.slot for process in self.supervision.processes)
        self._oom_counter = OomCounter()
        self.num_fenced_frames = 0
        """Messages of the dead, dropped."""
        self._peers: dict[Slot, bytes] = {}
        self._stillborn: list[Slot] = []
        self._exit_status: int | None = None
        self.was_orphaned = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = RouterChannel(
            self._context, lifecycle_address(run_dir.path), HighWaterMark.LIFECYCLE_LINK
        )
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)
        for fd in self._parent_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._table = ProcessTable(config, self._poller, self._pages, listener)

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
        self._perform(self.supervision.begin(time.monotonic()))
        while self._exit_status is None:
            ready = dict(self._poller.poll(self._poll_ms()))
            if signal_fd in ready:
                os.read(signal_fd, 64)
                self._perform(self.supervision.on_signal(time.monotonic()))
            if any(fd in ready for fd in self._parent_fds):
                self._on_orphaned()
            self._drain_link()
            self._reap(ready)
            self._perform(self.supervision.tick(time.monotonic()))
            self._look()
            self._console.tick(time.monotonic())
        self._pages.close()
        self._link.close()
        self._context.term()
        return self._exit_status

    def _poll_ms(self) -> int | None:
        if self._stillborn:
            return 0
        supervision = self.supervision
        deadlines = [
            supervision.next_deadline(),
            supervision.next_look,
            self._console.next_tick(),
        ]
        deadline = min((due for due in deadlines if due is not None), default=None)
        if deadline is None:
            return None
        return max(0, int((deadline - time.monotonic()) * 1000) + 1)

    def _look(self) -> None:
        """Who hangs? The pages are read when the earliest deadline in them is over."""
        now = time.monotonic()
        due = self.supervision.next_look
        if due is None or now >= due:
            self._perform(self.supervision.look(self._pages.marks(), now))

    # Events -------------------------------------------------------------------------------------

    def _on_orphaned(self) -> None:
        for fd in self._parent_fds:
            self._poller.unregister(fd)
        self._parent_fds.clear()
        self.was_orphaned = True
        self._perform(self.supervision.on_orphaned(time.monotonic()))

    def _drain_link(self) -> None:
        for received in self._link.drain(_DRAIN_LIMIT):
            try:
                self._on_message(received)
            except ProtocolError as error:
                self._console.note(logging.ERROR, f"unreadable lifecycle message: {error}")

    def _on_message(self, received: Received) -> None:
        message = decode_to_supervisor(received.body)
        if isinstance(message, StatusQuery):
            self._send(received.peer, SUPERVISOR_EPOCH, self._status())
            if received.peer not in self._peers.values():
                self._link.forget(received.peer)
            return
        epoch = received.header.epoch
        process = self.supervision.find(epoch)
        if process is None:
            self.num_fenced_frames += 1
            return
        if isinstance(message, Hello):
            child = self._table.find(process.slot)
            if child is not None and child.pid == message.pid:
                self._peers[process.slot] = received.peer
        self._perform(self.supervision.on_message(epoch, message, time.monotonic()))

    def _reap(self, ready: Mapping[Any, int]) -> None:
        """Report the dead, after their last words."""
        stillborn, self._stillborn = self._stillborn, []
        for slot in stillborn:
            self._console.ended(slot)
            self._perform(self.supervision.on_death(slot, _CANNOT_START, time.monotonic()))
        for slot in self._table.dead(ready):
            self._bury(slot)

    def _bury(self, slot: Slot) -> None:
        child = self._table.find(slot)
        assert child is not None
        status = child.poll()
        assert status is not None, "a readable pidfd means a dead process"
        if status == EXIT_FATAL:
            self._link.socket.poll(_LAST_WORDS_MS)
            self._drain_link()
        self._table.bury(slot)
        self._forget_peer(slot)
        self._console.ended(slot)
        reach("supervisor.after_death")
        is_oom = status == -signal.SIGKILL and self._oom_counter.take()
        evidence = Evidence(self._pages.step_of(slot, child.epoch), is_oom)
        self._perform(self.supervision.on_death(slot, status, time.monotonic(), evidence))

    def _forget_peer(self, slot: Slot) -> None:
        peer = self._peers.pop(slot, None)
        if peer is not None:
            self._link.forget(peer)

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
                    self._table.kill(action.slot)
                case DumpStacks():
                    self._table.dump_stacks(action.slot)
                case LeaveWord():
                    self._pages.leave_word(action)
                case Tell():
                    self._tell(action)
                case Show():
                    self._show(action)
                case Announce():
                    self._announce()
                case Note():
                    self._console.note(action.severity, action.text)
                case Exit():
                    self._exit_status = action.status

    def _start(self, action: Start) -> None:
        """One that cannot be started dies at once, and says why."""
        slot, now = action.slot, time.monotonic()
        self._console.starting(slot, now)
        try:
            self._table.start(slot, action.epoch)
        except OSError as error:
            fatal = Fatal("start", str(error))
            self._perform(self.supervision.on_message(action.epoch, fatal, now))
            self._stillborn.append(slot)
            return
        reach("supervisor.after_start")

    def _tell(self, action: Tell) -> None:
        """Whoever does not hear it is killed when its time is over."""
        peer = self._peers.get(action.slot)
        child = self._table.find(action.slot)
        if peer is not None and child is not None:
            self._send(peer, child.epoch, action.message)

    def _send(self, peer: bytes, epoch: int, message: Message) -> None:
        try:
            self._link.send(peer, epoch, encode(message))
        except PeerGone:
            return

    def _show(self, action: Show) -> None:
        now = time.monotonic()
        if isinstance(action.message, Progress):
            self._console.progress(action.slot, action.message, now)
        else:
            self._console.ready(action.slot, action.message, now)

    def _announce(self) -> None:
        name = served_name(self._config)
        place = f"{self.url}/v1" if self.url else client_address(str(self._config.run.run_dir))
        seconds = time.monotonic() - self._started_at
        self._console.line(f"Troika serves {name} at {place} (ready in {seconds:.1f} s)")


def main(argv: Sequence[str] | None = None, program: str = "scripts/serve") -> int:
    """Run an engine until it is stopped. Returns the exit status."""
    started_at = time.monotonic()
    arguments, config = parse(program, sys.argv[1:] if argv is None else argv)
    configure_logging("supervisor", config.run.log_level)
    signal_fd = watch_signals()
    is_embedded = arguments.parent_fd is not None
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    console = Console(sys.stderr, is_terminal=is_terminal, is_quiet=is_embedded)
    try:
        status, failure = _serve(arguments, config, console, signal_fd, started_at)
    except (ConfigError, ValueError, RunDirBusyError) as error:
        status, failure = 1, str(error)
    if failure is not None:
        console.error(failure)
        if is_embedded:
            _leave_word(config.run.run_dir, failure)
    return status


def _serve(
    arguments: argparse.Namespace,
    config: EngineConfig,
    console: Console,
    signal_fd: int,
    started_at: float,
) -> tuple[int, str | None]:
    """Returns the exit status, and why the engine gave up, if it did."""
    config = complete(config)
    try:
        run_dir = RunDir(config.run.run_dir, is_temporary=arguments.temporary_run_dir)
    except OSError as error:
        raise ConfigError(f"run_dir cannot be used: {error}") from error
    is_abandoned = False
    try:
        run_dir.raise_epoch(arguments.epoch or 0)
        run = msgspec.structs.replace(config.run, run_dir=run_dir.path)
        config = msgspec.structs.replace(config, run=run)
        listener = None if arguments.no_api else open_listener(config.api.host, config.api.port)
        supervisor = Supervisor(
            config,
            run_dir,
            console,
            listener=listener,
            parent_fd=arguments.parent_fd,
            started_at=started_at,
        )
        run_dir.register()
        status = supervisor.run(signal_fd)
        is_abandoned = supervisor.was_orphaned
        return status, supervisor.supervision.failure
    finally:
        run_dir.close(is_abandoned=is_abandoned)


def _leave_word(run_dir: str | None, failure: str) -> None:
    """For the program that embeds this engine; it may have removed the directory already."""
    if run_dir is not None and os.path.isdir(run_dir):
        failure_file(run_dir, os.getpid()).write_text(failure)


if __name__ == "__main__":
    sys.exit(main())

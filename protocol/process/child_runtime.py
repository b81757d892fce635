"""The child's side of a process: arguments, parent's death, lifecycle link.

A process is started by command, `python -m core_proc ...`, by a supervisor or by hand. A supervisor
passes the configuration in a pipe (secrets stay out of argv and environment) and keeps the write
end of a second one open: its EOF means that the parent is gone. It may also pass a progress page,
in which the process reports what it does; SIGUSR2 then makes the process print its stacks.
"""

import argparse
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from protocol.config import EngineConfig, settings
from protocol.lifecycle import (
    MAX_REMARKS,
    REPEAT_S,
    Command,
    Drain,
    Drained,
    Fatal,
    Health,
    Hello,
    Progress,
    Promote,
    Ready,
    Remarks,
    RestartQuery,
    Role,
    StatusReply,
    Stop,
    ToSupervisor,
)
from protocol.message import MAX_TEXT
from protocol.process.logs import configure_logging, log_label
from protocol.process.prctl import die_with_parent
from protocol.process.progress import ProgressReporter
from protocol.process.run_dir import client_address, lifecycle_address, make_run_dir, worker_address
from protocol.process.supervisor_link import SupervisorLink
from protocol.transport.channel import DealerChannel, HighWaterMark

if TYPE_CHECKING:
    import asyncio

EXIT_FATAL = 1
EXIT_ORPHANED = 75
FLUSH_MS = 100
"""Longest wait at the exit for peers that do not read."""
_SUPERVISOR_TIMEOUT_MS = 60_000
DUMP_SIGNAL = signal.SIGUSR2
"""Makes a process with a progress page print the stacks of its threads to stderr."""


class ChildProcess:
    """The configuration of a main program, and its reports to the supervisor, if there is one."""

    def __init__(self, role: Role, arguments: argparse.Namespace, config: EngineConfig) -> None:
        if arguments.parent_fd is not None:
            die_with_parent()  # even a stopped process, which cannot read its pipe
            watch_parent(arguments.parent_fd)
        self.role = role
        self.config = config
        self.epoch: int = arguments.epoch
        self.rank: int = arguments.rank
        self.pid = os.getpid()
        self.listen_fd: int | None = arguments.listen_fd
        self.run_dir = make_run_dir(config.run.run_dir)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.log = logging.getLogger(f"troika.{role}")
        progress_fd: int | None = getattr(arguments, "progress_fd", None)
        if progress_fd is not None:
            show_stacks()
        # Long texts of clients may block the API's loop for a while.
        turn_s = config.recovery.api_hang_timeout_s if role is Role.API else None
        self.reporter = ProgressReporter(progress_fd, self.epoch, config.recovery, turn_s)
        self._lifecycle: DealerChannel | None = None
        self._supervisor: SupervisorLink | None = None
        self._is_terminated = False
        self._deliver_soon: Callable[[], None] | None = None
        if arguments.parent_fd is not None:
            self._lifecycle = DealerChannel(
                self.context, lifecycle_address(self.run_dir), HighWaterMark.LIFECYCLE_LINK
            )
            # The supervisor listens before it starts children; a dead one ends this process.
            if not self._lifecycle.socket.poll(_SUPERVISOR_TIMEOUT_MS, zmq.POLLOUT):
                sys.exit(f"no supervisor at {lifecycle_address(self.run_dir)}")
            self._supervisor = SupervisorLink(self._lifecycle, self.epoch)
            self._send(Hello(role, self.rank, self.pid))

    @classmethod
    def from_argv(cls, program: str, role: Role, argv: Sequence[str]) -> "ChildProcess":
        """Parse the command line and set up logging; wrong arguments end the program, status 2."""
        parser = settings.OneLineParser(program, allow_abbrev=False)
        group = parser.add_argument_group("supervision", "Set by the supervisor.")
        group.add_argument("--config-fd", type=int, help="descriptor to read all settings from")
        group.add_argument("--parent-fd", type=int, help="descriptor whose EOF ends this process")
        group.add_argument("--listen-fd", type=int, help="listening socket to serve HTTP on")
        group.add_argument("--progress-fd", type=int, help="shared page to report progress in")
        group.add_argument("--epoch", type=int, default=1, help="incarnation, ever increasing")
        rank_help = "number among the processes of its role"
        group.add_argument("--rank", type=int, default=0, help=rank_help)
        settings.add_flags(parser)
        config = settings.parse_args(parser, argv)
        arguments = parser.parse_args(argv)
        if arguments.config_fd is not None:
            with os.fdopen(arguments.config_fd, "rb") as pipe:
                config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
        elif config.run.run_dir is None:
            parser.error("--run-dir is required without a supervisor")
        label = log_label(role, arguments.rank, config)
        configure_logging(label, config.run)
        return cls(role, arguments, config)

    @property
    def core_client_address(self) -> str:
        """The address for clients of the core."""
        return client_address(self.run_dir)

    @property
    def core_worker_address(self) -> str:
        """The address for workers of the core."""
        return worker_address(self.run_dir)

    @property
    def num_fenced_frames(self) -> int:
        """Dropped commands to another incarnation."""
        return 0 if self._supervisor is None else self._supervisor.num_fenced_frames

    @property
    def lifecycle_socket(self) -> zmq.Socket[bytes] | None:
        """Socket to poll for `messages`; None without a supervisor."""
        return None if self._lifecycle is None else self._lifecycle.socket

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report a step of the start, which extends its deadline."""
        self.reporter.load(phase, done)
        self._send(Progress(phase, done, total))

    def ready(
        self,
        detail: str = "",
        num_gpu_blocks: int = 0,
        facts: Sequence[str] = (),
        num_state_blocks: int = 0,
    ) -> None:
        """Report that the start is over, and the blocks that successors must have too.

        The supervisor prints `facts` once, when the engine serves.
        """
        self.reporter.turn()  # from now on it has the limits of a serving process
        shown = [fact[:MAX_TEXT] for fact in facts]
        self._send(Ready(detail, num_gpu_blocks, shown, num_state_blocks))

    def remark(self, lines: Sequence[str]) -> None:
        """Report lines for the status instead of earlier ones; the last counts those left out."""
        if self._supervisor is None:
            return
        num_more = len(lines) - MAX_REMARKS + 1
        if num_more > 1:
            lines = [*lines[:-num_more], f"{num_more} further lines are not shown"]
        self._supervisor.remark(Remarks([line[:MAX_TEXT] for line in lines]))

    def drained(self) -> None:
        """Report that no request is open."""
        self._send(Drained())

    def fatal(
        self, phase: str, error: BaseException, hint: str = "", *, retry: bool = True
    ) -> NoReturn:
        """Report a fatal error, and exit. Without `retry` users are shown its text alone."""
        text = f"{type(error).__name__}: {error}" if retry else str(error)
        is_printed = not retry and self._supervisor is not None  # the supervisor prints it
        severity = logging.DEBUG if is_printed else logging.ERROR
        self.log.log(severity, "%s failed: %s", phase, text, exc_info=retry)
        self._send(Fatal(phase, text[:MAX_TEXT], hint[:MAX_TEXT], retry))
        if self._lifecycle is not None:
            self._lifecycle.socket.setsockopt(zmq.LINGER, 1000)
            self.context.destroy()
        sys.stderr.flush()
        os._exit(EXIT_FATAL)

    def leave(self) -> NoReturn:
        """Exit at once after the last messages are written: a successor waits for the end."""
        self.context.destroy(linger=FLUSH_MS)
        sys.stderr.flush()
        os._exit(0)

    def wait_for_promotion(self) -> bool:
        """Wait until this standby is promoted to a new epoch; return False if it must stop."""
        assert self.lifecycle_socket is not None
        assert self._supervisor is not None
        while True:
            self.reporter.idle()
            self.lifecycle_socket.poll(self.reporter.tick_ms)
            self.reporter.turn()
            for message in self.messages():
                if isinstance(message, Promote):
                    self.epoch = self.reporter.epoch = message.epoch
                    self._supervisor.promoted(message.epoch)
                    return True
                if isinstance(message, Stop):
                    return False

    def messages(self) -> list[Command | StatusReply]:
        """Return the supervisor's commands and replies; to be called at least every `REPEAT_S`."""
        if self._supervisor is None:
            return []
        if self._is_terminated:
            self._is_terminated = False
            self.ask_for_restart()
        return self._supervisor.read()

    def ask_for_restart(self) -> bool:
        """Request a planned restart of this process; False without a supervisor."""
        if self._supervisor is None:
            return False
        index = self.rank if self.role is Role.API else None
        self._supervisor.ask_for_restart(RestartQuery(self.role, index))
        self._look_again()
        return True

    def ask_for_status(self) -> bool:
        """Request the status of all processes; False without a supervisor, or if it is lost."""
        if self._supervisor is None or not self._supervisor.ask_for_status():
            return False
        self._look_again()
        return True

    def restart_on_sigterm(self) -> None:
        """Turn SIGTERM into such a request, which the next call of `messages` sends."""

        def remember(*_: object) -> None:
            self._is_terminated = True

        if self._lifecycle is not None:
            signal.signal(signal.SIGTERM, remember)

    def attach_asyncio(
        self,
        loop: "asyncio.AbstractEventLoop",
        on_message: Callable[[Drain | Stop | Health | StatusReply], None],
    ) -> None:
        """Deliver the supervisor's commands and replies through an event loop."""
        lifecycle = self._lifecycle
        if lifecycle is None:
            return

        def deliver() -> None:
            num_read = lifecycle.num_read
            messages = self.messages()
            for message in messages:
                if isinstance(message, Drain | Stop | Health | StatusReply):
                    on_message(message)
            if messages or lifecycle.num_read != num_read:
                deliver_soon()

        def deliver_soon() -> None:
            if not loop.is_closed():
                loop.call_soon(deliver)

        def deliver_now_and_then() -> None:
            loop.call_later(REPEAT_S, deliver_now_and_then)
            deliver()

        self._deliver_soon = deliver_soon
        loop.add_reader(lifecycle.fd, deliver)
        loop.call_soon(deliver_now_and_then)

    def _send(self, message: ToSupervisor) -> None:
        if self._supervisor is not None:
            if isinstance(message, Ready | Drained):
                self._supervisor.hold(message)
            else:
                self._supervisor.send(message)
            self._look_again()

    def _look_again(self) -> None:
        """The descriptor is edge-triggered: a send may consume the event of an arrival."""
        if self._deliver_soon is not None:
            self._deliver_soon()


def watch_parent(parent_fd: int) -> None:
    """End this process as soon as the other end of a pipe is closed."""
    poller = select.poll()
    poller.register(parent_fd, select.POLLIN)
    if poller.poll(0):
        os._exit(EXIT_ORPHANED)

    def wait() -> None:
        os.read(parent_fd, 1)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def show_stacks() -> None:
    """Print all stacks at DUMP_SIGNAL and at a crash: in C, even while the interpreter is held."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(DUMP_SIGNAL, sys.stderr, all_threads=True)

"""The zygote: `python -m worker_proc --zygote` loads what workers share, and forks them on request.

It stays fit for forking: one thread, no ZMQ context, no OpenMP pool, no device. A worker comes
from a double fork, so that its parent is the supervisor, which reaps its orphans and confirms the
death of a forked worker like that of any child.
"""

import argparse
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from protocol.child_runtime import (
    EXIT_FATAL,
    EXIT_ORPHANED,
    ChildProcess,
    configure_logging,
    show_stacks,
)
from protocol.config import EngineConfig
from protocol.failpoints import failpoint
from protocol.lifecycle import Fatal, Progress, Ready, Role
from protocol.message import MAX_TEXT, ProtocolError
from protocol.prctl import die_with_parent, set_name
from protocol.progress import ProgressReporter
from protocol.zygote_link import (
    Forked,
    ForkFailed,
    ForkWorker,
    LinkClosed,
    ToZygote,
    ZygoteLink,
    close_all,
    decode_to_zygote,
)
from worker_proc.runner import MakeRunner
from worker_proc.start import load_to_fork, work

FORK_TIMEOUT_S = 5.0
"""Between the two forks; only a machine that is stuck takes longer than milliseconds."""
_PID_BYTES = 4

log = logging.getLogger("troika.zygote")


class NotForkable(Exception):
    """This process has threads, which a fork would not copy."""


class Order(NamedTuple):
    """What a forked process has become."""

    message: ForkWorker
    fds: dict[str, int]
    """By the names of the message."""


def main(argv: Sequence[str]) -> None:
    """Load, then fork until the supervisor is gone. Forked workers come through here, too."""
    arguments = _parse(argv)
    die_with_parent()
    set_name("troika-zygote")
    with os.fdopen(arguments.config_fd, "rb") as pipe:
        config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
    configure_logging(str(Role.ZYGOTE), config.run.log_level)
    link = ZygoteLink(socket.socket(fileno=arguments.listen_fd), decode_to_zygote)
    if arguments.progress_fd is not None:
        show_stacks()
    reporter = ProgressReporter(arguments.progress_fd, arguments.epoch, config.recovery)
    if arguments.progress_fd is not None:
        os.close(arguments.progress_fd)  # the page stays mapped; forked workers have their own
    zygote = Zygote(link, arguments.parent_fd, reporter)
    failpoint("zygote.load")
    try:
        make = zygote.load(config)
        order = zygote.serve()
    except LinkClosed:
        os._exit(EXIT_ORPHANED)
    be_worker(order, config, make)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("worker_proc", allow_abbrev=False)
    parser.add_argument("--zygote", action="store_true", required=True)
    for flag in ("--config-fd", "--parent-fd", "--listen-fd", "--epoch"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--progress-fd", type=int)
    return parser.parse_known_args(argv)[0]


class Zygote:
    """One process that forks."""

    def __init__(
        self, link: ZygoteLink[ToZygote], parent_fd: int, reporter: ProgressReporter
    ) -> None:
        self._link = link
        self._reporter = reporter
        self._parent_fd = parent_fd

    def load(self, config: EngineConfig) -> MakeRunner:
        """Load what `config` names, and report that.

        Ends the process with a `Fatal` where that is not possible.

        Raises:
            LinkClosed: the supervisor is gone.
        """
        try:
            make = load_to_fork(config, self._report)
            check_forkable()
        except ValueError as error:
            self._fatal(error, retry=False)
        except Exception as error:
            self._fatal(error, retry=True)
        gc.collect()
        gc.freeze()  # the collector would write to every object, and so copy every page
        gc.disable()
        self._link.deliver(Ready(f"{_shared_mib()} MiB to share"))
        return make

    def serve(self) -> Order:
        """Fork whenever asked to. Returns only in forked processes.

        Raises:
            LinkClosed: the supervisor is gone.
        """
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        poller.register(self._parent_fd, select.POLLIN)
        while True:
            self._reporter.idle()
            ready = poller.poll(self._reporter.tick_ms)
            self._reporter.turn()
            if any(fd == self._parent_fd for fd, _ in ready):
                raise LinkClosed
            received = self._receive()
            if received is None:
                continue
            order = self._fork(*received)
            if order is not None:
                return order

    def _report(self, phase: str, done: int, total: int) -> None:
        """A report that finds no room is as good as the next one."""
        self._reporter.load(phase, done)
        self._link.send(Progress(phase, done, total))

    def _fatal(self, error: Exception, *, retry: bool) -> NoReturn:
        text = f"{type(error).__name__}: {error}"
        log.error("loading failed: %s", text, exc_info=retry)
        self._link.deliver(Fatal("loading the model", text[:MAX_TEXT], retry=retry))
        sys.stderr.flush()
        os._exit(EXIT_FATAL)

    def _receive(self) -> tuple[ForkWorker, list[int]] | None:
        try:
            return self._link.receive()
        except ProtocolError as error:
            log.error("supervisor sent what cannot be read: %s", error)
            return None

    def _fork(self, message: ForkWorker, fds: list[int]) -> Order | None:
        """Fork one worker and say so. Returns in the worker its order; None in the zygote."""
        try:
            if len(fds) != len(message.fd_names):
                raise OSError(f"{len(fds)} descriptors came for {message.fd_names}")
            pid = fork_twice()
        except OSError as error:
            log.error("cannot fork: %s", error)
            self._link.deliver(ForkFailed(message.epoch, str(error)[:MAX_TEXT]))
        else:
            if pid == 0:
                self._link.close()
                self._reporter.close()
                os.close(self._parent_fd)
                return Order(message, dict(zip(message.fd_names, fds, strict=True)))
            self._link.deliver(Forked(message.epoch, pid))
        close_all(fds)
        return None


def check_forkable() -> None:
    """Make sure that a fork copies everything.

    Raises:
        NotForkable: there are other threads; names them.
    """
    tasks = [
        path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()
    ]
    if len(tasks) != 1:
        raise NotForkable(f"loading has started threads: {', '.join(sorted(tasks))}")


def fork_twice() -> int:
    """Fork a process that is no child of this one.

    Returns:
        Its pid; 0 in the process itself.

    Raises:
        OSError: there are no processes or descriptors left.
    """
    read_fd, write_fd = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            return _fork_and_leave(write_fd)
        os.close(write_fd)
        write_fd = -1
        pid = _read_pid(read_fd)
        _reap(between)  # only then the worker has its new parent
        if pid == 0:
            raise OSError("the second fork failed")
        return pid
    finally:
        close_all([fd for fd in (read_fd, write_fd) if fd >= 0])


def _fork_and_leave(write_fd: int) -> int:
    """The process between: its child goes on, itself it ends here."""
    try:
        own_pidfd = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid == 0:
            _wait_for_end(own_pidfd)
            os.close(own_pidfd)
            return 0
        os.write(write_fd, pid.to_bytes(_PID_BYTES, "little"))
    except BaseException:
        os._exit(EXIT_FATAL)
    os._exit(0)


def _read_pid(read_fd: int) -> int:
    """0 where the other end was closed, or nothing came in time."""
    poller = select.poll()
    poller.register(read_fd, select.POLLIN)
    if not poller.poll(FORK_TIMEOUT_S * 1000):
        return 0
    return int.from_bytes(os.read(read_fd, _PID_BYTES), "little")


def _reap(pid: int) -> None:
    """Wait for the end of a child that is about to end."""
    pidfd = os.pidfd_open(pid)
    try:
        _wait_for_end(pidfd)
        os.waitpid(pid, 0)
    finally:
        os.close(pidfd)


def _wait_for_end(pidfd: int) -> None:
    """Wait for the end of a process that is about to end; from then on its child has a new parent.

    One that does not is killed.
    """
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(FORK_TIMEOUT_S * 1000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poller.poll(FORK_TIMEOUT_S * 1000)


def be_worker(order: Order, config: EngineConfig, make: MakeRunner) -> None:
    """What a forked process does: the same as one that was started alone, from loading on."""
    os.setsid()
    set_name("troika-worker")
    gc.enable()
    arguments = argparse.Namespace(
        epoch=order.message.epoch, rank=order.message.rank, listen_fd=None, **order.fds
    )
    configure_logging(str(Role.WORKER), config.run.log_level)
    child = ChildProcess(Role.WORKER, arguments, config)
    work(child, make, is_standby=order.message.is_standby)


def _shared_mib() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20

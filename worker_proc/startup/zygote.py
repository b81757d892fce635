"""The zygote: `python -m worker_proc --zygote` loads a model, and forks workers on request.

If a model has several ranks, each rank has a zygote, which loads the rank's part.

It can be forked at any time: it has one thread, no ZMQ context, no OpenMP pool and no device. A
worker is forked twice, so that its parent is the supervisor, which reaps it and confirms its death
like that of any child.
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

from protocol.config import EngineConfig
from protocol.lifecycle import Fatal, Progress, Ready, Role
from protocol.message import MAX_TEXT, ProtocolError
from protocol.process.child_runtime import (
    EXIT_FATAL,
    EXIT_ORPHANED,
    ChildProcess,
    show_stacks,
)
from protocol.process.failpoints import failpoint
from protocol.process.logs import configure_logging, log_label
from protocol.process.prctl import die_with_parent, set_name
from protocol.process.progress import ProgressReporter
from protocol.process.zygote_link import (
    Forked,
    ForkFailed,
    ForkWorker,
    LinkClosed,
    ToZygote,
    ZygoteLink,
    close_all,
    decode_to_zygote,
)
from worker_proc.runner import RunnerFactory
from worker_proc.startup.cpu_pinning import pin_worker
from worker_proc.startup.start import load_to_fork, work

FORK_TIMEOUT_S = 5.0
"""The longest wait for the intermediate process, which takes milliseconds."""
_PID_BYTES = 4

log = logging.getLogger("troika.zygote")


class NotForkable(Exception):
    """Raised if the process has other threads, which a fork would not copy."""


class ForkedWorker(NamedTuple):
    """The worker that a forked process becomes; `fds` are descriptors by name."""

    message: ForkWorker
    fds: dict[str, int]


def main(argv: Sequence[str]) -> None:
    """Load, then fork until the supervisor is gone; forked workers return here, too."""
    arguments = _parse(argv)
    die_with_parent()
    set_name("troika-zygote")
    with os.fdopen(arguments.config_fd, "rb") as pipe:
        config = msgspec.msgpack.decode(pipe.read(), type=EngineConfig)
    configure_logging(log_label(Role.ZYGOTE, arguments.rank, config), config.run)
    link = ZygoteLink(socket.socket(fileno=arguments.listen_fd), decode_to_zygote)
    if arguments.progress_fd is not None:
        show_stacks()
    reporter = ProgressReporter(arguments.progress_fd, arguments.epoch, config.recovery)
    if arguments.progress_fd is not None:
        os.close(arguments.progress_fd)  # the page stays mapped; forked workers have their own
    zygote = Zygote(link, arguments.rank, arguments.parent_fd, reporter)
    failpoint("zygote.load")
    try:
        make = zygote.load(config)
        order = zygote.serve()
    except LinkClosed:
        os._exit(EXIT_ORPHANED)
    run_worker(order, arguments.rank, config, make)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("worker_proc", allow_abbrev=False)
    parser.add_argument("--zygote", action="store_true", required=True)
    for flag in ("--config-fd", "--parent-fd", "--listen-fd", "--epoch"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--progress-fd", type=int)
    return parser.parse_known_args(argv)[0]


class Zygote:
    """State of the process that forks workers."""

    def __init__(
        self, link: ZygoteLink[ToZygote], rank: int, parent_fd: int, reporter: ProgressReporter
    ) -> None:
        self._link = link
        self._rank = rank
        self._reporter = reporter
        self._parent_fd = parent_fd

    def load(self, config: EngineConfig) -> RunnerFactory:
        """Load the configured model and send Ready; on failure, send `Fatal` and exit."""
        try:
            pin_worker(config, self._rank)  # so that weights are in the memory of its CPUs' node
            make = load_to_fork(config, self._report, self._rank)
            check_forkable()
        except ValueError as error:
            self._fatal(error, retry=False)
        except Exception as error:
            self._fatal(error, retry=True)
        gc.collect()
        gc.freeze()  # the collector would write to every object, which copies its page
        gc.disable()
        self._link.deliver(Ready(f"{_shared_mib()} MiB to share"))
        return make

    def serve(self) -> ForkedWorker:
        """Fork workers until the supervisor is gone (LinkClosed); return in forked processes."""
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
        """Send progress; a report that does not fit is dropped, since the next one replaces it."""
        self._reporter.load(phase, done)
        self._link.send(Progress(phase, done, total))

    def _fatal(self, error: Exception, *, retry: bool) -> NoReturn:
        text = f"{type(error).__name__}: {error}" if retry else str(error)
        severity = logging.ERROR if retry else logging.DEBUG  # the supervisor prints a sentence
        log.log(severity, "loading failed: %s", text, exc_info=retry)
        self._link.deliver(Fatal("loading the model", text[:MAX_TEXT], retry=retry))
        sys.stderr.flush()
        os._exit(EXIT_FATAL)

    def _receive(self) -> tuple[ForkWorker, list[int]] | None:
        try:
            return self._link.receive()
        except ProtocolError as error:
            log.error("received an unreadable message from the supervisor: %s", error)
            return None

    def _fork(self, message: ForkWorker, fds: list[int]) -> ForkedWorker | None:
        """Fork one worker and report it; return None in the zygote."""
        try:
            if len(fds) != len(message.fd_names):
                raise OSError(f"received {len(fds)} descriptors for {message.fd_names}")
            pid = fork_twice()
        except OSError as error:
            log.error("cannot fork: %s", error)
            self._link.deliver(ForkFailed(message.epoch, str(error)[:MAX_TEXT]))
        else:
            if pid == 0:
                self._link.close()
                self._reporter.close()
                os.close(self._parent_fd)
                return ForkedWorker(message, dict(zip(message.fd_names, fds, strict=True)))
            self._link.deliver(Forked(message.epoch, pid))
        close_all(fds)
        return None


def check_forkable() -> None:
    """Raise `NotForkable` with the names of the threads if there are several."""
    tasks = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(tasks) != 1:
        raise NotForkable(f"loading has started threads: {', '.join(sorted(tasks))}")


def fork_twice() -> int:
    """Fork a process that is not a child of this one; return its pid, and 0 in the process."""
    read_fd, write_fd = os.pipe()
    try:
        intermediate = os.fork()
        if intermediate == 0:
            return _run_intermediate(write_fd)
        os.close(write_fd)
        write_fd = -1
        pid = _read_pid(read_fd)
        _reap(intermediate)  # afterwards the worker has its new parent
        if pid == 0:
            raise OSError("the second fork failed")
        return pid
    finally:
        close_all([fd for fd in (read_fd, write_fd) if fd >= 0])


def _run_intermediate(write_fd: int) -> int:
    """Fork the worker, write its pid and exit; return 0 in the worker."""
    try:
        own_pidfd = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid == 0:
            _wait_for_exit(own_pidfd)
            os.close(own_pidfd)
            return 0
        os.write(write_fd, pid.to_bytes(_PID_BYTES, "little"))
    except BaseException:
        os._exit(EXIT_FATAL)
    os._exit(0)


def _read_pid(read_fd: int) -> int:
    """Return the pid; 0: the other end was closed, or nothing was received in time."""
    poller = select.poll()
    poller.register(read_fd, select.POLLIN)
    if not poller.poll(FORK_TIMEOUT_S * 1000):
        return 0
    return int.from_bytes(os.read(read_fd, _PID_BYTES), "little")


def _reap(pid: int) -> None:
    """Wait for a child that is about to exit, and reap it."""
    pidfd = os.pidfd_open(pid)
    try:
        _wait_for_exit(pidfd)
        os.waitpid(pid, 0)
    finally:
        os.close(pidfd)


def _wait_for_exit(pidfd: int) -> None:
    """Wait for a process to exit, which orphans its child; kill it after a timeout."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(FORK_TIMEOUT_S * 1000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poller.poll(FORK_TIMEOUT_S * 1000)


def run_worker(order: ForkedWorker, rank: int, config: EngineConfig, make: RunnerFactory) -> None:
    """Run a forked worker; with its model loaded, it is the same as one started by command."""
    os.setsid()
    set_name("troika-worker")
    gc.enable()
    arguments = argparse.Namespace(
        epoch=order.message.epoch, rank=rank, listen_fd=None, **order.fds
    )
    configure_logging(log_label(Role.WORKER, rank, config), config.run)
    child = ChildProcess(Role.WORKER, arguments, config)
    work(child, make, is_standby=order.message.is_standby)


def _shared_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20

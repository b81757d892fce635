"""The core's loop: drain, reclaim, schedule, dispatch. It owns the sockets and decides nothing.

One thread. It sleeps in one poll until a message arrives, a process dies or a report is due, and
never waits for a worker or a client: messages that cannot be sent now are kept, within bounds.
"""

import contextlib
import logging
from collections.abc import Mapping

import zmq

from core_proc.engine import EngineCore
from core_proc.links.clients import Clients
from core_proc.links.pidfd_monitor import PidfdMonitor
from core_proc.links.remote_clients import listen
from core_proc.links.worker_link import WorkerLink
from core_proc.links.workers import WorkerGroup
from core_proc.stats import StatsLine
from protocol.api_core import EngineState, PauseMode
from protocol.lifecycle import Drain, Stop, Suspect, WorkerDied
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.transport.channel import HighWaterMark, RouterChannel
from protocol.transport.runtime import Clock, Poller, ProcessControl

STATUS_INTERVAL_S = 1.0
LEAVE_S = 1.0
"""Time from Stop to the exit, for the answers to steps in flight: recomputing these would cost
more."""
RETURN_S = 2.0
"""Time for the clients of a predecessor to send their open requests, before a drain may end."""
_RETRY_MS = 5

log = logging.getLogger("troika.core")


class CoreLoop:
    """Connects one EngineCore to its clients, its workers and its supervisor."""

    def __init__(
        self,
        child: ChildProcess,
        engine: EngineCore,
        *,
        clock: Clock,
        poller: Poller,
        processes: ProcessControl,
    ) -> None:
        self._child = child
        self._clock = clock
        self._reporter = child.reporter
        self._engine = engine
        self._poller = poller
        ends = (
            (child.core_client_address, HighWaterMark.CLIENT_LINK),
            (child.core_worker_address, HighWaterMark.WORKER_LINK),
        )
        self._links = [RouterChannel(child.context, *end) for end in ends]
        clients_link, workers_link = self._links
        self._authenticator = listen(child.config, child.context, clients_link)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        monitor = PidfdMonitor(poller, processes)
        self._clients = Clients(clients_link, monitor, engine, child.epoch, clock.monotonic)
        parallel = child.config.parallel
        group = WorkerGroup(parallel.num_ranks, child.epoch, parallel.answering_rank)
        self._workers = WorkerLink(
            workers_link,
            PidfdMonitor(poller, processes),
            group,
            engine,
            self._clients.send,
            page=self._reporter.page,
            core_epoch=child.epoch,
        )
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
        if child.lifecycle_socket is not None:
            poller.register(child.lifecycle_socket, zmq.POLLIN)
        now = clock.monotonic()
        self._stats_line = StatsLine(child.config.run.log_stats_interval_s, now)
        self._next_status = self._next_beat = now
        self._reported_state: tuple[EngineState, PauseMode, bool, bool] | None = None
        self._has_reported_drained = self._has_more_to_decide = False
        self._has_predecessor = False
        self._all_back_at: float | None = None
        self._leaves_at: float | None = None
        """Time by which the loop ends; None until Stop has arrived."""

    def run(self) -> None:
        """Serve until the supervisor sends Stop and the steps in flight are answered."""
        gc_tuning.freeze()
        self._read_predecessor()
        while not self._has_left:
            self.turn(self._poll_ms())

    @property
    def _has_left(self) -> bool:
        if self._leaves_at is None:
            return False
        return not self._engine.is_computing or self._clock.monotonic() >= self._leaves_at

    def _read_predecessor(self) -> None:
        page = self._reporter.page
        if page is None:
            return
        if (loads := page.read_loads()) is not None:
            self._workers.inherit_loads(loads)
        if (death := page.read_death()) is not None:
            self._has_predecessor = True
            self._workers.on_core_death(death, page.read_marks())

    def turn(self, timeout_ms: int) -> None:
        """Wait for messages or deaths, at most `timeout_ms`, and handle them."""
        self._reporter.idle()
        ready = dict(self._poller.poll(timeout_ms))
        self._reporter.turn()
        started = self._engine.now = self._clock.monotonic()
        if self._authenticator is not None:
            self._authenticator.answer()
        self._reclaim(ready)
        self._drain()
        failpoint("core.after_drain")
        self._has_more_to_decide = self._leaves_at is None and self._workers.dispatch()
        self._report()  # first, so that a pause is in the status when its answer arrives
        self._clients.send_outgoing()
        self._engine.loop_histogram.observe(self._clock.monotonic() - started)

    def _poll_ms(self) -> int:
        if self._has_more_to_decide:
            return 0
        if self._clients.is_behind:
            return _RETRY_MS
        until_status_ms = max(0, int((self._next_status - self._clock.monotonic()) * 1000) + 1)
        tick_ms = self._reporter.tick_ms
        return until_status_ms if tick_ms is None else min(until_status_ms, tick_ms)

    def _reclaim(self, ready: Mapping[object, int]) -> None:
        workers, clients = self._workers.dead(ready), self._clients.dead(ready)
        if workers:
            self._workers.reap(workers)
        for peer in clients:
            self._clients.lose(peer, "is gone")

    def _drain(self) -> None:
        self._workers.drain()
        self._clients.drain()
        for message in self._child.messages():
            if isinstance(message, Stop):
                self._leaves_at = self._leaves_at or self._clock.monotonic() + LEAVE_S
            elif isinstance(message, Drain):
                self._engine.drain()
            elif isinstance(message, Suspect):
                self._workers.on_suspect(message)
            elif isinstance(message, WorkerDied):
                self._workers.on_worker_death(message)

    def _are_all_back(self, now: float) -> bool:
        """Return whether a predecessor's clients have had time to connect since the adoption."""
        if not self._has_predecessor:
            return True
        if self._all_back_at is None and self._engine.facts is not None:
            self._all_back_at = now + RETURN_S
        return self._all_back_at is not None and now >= self._all_back_at

    def _report(self) -> None:
        engine = self._engine
        now, pause_mode = self._clock.monotonic(), engine.pause_mode
        state = engine.state, pause_mode, engine.is_sleeping, engine.is_loading_anew
        are_all_back = self._are_all_back(now)
        if engine.is_drained and not self._has_reported_drained and are_all_back:
            self._has_reported_drained = True
            self._child.drained()
        if now < self._next_status and state == self._reported_state:
            return
        self._next_status = now + STATUS_INTERVAL_S
        if now >= self._next_beat:
            self._next_beat = now + STATUS_INTERVAL_S
            for link in self._links:
                link.beat()
                _keep_listening(link)
        self._reported_state = state
        status = engine.status()
        self._clients.report(status)
        if self._stats_line.due(now):
            line = self._stats_line.render(status.stats, now)
            if line is not None:
                log.info(line)


def _keep_listening(link: RouterChannel) -> None:
    """Restore a removed socket file: the next worker, or client, needs it."""
    with contextlib.suppress(OSError):  # the supervisor restores the directory first
        if link.keep_listening():
            log.warning("a socket file was removed from the run directory: it is made again")

"""The core's loop: drain, reclaim, schedule, dispatch. It owns the sockets and decides nothing.

One thread. It sleeps in one poll until a message, a death or the next report is due, and never
waits for a worker or a client: what cannot be sent now is kept, within bounds, for the next round.
"""

import gc
import logging
import os
import time
from collections import deque

import zmq

from core_proc.engine import EngineCore
from core_proc.stats import StatsLine
from core_proc.workers import WorkerGroup
from protocol.api_core import (
    AbortRequests,
    AddRequest,
    Connect,
    ErrorCode,
    Refused,
    RequestError,
    decode_from_client,
)
from protocol.channel import (
    HighWaterMark,
    PeerGone,
    Received,
    RouterChannel,
)
from protocol.core_worker import (
    Adopt,
    ModelRunnerOutput,
    StepFailed,
    WorkerHello,
    decode_from_worker,
)
from protocol.lifecycle import Drain, Stop
from protocol.message import Message, ProtocolError, encode
from protocol.process import ChildProcess

DRAIN_CLIENTS_LIMIT = 64
DRAIN_WORKERS_LIMIT = 16
OUTBOX_LIMIT = 8192
"""Messages kept for a client that does not read; past it the client counts as gone."""
STATUS_INTERVAL_S = 1.0
_RETRY_MS = 5

log = logging.getLogger("troika.core")


class _Peer:
    """A connected client or worker process, watched for its death."""

    __slots__ = ("outbox", "pidfd")

    def __init__(self, pid: int) -> None:
        self.outbox: deque[bytes] = deque()
        self.pidfd = _open_pidfd(pid)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


class CoreLoop:
    """Connects one EngineCore to its clients, its workers and its supervisor."""

    def __init__(self, child: ChildProcess, engine: EngineCore) -> None:
        self._child = child
        self._engine = engine
        self._epoch = child.epoch
        self._group = WorkerGroup(child.config.parallel.tensor_parallel_size, child.epoch)
        self._adopted_epoch: int | None = None
        self._clients_link = RouterChannel(
            child.context, child.core_client_address, HighWaterMark.CLIENT_LINK
        )
        self._workers_link = RouterChannel(
            child.context, child.core_worker_address, HighWaterMark.WORKER_LINK
        )
        self._clients: dict[bytes, _Peer] = {}
        self._workers: dict[bytes, _Peer] = {}
        self._pidfds: dict[int, bytes] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._clients_link.socket, zmq.POLLIN)
        self._poller.register(self._workers_link.socket, zmq.POLLIN)
        if child.lifecycle_socket is not None:
            self._poller.register(child.lifecycle_socket, zmq.POLLIN)
        now = time.monotonic()
        self._stats_line = StatsLine(child.config.run.log_stats_interval_s, now)
        self._next_status = now
        self._drained_told = False
        self._draining = False
        self._stopped = False

    def run(self) -> None:
        """Serve until the supervisor says Stop."""
        gc.collect()
        gc.freeze()
        while not self._stopped:
            ready = dict(self._poller.poll(self._poll_ms()))
            started = time.perf_counter()
            self._reclaim(ready)
            self._drain()
            self._dispatch()
            self._report()
            self._engine.loop_histogram.observe(time.perf_counter() - started)

    def _poll_ms(self) -> int:
        if any(peer.outbox for peer in self._clients.values()):
            return _RETRY_MS
        return max(0, int((self._next_status - time.monotonic()) * 1000) + 1)

    # Drain --------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for received in self._workers_link.drain(DRAIN_WORKERS_LIMIT):
            self._on_worker(received)
        for received in self._clients_link.drain(DRAIN_CLIENTS_LIMIT):
            self._on_client(received)
        for message in self._child.messages():
            if isinstance(message, Stop):
                self._stopped = True
            elif isinstance(message, Drain):
                self._draining = True
                self._engine.drain()
                self._next_status = 0.0
        for peer in list(self._clients):
            self._flush(peer)

    def _on_client(self, received: Received) -> None:
        peer, header, body = received
        try:
            message = decode_from_client(body)
        except ProtocolError as problem:
            error = RequestError(ErrorCode.INVALID, str(problem)[:4096])
            self._tell_client(peer, Refused(None, error, header.seq))
            return
        if isinstance(message, Connect):
            self._on_connect(peer, message)
        elif header.epoch != self._epoch or peer not in self._clients:
            self._engine.num_fenced_frames += 1
        elif isinstance(message, AddRequest):
            refused = self._engine.add(peer, message)
            if refused is not None:
                self._tell_client(peer, refused)
        elif isinstance(message, AbortRequests):
            self._engine.abort(peer, message.request_ids)

    def _on_connect(self, peer: bytes, message: Connect) -> None:
        if peer not in self._clients:
            self._clients[peer] = self._watch(peer, message.pid)
        self._tell_client(peer, self._engine.status())

    def _on_worker(self, received: Received) -> None:
        peer, header, body = received
        try:
            message = decode_from_worker(body)
        except ProtocolError as problem:
            log.error("worker sent what cannot be read: %s", problem)
            self._lose_worker(peer)
            return
        if isinstance(message, WorkerHello):
            self._on_hello(peer, header.epoch, message)
        elif header.epoch != self._adopted_epoch or not self._group.is_leader(peer):
            self._engine.num_fenced_frames += 1
        elif isinstance(message, ModelRunnerOutput):
            for client, outputs in self._engine.update(message).items():
                self._tell_client(client, outputs)
        elif isinstance(message, StepFailed):
            log.error("step %d failed: %s", message.step_id, message.error)
            self._lose_worker(peer)

    # Reclaim ------------------------------------------------------------------------------------

    def _watch(self, peer: bytes, pid: int) -> _Peer:
        watched = _Peer(pid)
        if watched.pidfd >= 0:
            self._pidfds[watched.pidfd] = peer
            self._poller.register(watched.pidfd, zmq.POLLIN)
        return watched

    def _unwatch(self, watched: _Peer) -> None:
        if self._pidfds.pop(watched.pidfd, None) is not None:
            self._poller.unregister(watched.pidfd)
        watched.close()

    def _reclaim(self, ready: dict[object, int]) -> None:
        """Take back what belonged to processes that died."""
        for pidfd in [fd for fd in ready if isinstance(fd, int) and fd in self._pidfds]:
            peer = self._pidfds[pidfd]
            if peer in self._workers:
                self._drain_before_loss()
                self._lose_worker(peer)
            else:
                self._lose_client(peer, "is gone")

    def _drain_before_loss(self) -> None:
        """Results that a worker sent before it died still count."""
        for received in self._workers_link.drain(DRAIN_WORKERS_LIMIT):
            self._on_worker(received)

    def _lose_client(self, peer: bytes, why: str) -> None:
        watched = self._clients.pop(peer, None)
        if watched is None:
            return
        self._unwatch(watched)
        self._clients_link.forget(peer)
        num_aborted = self._engine.drop_client(peer)
        log.info("client %s: %d requests aborted", why, num_aborted)

    def _on_hello(self, peer: bytes, epoch: int, hello: WorkerHello) -> None:
        if not self._group.enter(peer, epoch, hello):
            self._engine.num_fenced_frames += 1
            return
        for old in [known for known in self._workers if known not in self._group.peers]:
            self._forget_worker(old)
        self._lose_adoption()
        if peer not in self._workers:
            self._workers[peer] = self._watch(peer, hello.pid)
        if self._group.complete:
            self._adopt()

    def _adopt(self) -> None:
        first_step_id = self._engine.adopt_workers(self._group.facts)
        self._adopted_epoch = self._group.link_epoch
        self._tell_workers(Adopt(first_step_id))
        self._next_status = 0.0
        log.info("workers adopted, link epoch %d", self._adopted_epoch)

    def _lose_worker(self, peer: bytes) -> None:
        if self._group.leave(peer):
            log.warning("worker lost; running requests wait for its successor")
            self._lose_adoption()
        self._forget_worker(peer)

    def _lose_adoption(self) -> None:
        self._adopted_epoch = None
        self._engine.lose_workers()
        self._next_status = 0.0

    def _forget_worker(self, peer: bytes) -> None:
        watched = self._workers.pop(peer, None)
        if watched is not None:
            self._unwatch(watched)
            self._workers_link.forget(peer)

    # Dispatch -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while self._adopted_epoch is not None:
            step = self._engine.schedule()
            if step is None:
                return
            self._tell_workers(step)

    def _tell_workers(self, message: Message) -> None:
        """The same bytes to every rank. A rank that cannot take them is lost, and so the group."""
        body = encode(message)
        assert self._adopted_epoch is not None
        epoch = self._adopted_epoch
        for peer in self._group.peers:
            try:
                sent = self._workers_link.send(peer, epoch, body)
            except PeerGone:
                sent = False
            if not sent:
                self._lose_worker(peer)
                return

    def _tell_client(self, peer: bytes, message: Message) -> None:
        watched = self._clients.get(peer)
        if watched is None:
            return
        watched.outbox.append(encode(message))
        self._flush(peer)

    def _flush(self, peer: bytes) -> None:
        outbox = self._clients[peer].outbox
        try:
            while outbox and self._clients_link.send(peer, self._epoch, outbox[0]):
                outbox.popleft()
        except PeerGone:
            self._lose_client(peer, "has disconnected")
            return
        if len(outbox) > OUTBOX_LIMIT:
            self._lose_client(peer, f"has left {OUTBOX_LIMIT} messages unread")

    def _report(self) -> None:
        if self._draining and not self._drained_told and not self._engine.has_unfinished:
            self._drained_told = True
            self._child.drained()
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + STATUS_INTERVAL_S
        status = self._engine.status()
        for peer in list(self._clients):
            self._tell_client(peer, status)
        if self._stats_line.due(now):
            line = self._stats_line.render(status.stats, now)
            if line is not None:
                log.info(line)


def _open_pidfd(pid: int) -> int:
    """Descriptor that becomes readable at the death of `pid`; -1 if it cannot be watched."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1

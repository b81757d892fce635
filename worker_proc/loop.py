"""The worker's loop: it owns the sockets, hands messages to the shim and sends its replies.

A worker whose core dies keeps its weights, reconnects and is adopted by the next core.
"""

import gc
import logging
import os

import zmq

from protocol.channel import DealerChannel, HighWaterMark, LinkEvent
from protocol.core_worker import decode_from_core
from protocol.lifecycle import Drain, Stop
from protocol.message import ProtocolError, encode
from protocol.process import ChildProcess
from worker_proc.runner import Runner
from worker_proc.shim import WorkerShim

_FLUSH_MS = 1000

log = logging.getLogger("troika.worker")


class WorkerLoop:
    """Connects one runner to the core and to the supervisor."""

    def __init__(self, child: ChildProcess, runner: Runner) -> None:
        self._child = child
        self._shim = WorkerShim(runner, child.rank, os.getpid(), child.epoch)
        self._core = DealerChannel(
            child.context, child.core_worker_address, HighWaterMark.WORKER_LINK
        )
        self._poller = zmq.Poller()
        self._poller.register(self._core.socket, zmq.POLLIN)
        self._poller.register(self._core.monitor, zmq.POLLIN)
        if child.lifecycle_socket is not None:
            self._poller.register(child.lifecycle_socket, zmq.POLLIN)

    def run(self) -> None:
        """Compute until the supervisor says Stop.

        Raises:
            Exception: what a step raised, after the core was told.
        """
        gc.collect()
        gc.freeze()
        while True:
            self._poller.poll()  # ends with the parent's death at the latest: process.watch_parent
            for message in self._child.messages():
                if isinstance(message, Stop):
                    return
                assert isinstance(message, Drain)
                self._child.drained()  # a worker has no requests of its own
            self._follow_link()
            self._obey()

    def _follow_link(self) -> None:
        for event in self._core.link_events():
            if event is LinkEvent.CONNECTED:
                hello = self._shim.hello()
                self._core.send(self._shim.epoch, encode(hello))
            else:
                log.info("core gone; waiting for the next one")

    def _obey(self) -> None:
        for received in self._core.drain(limit=1):
            try:
                message = decode_from_core(received.body)
            except ProtocolError as error:
                log.error("core sent what cannot be read: %s", error)
                raise
            reply = self._shim.on_message(received.header.epoch, message)
            if reply is not None:
                self._send(encode(reply))
            if self._shim.failure is not None:
                raise self._shim.failure

    def _send(self, body: bytes) -> None:
        """A reply that nobody takes is lost with its core; the next one asks again."""
        sent = self._core.send(self._shim.epoch, body)
        if not sent and self._core.socket.poll(_FLUSH_MS, zmq.POLLOUT):
            self._core.send(self._shim.epoch, body)

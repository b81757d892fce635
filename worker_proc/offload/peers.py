"""Connections to the block servers of other machines, which are kept for the next load.

A server that does not answer is not asked for some seconds, so that only the first requests wait
for a machine that is gone.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import zmq

from protocol.transport.curve import ClientKeys
from worker_proc.offload.block_reader import BlockReader

PAUSE_S = 5.0
"""Time for which a server is not asked after it has failed to answer."""
_MAX_IDLE = 16
_MAX_PAUSED = 256

log = logging.getLogger("troika.worker")


class PeerPaused(ConnectionError):
    """Raised for a server that has failed to answer a moment ago."""


class Peers:
    """The block servers of other machines, addressed as in messages of the core.

    Connections last until they fail, or until the process ends.
    """

    def __init__(self, keys: ClientKeys, layout: str, rank: int) -> None:
        """`layout` and `rank` are those of the blocks that this worker can use."""
        self._keys = keys
        self._layout = layout
        self._rank = rank
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._idle: deque[BlockReader] = deque()
        self._paused_until: dict[str, float] = {}

    @contextlib.contextmanager
    def reader(self, address: str) -> Iterator[BlockReader]:
        """Lend a connection to a thread; raise OSError, already logged, if the server fails.

        The first thread determines the priority of the threads that encrypt.
        """
        if time.monotonic() < self._paused_until.get(address, 0.0):
            raise PeerPaused(f"{address} has not answered before")
        kept = self._take_idle(address)
        try:
            reader = kept or self._connect(address)
        except OSError as error:
            self._pause(address, error)
            raise
        try:
            yield reader
        except GeneratorExit:  # the load needs no more of its requested blocks
            pass
        except BaseException as error:
            # A kept connection may break because the server was restarted.
            is_gone = isinstance(error, TimeoutError) or kept is None
            if isinstance(error, OSError):
                if is_gone:
                    self._pause(address, error)
                else:
                    log.debug("%s: %s; connecting anew", address, error)
            reader.close()
            raise
        if not reader.is_at_rest:  # it has requested more than was needed
            reader.close()
            return
        with self._lock:
            self._idle.append(reader)
            surplus = self._idle.popleft() if len(self._idle) > _MAX_IDLE else None
        if surplus is not None:
            surplus.close()

    def _connect(self, address: str) -> BlockReader:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
            context = self._context
        return BlockReader(context, address, self._keys, self._layout, self._rank)

    def _take_idle(self, address: str) -> BlockReader | None:
        while True:
            with self._lock:
                reader = next((one for one in self._idle if one.address == address), None)
                if reader is not None:
                    self._idle.remove(reader)
            if reader is None or reader.is_at_rest:
                return reader
            reader.close()

    def _pause(self, address: str, cause: OSError) -> None:
        now = time.monotonic()
        with self._lock:
            is_new = now >= self._paused_until.get(address, 0.0)
            if len(self._paused_until) >= _MAX_PAUSED:
                self._paused_until.clear()
            self._paused_until[address] = now + PAUSE_S
        if is_new:
            log.warning("KV blocks of another machine are computed: %s", cause)

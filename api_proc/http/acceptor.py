"""Accepts connections from a listening socket while file descriptors are available.

Further connections wait in the socket's queue, which costs nothing. An event loop's own server
would close such connections at once, or call accept() in a busy loop.
"""

import asyncio
import errno
import resource
import socket
import ssl
from collections.abc import Callable

from api_proc.http.tls import HANDSHAKE_TIMEOUT_S

RESERVED_FDS = 64
"""Descriptors for everything else: the links, the log, the journal."""
_MIN_CONNECTIONS = 16
_BATCH = 64
_RETRY_S = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_fd_limit() -> None:
    """Raise the soft limit of descriptors, which exists for programs with select(), to the hard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Return the number of connections for which there are descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2**31
    return max(_MIN_CONNECTIONS, soft - RESERVED_FDS)


class Acceptor:
    """One listening socket inside the running event loop."""

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        num_open: Callable[[], int],
        limit: int,
        tls: ssl.SSLContext | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """Prepare; nothing is accepted before `resume`. The caller closes the socket.

        `is_shared`: other processes accept from the same socket. Then a process takes one
        connection in each turn of its event loop, so that the busiest takes the fewest.
        """
        listening.setblocking(False)
        self._socket = listening
        self._make_protocol = make_protocol
        self._num_open = num_open
        self._limit = limit
        self._batch = 1 if is_shared else _BATCH
        self.tls = tls
        """For connections that begin from now on."""
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_reading = False
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        return self._num_open() + len(self._beginning) >= self._limit

    def resume(self) -> None:
        """Accept waiting connections: at the start, and after a connection has ended."""
        if not self._is_reading and not self._is_closed and self._retry is None:
            self._is_reading = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        self._pause()
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(self._batch):
            if self.is_full:
                self._pause()
                return
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause()
                    self._retry = self._loop.call_later(_RETRY_S, self._try_again)
                    return
                continue  # the client has closed that connection already
            self._begin(connection)

    def _try_again(self) -> None:
        self._retry = None
        self.resume()

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        work = self._loop.connect_accepted_socket(
            self._make_protocol,
            connection,
            ssl=self.tls,
            ssl_handshake_timeout=None if self.tls is None else HANDSHAKE_TIMEOUT_S,
        )
        task: asyncio.Task[object] = self._loop.create_task(work)
        self._beginning.add(task)

        def done(task: asyncio.Task[object]) -> None:
            self._beginning.discard(task)
            if not task.cancelled() and task.exception() is not None:
                connection.close()

        task.add_done_callback(done)

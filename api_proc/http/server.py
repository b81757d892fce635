"""Runs the application under uvicorn, and closes connections whose clients do not read or send."""

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from api_proc.http.acceptor import Acceptor, max_connections
from api_proc.http.protocol import HEAD_TIMEOUT_S, KEEP_ALIVE_S, HttpProtocol

_MAX_UNSENT_IN_KERNEL = 16 * 1024
SLOW_READER_TIMEOUT_S = 60.0
_SWEEP_S = 0.5
_STOP_TIMEOUT_S = 5
_LINGER_S = 1.0


class HttpServer(uvicorn.Server):
    """A uvicorn server that the process stops, not a signal."""

    def __init__(
        self,
        app: Starlette,
        *,
        slow_reader_timeout_s: float = SLOW_READER_TIMEOUT_S,
        on_slow_reader: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
        is_shared: bool = False,
        limit: int | None = None,
    ) -> None:
        """Serve `app`, with `tls` over HTTPS.

        A connection whose client reads nothing for `slow_reader_timeout_s` is dropped, and
        `on_slow_reader` is called. `is_shared`: other processes serve the same socket. `limit`: of
        connections; by default as many as there are descriptors.
        """
        self._limit = limit
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._on_slow_reader = on_slow_reader
        self._tls = tls
        self._is_shared = is_shared
        self._acceptors: list[Acceptor] = []
        self._sweep_timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    def stop(self) -> None:
        self.should_exit = True

    def renew_tls(self, tls: ssl.SSLContext | None) -> None:
        """Begin new connections with another certificate; open ones keep theirs."""
        self._tls = tls
        for acceptor in self._acceptors:
            acceptor.tls = tls

    async def retire(self, timeout_s: float) -> None:
        """Leave new connections to a successor on the same socket, and finish open requests.

        Idle connections stay open for a moment, and responses carry `Connection: close`: to a
        client that is sending a request, a connection that closes at once looks like an error.
        """
        self.leave_new_ones(timeout_s)
        closing = (b"connection", b"close")
        self.server_state.default_headers = [*self.server_state.default_headers, closing]
        # Later connections get their headers from here.
        self.config.encoded_headers = [*self.config.encoded_headers, closing]
        await asyncio.sleep(_LINGER_S)
        self.stop()

    def leave_new_ones(self, timeout_s: float) -> None:
        """Accept no more connections; once stopped, wait `timeout_s` for open requests."""
        for acceptor in self._acceptors:
            acceptor.close()
        self.config.timeout_graceful_shutdown = math.ceil(timeout_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        self._loop = asyncio.get_running_loop()
        for listening in sockets or []:
            self.accept_from(listening)
        self._sweep()
        self.started = True

    def accept_from(self, listening: socket.socket) -> None:
        """Serve one more socket; the server has started."""
        # Connections inherit it: unsent data waits in this process, which counts it.
        with contextlib.suppress(OSError):
            lowat = socket.TCP_NOTSENT_LOWAT
            listening.setsockopt(socket.IPPROTO_TCP, lowat, _MAX_UNSENT_IN_KERNEL)
        acceptor = Acceptor(
            listening,
            self._make_protocol,
            self._num_open,
            max_connections() if self._limit is None else self._limit,
            self._tls,
            is_shared=self._is_shared,
        )
        self._acceptors.append(acceptor)
        acceptor.resume()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()

    def _num_open(self) -> int:
        return len(self.server_state.connections)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol = HttpProtocol(self.config, self.server_state, self.lifespan.state, self._loop)
        protocol.on_lost = self._on_lost
        return protocol

    def _on_lost(self) -> None:
        for acceptor in self._acceptors:
            self._loop.call_soon(acceptor.resume)  # its descriptor is closed by then

    def _sweep(self) -> None:
        """Close the connections of clients that neither read nor send requests."""
        self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)
        now = self._loop.time()
        is_full = any(acceptor.is_full for acceptor in self._acceptors)
        connections: list[Any] = list(self.server_state.connections)
        for protocol in connections:
            if protocol.is_stuck(now, self._slow_reader_timeout_s):
                protocol.transport.abort()
                self._on_slow_reader()
            elif protocol.is_head_late(now):
                protocol.refuse(
                    408, f"the request's head was not complete within {HEAD_TIMEOUT_S:.0f} s"
                )
            elif protocol.is_quiet(now, is_full):
                protocol.transport.close()

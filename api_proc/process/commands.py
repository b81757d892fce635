"""Executes the supervisor's commands."""

import asyncio
import contextlib
import os
import sys

from api_proc.http.access_log import AccessLogger
from api_proc.http.server import HttpServer
from api_proc.state import ApiState
from protocol.client.errors import RequestFailed
from protocol.lifecycle import Drain, Health, StatusReply, Stop
from protocol.process.child_runtime import ChildProcess

_FAREWELL_S = 0.5
"""Longest wait for clients to take the last event of their streams."""


class Commands:
    """Executes commands in order. A repeated command to drain has no effect."""

    def __init__(
        self,
        child: ChildProcess,
        state: ApiState,
        server: HttpServer,
        access_logger: AccessLogger | None = None,
        peer_server: HttpServer | None = None,
    ) -> None:
        """`peer_server` serves the other API processes."""
        self._child = child
        self._peer_server = peer_server
        self._state = state
        self._server = server
        self._access_logger = access_logger
        self._leaving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    def execute(self, message: Drain | Stop | Health | StatusReply) -> None:
        if isinstance(message, Health):
            self._state.set_health(message)
        elif isinstance(message, StatusReply):
            if self._state.processes is not None:
                self._state.processes.receive(message)
        elif isinstance(message, Stop):
            self._stopping = self._stopping or asyncio.create_task(self._stop())
        elif self._leaving is None:
            timeout_s = self._child.config.recovery.shutdown_timeout_s
            retire = message.is_replaced  # a successor serves the same socket
            work = self._retire(timeout_s) if retire else self._drain()
            self._leaving = asyncio.create_task(work)

    def on_sigterm(self) -> None:
        """Ask the supervisor for a successor; without a supervisor, finish and exit."""
        if not self._child.ask_for_restart():
            self.execute(Drain(is_replaced=True))

    async def _stop(self) -> None:
        """End the open streams with an error, and exit."""
        self._state.fail_open()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.wait_idle(), _FAREWELL_S)
        await asyncio.sleep(0)  # the event loop writes to the sockets
        if self._state.sessions is not None:
            self._state.sessions.close()
        if self._access_logger is not None:
            self._access_logger.flush()
        sys.stderr.flush()
        os._exit(0)

    async def _retire(self, timeout_s: float) -> None:
        asyncio.get_running_loop().call_later(timeout_s, self._state.fail_open)
        if self._peer_server is not None and self._state.sessions is not None:
            # Requests for this process wait for its successor, which reads its journal.
            self._peer_server.leave_new_ones(timeout_s)
        await self._server.retire(timeout_s)

    async def _drain(self) -> None:
        """Reject new requests, and report when none is open; the supervisor has the deadline.

        The core drains after this process, which ends a pause so that accepted requests finish.
        """
        self._state.drain()
        resuming = asyncio.create_task(self._end_pause())
        await self._state.wait_idle()
        resuming.cancel()
        self._child.drained()

    async def _end_pause(self) -> None:
        with contextlib.suppress(TimeoutError, RequestFailed):
            await self._state.client.resume()

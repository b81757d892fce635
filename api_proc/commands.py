"""What the supervisor tells this process to do, and how it is obeyed."""

import asyncio
import contextlib
import os
import sys

from api_proc.server import HttpServer
from api_proc.state import ApiState
from protocol.child_runtime import ChildProcess
from protocol.errors import RequestFailed
from protocol.lifecycle import Drain, Health, Stop


class Commands:
    """Obeys one after the other. Whoever leaves is asked again and again, which changes nothing."""

    def __init__(self, child: ChildProcess, state: ApiState, server: HttpServer) -> None:
        self._child = child
        self._state = state
        self._server = server
        self._leaving: asyncio.Task[None] | None = None

    def obey(self, message: Drain | Stop | Health) -> None:
        """Do what is asked for; what takes longer goes on in a task."""
        if isinstance(message, Health):
            self._state.hear(message)
        elif isinstance(message, Stop):
            self._stop()
        elif self._leaving is None:
            self._leaving = asyncio.create_task(
                self._retire() if message.is_replaced else self._drain()
            )

    def on_sigterm(self) -> None:
        """Be replaced; where there is no supervisor that would do it, leave."""
        if not self._child.ask_for_restart():
            self.obey(Drain(is_replaced=True))

    def _stop(self) -> None:
        if self._state.sessions is not None:
            self._state.sessions.close()
        sys.stderr.flush()
        os._exit(0)

    async def _retire(self) -> None:
        """A successor serves the same socket: finish what is open, and end."""
        await self._server.retire(self._child.config.recovery.shutdown_timeout_s)

    async def _drain(self) -> None:
        """Refuse what is new, and say when nothing is open; the supervisor holds the deadline.

        What was accepted is to be finished, and the core is told to drain only after this process:
        so it is this process that ends a pause.
        """
        self._state.drain()
        resuming = asyncio.create_task(self._end_pause())
        await self._state.wait_idle()
        resuming.cancel()
        self._child.drained()

    async def _end_pause(self) -> None:
        with contextlib.suppress(TimeoutError, RequestFailed):
            await self._state.client.resume()

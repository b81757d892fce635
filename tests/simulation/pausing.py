"""Pauses the engine, puts it to sleep or resets its prefix cache, and resumes it later.

A granted pause holds until another client changes it, whichever process dies meanwhile. Until then
its client's streams get no more tokens than were in flight.
"""

import contextlib
from collections.abc import Sequence

from protocol.api_core import PauseMode
from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from tests.simulation.client_process import ClientProcess
from tests.simulation.oracle import Hold, Oracle
from tests.simulation.plan import Pause
from tests.simulation.world import SECOND

_ASK_AGAIN_S = 0.5


class Operator:
    """Sends controls through the clients that are alive."""

    def __init__(
        self, oracle: Oracle, clients: Sequence[ClientProcess], num_in_flight: int
    ) -> None:
        """`num_in_flight`: tokens that the steps in flight may still return to a stream."""
        self._oracle = oracle
        self._world = oracle.world
        self._clients = clients
        self._num_in_flight = num_in_flight

    def ask(self, pause: Pause) -> None:
        """Request a pause, and schedule its end."""
        living = self._living
        if not living:
            return
        self._world.counts[pause.kind] += 1
        client = self._world.rng.choice(living)
        client.run(self._ask(client, pause))
        self._world.after(int(pause.seconds * SECOND), self._resume_by_any_client)

    def resume_until_it_holds(self) -> None:
        """Resume the engine repeatedly from now on."""
        self._resume_by([client for client in self._living if _is_paused(client.engine)])
        self._world.after(int(_ASK_AGAIN_S * SECOND), self.resume_until_it_holds)

    def _resume_by_any_client(self) -> None:
        self._resume_by(self._living)

    def _resume_by(self, clients: list[ClientProcess]) -> None:
        if clients:
            client = self._world.rng.choice(clients)
            client.run(self._resume(client.engine))

    @property
    def _living(self) -> list[ClientProcess]:
        return [client for client in self._clients if client.is_alive]

    async def _ask(self, client: ClientProcess, pause: Pause) -> None:
        number, hold = self._oracle.ask_for_pause(), None
        try:
            if await self._send_control(client.engine, pause.kind):
                hold = self._hold(client, pause.kind)
        except (TimeoutError, RequestFailed):
            return
        self._oracle.answered(number, hold)

    def _hold(self, client: ClientProcess, kind: str) -> Hold | None:
        if kind not in ("pause all", "sleep"):
            return None
        # A sleep begins when no step is in flight any more.
        return Hold(client.name, 0 if kind == "sleep" else self._num_in_flight)

    async def _send_control(self, engine: AsyncEngineClient, kind: str) -> bool:
        if kind == "sleep":
            return await engine.sleep()
        if kind == "reset":
            return await engine.reset_prefix_cache(reset_running_requests=True)
        mode = PauseMode.PAUSED_NEW if kind == "pause new" else PauseMode.PAUSED_ALL
        return await engine.pause(mode)

    async def _resume(self, engine: AsyncEngineClient) -> None:
        number = self._oracle.ask_for_pause()
        with contextlib.suppress(TimeoutError, RequestFailed):
            await engine.resume()
            self._oracle.answered(number)


def _is_paused(engine: AsyncEngineClient) -> bool:
    status = engine.status
    if status is None:
        return False
    return status.is_sleeping or status.pause_mode is not PauseMode.RUNNING

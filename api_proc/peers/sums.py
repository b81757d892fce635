"""Gauges of all API processes, as any of them reports them."""

from collections.abc import Awaitable, Callable

import msgspec

from api_proc.http.connection import Connection
from api_proc.state import ApiState

_GAUGES_PATH = "/peer/gauges"

PeerRoute = tuple[str, str, Callable[[ApiState, Connection], Awaitable[None]]]


async def gauges(state: ApiState, connection: Connection) -> None:
    """GET /peer/gauges: of this process."""
    await connection.send_json(state.gauges())


async def sum_of_gauges(state: ApiState) -> dict[str, float]:
    """Add the gauges of all API processes that answer in time."""
    total = state.gauges()
    asked = [] if state.peers is None else await state.peers.ask_all("GET", _GAUGES_PATH)
    answers = [answer for answer in asked if answer.status == 200]
    for answer in answers:
        values = msgspec.json.decode(answer.body, type=dict[str, float])
        for name, value in values.items():
            total[name] = total.get(name, 0) + value
    # A predecessor that finishes its requests counts with its successor.
    total["api_servers_answering"] = len({state.ids.index, *(answer.index for answer in answers)})
    return total


ROUTES: tuple[PeerRoute, ...] = (("GET", _GAUGES_PATH, gauges),)
"""Routes that only other API processes can reach."""

"""Makes an ASGI application of a handler: every failure becomes an answer in OpenAI's shape."""

import logging
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from api_proc.connection import Connection
from api_proc.errors import ApiError, internal
from api_proc.state import ApiState

log = logging.getLogger("troika.api")

Handler = Callable[[ApiState, Connection], Awaitable[None]]


class Endpoint:
    """One route's application."""

    def __init__(self, state: ApiState, handler: Handler, keep_alive_interval_s: float) -> None:
        self._state = state
        self._handler = handler
        self._keep_alive_interval_s = keep_alive_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(
            scope, receive, send, self._keep_alive_interval_s, self._state.budget
        )
        try:
            await self._answer(connection)
        finally:
            connection.close()

    async def _answer(self, connection: Connection) -> None:
        try:
            await self._handler(self._state, connection)
        except ApiError as error:
            await connection.send_error(error)
        except Exception:
            log.exception("request %s failed", connection.request_id)
            if connection.response_started:
                raise
            await connection.send_error(internal())

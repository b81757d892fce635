"""Makes an ASGI application of a request handler."""

import logging
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from api_proc.budget import Budget
from api_proc.errors import ApiError, internal
from api_proc.http.connection import Connection

log = logging.getLogger("troika.api")


class Endpoint:
    """One route; every exception becomes a response in OpenAI's shape."""

    def __init__(
        self,
        handler: Callable[[Connection], Awaitable[None]],
        budget: Budget,
        keep_alive_interval_s: float,
    ) -> None:
        self._handler = handler
        self._budget = budget
        self._keep_alive_interval_s = keep_alive_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send, self._keep_alive_interval_s, self._budget)
        try:
            await self._handler(connection)
        except ApiError as error:
            await connection.send_error(error)
        except Exception:
            log.exception("request %s failed", connection.request_id)
            if connection.response_started:
                raise
            await connection.send_error(internal())
        finally:
            connection.close()

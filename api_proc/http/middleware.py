"""ASGI middlewares: request ids, requests of web pages, and the check of the API key."""

import re
from collections.abc import Callable, Collection, Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_proc.errors import ApiError
from api_proc.http.api_keys import ApiKeys
from api_proc.http.connection import Connection
from api_proc.http.request_ids import RequestIds
from api_proc.http.scope import HAS_CLIENT_ID_KEY, ORIGIN_KEY, REQUEST_ID_KEY, STATUS_KEY

OPEN_PATHS = frozenset(
    {"/health", "/healthz", "/livez", "/ping", "/readyz", "/openapi.json", "/docs"}
)
"""Routes that need no API key: health, and the description of the API."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SCHEME = b"bearer "
_DRAW = RequestIds().draw


class RequestIdMiddleware:
    """Gives each request an id, the client's own where it is valid, and returns it as a header."""

    def __init__(self, app: ASGIApp, draw: Callable[[], str] = _DRAW) -> None:
        """`draw` returns a new id."""
        self._app = app
        self._draw = draw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id", b"")
        scope[HAS_CLIENT_ID_KEY] = _REQUEST_ID.fullmatch(request_id) is not None
        if not scope[HAS_CLIENT_ID_KEY]:
            request_id = self._draw().encode()
        scope[REQUEST_ID_KEY] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS_KEY] = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def cors_middleware(origins: Sequence[str]) -> Middleware:
    """Return the middleware that lets web pages of these origins use the API.

    It answers a browser's preflight requests, which carry no key. Cookies are not allowed.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "request-id", "retry-after"),
    )


class AuthMiddleware:
    """Rejects requests without a valid API key, except those for an open path."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admit(scope):
            await self._app(scope, receive, send)
            return
        await Connection(scope, receive, send).send_error(
            ApiError(
                401,
                "this server needs one API key, in the header 'Authorization: Bearer <key>' or "
                "'x-api-key: <key>'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
            )
        )

    def _admit(self, scope: Scope) -> bool:
        """Return whether a request may be served, and note the key that it has."""
        if scope["path"].removeprefix(scope.get("root_path", "")) in self._open_paths:
            return True
        bearers = [_token(value) for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        # Of several credentials a proxy could have checked another one.
        is_single = max(len(bearers), len(keys)) == 1 and len({*bearers, *keys}) == 1
        name = self._keys.name_of((bearers + keys)[0]) if is_single else None
        if name is not None:
            scope[ORIGIN_KEY] = name
        return name is not None


def _token(authorization: bytes) -> bytes:
    size = len(_SCHEME)
    return authorization[size:] if authorization[:size].lower() == _SCHEME else b""

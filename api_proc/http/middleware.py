"""ASGI middlewares: request ids, and the check of the API key."""

import hashlib
import hmac
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_proc.errors import ApiError
from api_proc.http.connection import HAS_CLIENT_ID_KEY, REQUEST_ID_KEY, Connection

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Routes that need no API key."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SCHEME = b"bearer "


class RequestIdMiddleware:
    """Gives each request an id, the client's own where it is valid, and returns it as a header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id", b"")
        scope[HAS_CLIENT_ID_KEY] = _REQUEST_ID.fullmatch(request_id) is not None
        if not scope[HAS_CLIENT_ID_KEY]:
            request_id = secrets.token_hex(16).encode()
        scope[REQUEST_ID_KEY] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


class AuthMiddleware:
    """Rejects requests without the API key, except those for an open path."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key_hash = _hash(api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        await Connection(scope, receive, send).send_error(
            ApiError(
                401,
                "this server needs an API key in the header 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
            )
        )

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return True
        value: bytes = dict(scope["headers"]).get(b"authorization", b"")
        if value[: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(_hash(value[len(_SCHEME) :]), self._key_hash)


def _hash(key: bytes) -> bytes:
    """Hash keys to one length, so that every comparison takes the same time."""
    return hashlib.sha256(key).digest()

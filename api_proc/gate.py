"""What every request passes first: its id, and the API key."""

import hashlib
import hmac
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_proc.connection import GIVEN_ID_KEY, Connection
from api_proc.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Routes that ask for no key."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SCHEME = b"bearer "


class Gate:
    """The outermost application: refuses strangers, names requests."""

    def __init__(self, app: ASGIApp, api_key: str | None = None) -> None:
        self._app = app
        self._key_hash = None if api_key is None else _hash(api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        scope[GIVEN_ID_KEY] = _REQUEST_ID.fullmatch(request_id) is not None
        if not scope[GIVEN_ID_KEY]:
            request_id = secrets.token_hex(16).encode()
        scope["troika.request_id"] = request_id.decode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [*message["headers"], (b"x-request-id", request_id)]
                message = {**message, "headers": named}
            await send(message)

        if self._is_allowed(scope, headers):
            await self._app(scope, receive, send_named)
            return
        await Connection(scope, receive, send_named).send_error(
            ApiError(
                401,
                "this server needs an API key: send it as 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
            )
        )

    def _is_allowed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Whatever is not open by its exact path needs the key."""
        if self._key_hash is None:
            return True
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return True
        value = headers.get(b"authorization", b"")
        if value[: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(_hash(value[len(_SCHEME) :]), self._key_hash)


def _hash(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing takes the same time for all."""
    return hashlib.sha256(key).digest()

"""Errors in the shape of the Messages API, and the other things that all its responses have."""

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_proc.anthropic.objects import MessageError, MessageErrorResponse, Ping, frame
from api_proc.errors import UNSUPPORTED, ApiError
from api_proc.http.connection import encode
from api_proc.http.scope import REQUEST_ID_KEY, STYLE_KEY, ResponseStyle

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
        (r"^tool_choice\.function\b", "tool_choice"),
        (r"^response_format(\.json_schema)?\b", "output_config.format"),
        (r"^json_schema\b", "output_format.schema"),
        (r"^thinking_token_budget\b", "thinking.budget_tokens"),
    )
)
"""Names of a chat's fields at the start of an error, with those of the body that it was made of."""


def error_response(error: ApiError, request_id: str) -> MessageErrorResponse:
    """Return an error with the names of fields that this API has."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, default)
    param, message = error.param, error.message
    if param is not None and error.code != UNSUPPORTED:  # else the client has sent that name
        for pattern, name in _NAMES:
            param, message = pattern.sub(name, param), pattern.sub(name, message)
    return MessageErrorResponse(MessageError(kind, message, param, error.code), request_id)


def render_error(error: ApiError, request_id: str) -> bytes:
    return encode(error_response(error, request_id))


_STYLE = ResponseStyle(frame(Ping()), render_error)


class MessagesMiddleware:
    """Gives all responses of these routes Anthropic's header for the id, errors and pings."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_below(scope):
            await self._app(scope, receive, send)
            return
        scope[STYLE_KEY] = _STYLE

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = (b"request-id", scope[REQUEST_ID_KEY].encode())
                message = {**message, "headers": [*message["headers"], request_id]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _is_below(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PATH or path.startswith(PATH + "/")

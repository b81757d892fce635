"""What server, middlewares and handlers pass to each other in the ASGI scope of a request."""

from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Scope

from api_proc.errors import ApiError

REQUEST_ID_KEY = "troika.request_id"
HAS_CLIENT_ID_KEY = "troika.has_client_id"
"""Whether the client chose the request's id."""
ORIGIN_KEY = "troika.origin"
"""The API key that admitted the request, as a name that does not reveal it."""
STYLE_KEY = "troika.style"
"""How the answers of a route look if they do not have OpenAI's shape; see `ResponseStyle`."""
UNREAD_KEY = "troika.num_unread"
"""A function that counts the tokens that wait to be sent, for the server."""
ABORT_KEY = "troika.abort"
"""A function of the server that closes the connection at once."""
ON_LOST_KEY = "troika.on_lost"
"""A function of the server that takes a function to call when the connection is lost."""
STATUS_KEY = "troika.status"
"""The status that was sent."""
GENERATION_KEY = "troika.generation"
"""What the request has generated: a `GenerationRecord` of the access log."""


class ResponseStyle(NamedTuple):
    """What all responses have in common on routes that do not have OpenAI's shape."""

    keep_alive: bytes
    """Sent while a stream is silent."""
    render_error: Callable[[ApiError, str], bytes]
    """Returns the body of an error response, given the request's id."""


def error_body(scope: Scope, error: ApiError) -> bytes:
    """Return the body of an error response, in the shape of the request's route."""
    style: ResponseStyle | None = scope.get(STYLE_KEY)
    return error.body() if style is None else style.render_error(error, scope[REQUEST_ID_KEY])

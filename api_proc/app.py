"""The application: all routes over one engine client. A host may mount it anywhere."""

from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api_proc import admin_routes, chat, completions, info_routes, token_routes
from api_proc.connection import KEEP_ALIVE_INTERVAL_S
from api_proc.endpoint import Endpoint, Handler
from api_proc.errors import ApiError
from api_proc.gate import Gate
from api_proc.sessions import Sessions
from api_proc.state import ApiState

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", completions.PATH, completions.completions),
    ("POST", chat.PATH, chat.chat_completions),
    ("GET", "/v1/models", info_routes.list_models),
    ("GET", "/v1/models/{name:path}", info_routes.show_model),
    ("GET", "/health", info_routes.health),
    ("GET", "/livez", info_routes.livez),
    ("GET", "/readyz", info_routes.readyz),
    ("GET", "/metrics", info_routes.metrics),
    ("GET", "/version", info_routes.version),
    ("POST", "/tokenize", token_routes.tokenize),
    ("POST", "/detokenize", token_routes.detokenize),
    ("GET", "/tokenizer_info", token_routes.tokenizer_info),
)
_ADMIN_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/pause", admin_routes.pause),
    ("POST", "/resume", admin_routes.resume),
    ("GET", "/is_paused", admin_routes.is_paused),
    ("POST", "/sleep", admin_routes.sleep),
    ("POST", "/wake_up", admin_routes.resume),
    ("GET", "/is_sleeping", admin_routes.is_sleeping),
    ("POST", "/reset_prefix_cache", admin_routes.reset_prefix_cache),
)


def openai_app(
    state: ApiState, *, keep_alive_interval_s: float = KEEP_ALIVE_INTERVAL_S
) -> Starlette:
    """Build the application.

    Args:
        state: holds the client, which the host starts and closes.
        keep_alive_interval_s: silence of a stream after which a comment is sent.
    """
    extra = _ADMIN_ROUTES if state.config.api.enable_admin_routes else ()
    routes: list[BaseRoute] = [
        Route(path, Endpoint(state, handler, keep_alive_interval_s), methods=[method])
        for method, path, handler in (*_ROUTES, *extra)
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, api_key=state.config.api.api_key)],
        exception_handlers={HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False
    return app


async def start_sessions(state: ApiState) -> None:
    """Go on with what the journal says, if there is one, before anybody asks for it."""
    if state.config.api.journal_dir is not None:
        state.sessions = Sessions(state.client, state.config.api, state.metrics.count_end)
        rereaders = {completions.PATH: completions.reread, chat.PATH: chat.reread}
        state.sessions.start(rereaders)
        await state.sessions.journaling.wait_read()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Routing errors of Starlette: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    message = f"{phrase}: {request.method} {request.url.path}"
    body = ApiError(error.status_code, message, code=code).body()
    return Response(body, error.status_code, error.headers, "application/json")

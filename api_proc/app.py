"""The application: all routes over one engine client. A host may mount it at any path."""

import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from api_proc.adapters import routes as adapter_routes
from api_proc.anthropic.errors import MessagesMiddleware
from api_proc.anthropic.routes import MESSAGES, count_tokens
from api_proc.errors import ApiError, internal
from api_proc.fairness.waiting import current_client
from api_proc.http.access_log import AccessLogger, AccessLogMiddleware
from api_proc.http.connection import KEEP_ALIVE_INTERVAL_S, Connection
from api_proc.http.foreign_routes import instead_of
from api_proc.http.middleware import (
    OPEN_PATHS,
    AuthMiddleware,
    RequestIdMiddleware,
    cors_middleware,
)
from api_proc.openai import token_routes
from api_proc.openai.chat import CHAT
from api_proc.openai.completions import COMPLETIONS
from api_proc.openai.generate import GENERATE
from api_proc.openai.invocations import invoke
from api_proc.openapi import routes as openapi
from api_proc.operation import admin_routes, info_routes, load_routes
from api_proc.page import routes as page
from api_proc.peers import sums
from api_proc.pooling import scores
from api_proc.pooling.classify import classify
from api_proc.pooling.embeddings import create_embeddings
from api_proc.responses import routes as response_routes
from api_proc.responses.create import RESPONSES, count_input
from api_proc.resumption.sessions import Sessions
from api_proc.state import ApiState

log = logging.getLogger("troika.api")

_ROUTES = (
    ("POST", COMPLETIONS.path, COMPLETIONS.serve),
    ("POST", CHAT.path, CHAT.serve),
    ("POST", MESSAGES.path, MESSAGES.serve),
    ("POST", GENERATE.path, GENERATE.serve),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("GET", "/v1/models", info_routes.list_models),
    ("GET", "/v1/models/{name:path}", info_routes.show_model),
    ("GET", "/health", info_routes.health),
    ("GET", "/ping", info_routes.health),
    ("POST", "/ping", info_routes.health),
    ("GET", "/livez", info_routes.livez),
    ("GET", "/readyz", info_routes.readyz),
    ("GET", "/metrics", info_routes.metrics),
    ("GET", "/version", info_routes.show_version),
    ("POST", "/tokenize", token_routes.tokenize),
    ("POST", "/detokenize", token_routes.detokenize),
    ("GET", "/tokenizer_info", token_routes.tokenizer_info),
    ("POST", "/apply-template", token_routes.apply_template),
    ("POST", "/v1/embeddings", create_embeddings),
    ("POST", "/score", scores.create_scores),
    ("POST", "/v1/score", scores.create_scores),
    ("POST", "/rerank", scores.rerank),
    ("POST", "/v1/rerank", scores.rerank),
    ("POST", "/v2/rerank", scores.rerank),
    ("POST", "/classify", classify),
    ("POST", "/invocations", invoke),
    ("POST", RESPONSES.path, RESPONSES.serve),
    ("POST", "/v1/responses/input_tokens", count_input),
    ("GET", "/v1/responses/{response_id}", response_routes.show_response),
    ("DELETE", "/v1/responses/{response_id}", response_routes.delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", response_routes.cancel_response),
    ("GET", "/v1/responses/{response_id}/input_items", response_routes.list_input_items),
    ("GET", "/load", load_routes.load),
    ("GET", "/v1/load", load_routes.load),
    ("GET", "/slots", load_routes.slots),
    ("GET", "/healthz", load_routes.healthz),
    ("POST", "/abort_requests", load_routes.abort_requests),
    ("GET", "/openapi.json", openapi.openapi_json),
    ("GET", "/docs", openapi.docs_page),
)
_ADMIN_ROUTES = (
    ("POST", "/pause", admin_routes.pause),
    ("POST", "/resume", admin_routes.resume),
    ("GET", "/is_paused", admin_routes.is_paused),
    ("POST", "/sleep", admin_routes.sleep),
    ("POST", "/wake_up", admin_routes.wake_up),
    ("GET", "/is_sleeping", admin_routes.is_sleeping),
    ("POST", "/reset_prefix_cache", admin_routes.reset_prefix_cache),
    ("POST", "/v1/load_lora_adapter", adapter_routes.load_adapter),
    ("POST", "/v1/unload_lora_adapter", adapter_routes.unload_adapter),
)
_SLASHES = re.compile("/+")
_MAX_COMPARED = 64
"""Characters of a path that is compared with those of the routes."""
_ADMIN_PATHS = frozenset((method, path) for method, path, _ in _ADMIN_ROUTES)


def openai_app(
    state: ApiState,
    *,
    keep_alive_interval_s: float = KEEP_ALIVE_INTERVAL_S,
    access_logger: AccessLogger | None = None,
) -> Starlette:
    """Build the application; the host starts and closes the state's client."""
    config = state.config.api
    request_ids = Middleware(RequestIdMiddleware, draw=state.ids.draw)
    middleware = [request_ids, Middleware(MessagesMiddleware)]
    if access_logger is not None:
        middleware.insert(0, Middleware(AccessLogMiddleware, logger=access_logger))
    if config.allowed_origins:
        middleware.append(cors_middleware(config.allowed_origins))
    if config.api_key or config.api_key_file is not None:
        open_paths = OPEN_PATHS | page.OPEN_PATHS
        middleware.append(Middleware(AuthMiddleware, keys=state.api_keys, open_paths=open_paths))
    return _app(_routes(state, keep_alive_interval_s), middleware)


def peer_app(state: ApiState) -> Starlette:
    """Build what other API processes reach: the same routes, without keys, and further ones.

    Every route concerns only this process.
    """
    further = (*sums.ROUTES, *response_routes.PEER_ROUTES)
    routes = _routes(state, KEEP_ALIVE_INTERVAL_S, further, is_forwarded=True)
    return _app(routes, [Middleware(RequestIdMiddleware), Middleware(MessagesMiddleware)])


def _routes(
    state: ApiState,
    keep_alive_interval_s: float,
    further: Iterable[sums.PeerRoute] = (),
    *,
    is_forwarded: bool = False,
) -> Iterator[Route]:
    config = state.config.api
    for method, path, handler in (
        *_ROUTES,
        *_ADMIN_ROUTES * config.enable_admin_routes,
        *page.ROUTES * config.enable_page,
        *further,
    ):
        endpoint = _Endpoint(handler, state, keep_alive_interval_s, is_forwarded)
        yield Route(path, endpoint, methods=[method])


def _app(routes: Iterable[Route], middleware: list[Middleware]) -> Starlette:
    routes = list(routes)
    app = Starlette(
        routes=routes,
        middleware=[*middleware, Middleware(_PlainPaths, routes=routes)],
        exception_handlers={HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False
    return app


class _PlainPaths:
    """Calls the endpoints of paths without parameters; the router has all others.

    A request that waits would otherwise hold five frames of the router. Slashes at the end of a
    path are left out, as some clients append one.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._endpoints: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): route.app
            for route in routes
            for method in route.methods or ()
            if not route.param_convertors
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._app
        if scope["type"] == "http":
            path: str = scope["path"].removeprefix(scope.get("root_path", ""))
            endpoint = self._endpoints.get((scope["method"], path))
            if endpoint is None and path.endswith("/"):
                endpoint = self._endpoints.get((scope["method"], path.rstrip("/")))
                if endpoint is not None:
                    scope["path"] = scope["path"].rstrip("/")
            app = endpoint or app
        return app(scope, receive, send)


@dataclass(frozen=True)
class _Endpoint:
    """Handles the requests of one route; every exception becomes an error response."""

    handler: Callable[[ApiState, Connection], Awaitable[None]]
    state: ApiState
    keep_alive_interval_s: float
    is_forwarded: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        connection = Connection(
            scope,
            receive,
            send,
            self.keep_alive_interval_s,
            budget=state.budget,
            control_budget=state.control_budget,
            admission=state.admission,
            reading=state.reading,
        )
        connection.is_forwarded = self.is_forwarded
        current_client.set(connection.origin)
        try:
            await self.handler(self.state, connection)
        except ApiError as error:
            await connection.send_error(error)
        except Exception:
            log.exception("request %s failed", connection.request_id)
            if connection.response_started:
                raise
            await connection.send_error(internal())
        finally:
            connection.close()


async def start_sessions(state: ApiState) -> None:
    """Restore the requests of the journal, if there is one, before the first client connects."""
    config = state.config.api
    if config.journal_dir is not None:
        if state.ids.index:  # the first process takes over the journal of a single one
            directory = os.path.join(config.journal_dir, f"api-{state.ids.index}")
            config = msgspec.structs.replace(config, journal_dir=directory)
        count_end = state.metrics.count_end
        kept, clients = state.stored_responses, state.budget.clients
        state.sessions = Sessions(state.client, config, count_end, kept=kept, clients=clients)
        state.stored_responses.journaling = state.sessions.journaling
        apis = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE)
        state.sessions.start({api.path: api.decode_accepted for api in apis})
        await state.sessions.journaling.wait_read()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Render Starlette's routing errors: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    message = f"{phrase}: {request.method} {request.url.path}"
    headers: dict[str, str] = {}
    if (request.method, request.url.path) in _ADMIN_PATHS:
        message += ", which exists only with --enable-admin-routes"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods_of(request))
        message += f"; its methods: {headers['Allow']}"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message += f"; {_hint(request.method, request.url.path)}"
    fields = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
    return _ErrorResponse(ApiError(error.status_code, message, code=code, headers=fields))


def _hint(method: str, path: str) -> str:
    """Return what a client may have meant with a path that does not exist."""
    methods: dict[str, list[str]] = {}
    for each, known, _ in _ROUTES:
        methods.setdefault(known, []).append(each)
    plain = _SLASHES.sub("/", path[:_MAX_COMPARED]).rstrip("/").replace("/v1/v1/", "/v1/")
    found = [known for known in (plain, f"/v1{plain}") if known in methods]
    if not found and (instead := instead_of(plain)) is not None:
        return instead
    if not found and len(path) <= _MAX_COMPARED:
        found = get_close_matches(plain, methods, n=1, cutoff=0.85)
    if not found:
        return "GET /docs lists the routes"
    offered = methods[found[0]]
    return f"did you mean {method if method in offered else offered[0]} {found[0]}?"


class _ErrorResponse(Response):
    """An error, after which the rest of a body is discarded, as after other errors."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Connection(scope, receive, send).send_error(self._error)


def _methods_of(request: Request) -> list[str]:
    """Return the methods of a path, which has a route for each; Starlette names those of one."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods
    return sorted(found)

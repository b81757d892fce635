"""The page's files, and GET /debug/engine, which its live view reads."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from api_proc.http.connection import Connection
from api_proc.peers.sums import sum_of_gauges
from api_proc.state import ApiState
from protocol.lifecycle import ProcessState, Role

_STATIC = Path(__file__).parent / "static"
_CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Scripts come from this server's files only, and no text can become markup."""
_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)

Handler = Callable[[ApiState, Connection], Awaitable[None]]


class ProcessRow(msgspec.Struct, frozen=True):
    """One process, as its supervisor sees it."""

    role: Role
    rank: int
    pid: int | None
    epoch: int
    state: ProcessState
    rss_bytes: int
    num_restarts: int
    name: str


class EngineLoad(msgspec.Struct, frozen=True):
    """Gauges of the core, and its counters since it started."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    num_steps: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    state_cache_usage: float | None


class EngineView(msgspec.Struct, frozen=True):
    """Body of GET /debug/engine."""

    time_s: float
    """The host's monotonic clock."""
    model: str
    state: str
    is_ready: bool
    is_draining: bool
    num_open_requests: int
    processes: list[ProcessRow] | None
    """None without a supervisor, or if it does not answer."""
    failure: str | None
    """Why the engine gave up."""
    load: EngineLoad | None
    load_age_s: float | None
    """Seconds since the core reported `load`."""


async def engine(state: ApiState, connection: Connection) -> None:
    """GET /debug/engine: what this process knows of the engine, and the list of processes."""
    reply = None if state.processes is None else await state.processes.latest()
    status, now = state.client.status, time.monotonic()
    view = EngineView(
        time_s=now,
        model=state.model_name,
        state=state.shown_state(),
        is_ready=state.is_ready(),
        is_draining=state.is_draining,
        num_open_requests=int((await sum_of_gauges(state))["ledger_requests"]),
        processes=None
        if reply is None
        else msgspec.convert(reply.processes, list[ProcessRow], from_attributes=True),
        failure=None if reply is None else reply.failure,
        load=None
        if status is None
        else msgspec.convert(status.stats, EngineLoad, from_attributes=True),
        load_age_s=None if status is None else now - state.client.last_status_time,
    )
    await connection.send_json(view, headers=((b"cache-control", b"no-store"),))


def _file(path: Path) -> Handler:
    """Return the handler of a file, which is read once."""
    content = path.read_bytes()

    async def serve(state: ApiState, connection: Connection) -> None:
        await connection.send(200, content, _HEADERS, _CONTENT_TYPES[path.suffix])

    return serve


_FILES = {
    f"/page/{path.name}": path
    for path in sorted(_STATIC.iterdir())
    if path.suffix in _CONTENT_TYPES
}
_FILES["/"] = _FILES.pop("/page/index.html")
OPEN_PATHS = frozenset(_FILES)
"""They need no API key: the page asks its user for one."""
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/debug/engine", engine),
    *(("GET", url, _file(path)) for url, path in _FILES.items()),
)

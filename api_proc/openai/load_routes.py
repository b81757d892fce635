"""Open requests: how many, which ones, whether they make progress, and abort by id."""

import time
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder
from api_proc.openai.responses import encode
from api_proc.state import ApiState

STUCK_AFTER_S = 60.0
"""Time without a step after which open requests are stuck; no step takes that long."""
MAX_ABORTED = 1024


class Load(msgspec.Struct, kw_only=True):
    """Response of /load and /v1/load."""

    server_load: int
    """HTTP requests of this process that wait for the engine."""
    num_requests_running: int
    """Sequences of all clients of the engine."""
    num_requests_waiting: int
    kv_cache_usage: float
    """0 to 1."""


class Progress(msgspec.Struct, kw_only=True):
    """Response of /healthz."""

    healthy: bool
    state: str
    num_unfinished: int
    seconds_without_step: float
    stuck_after_s: float
    reason: str | UnsetType = UNSET


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of POST /abort_requests."""

    request_ids: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=160)]],
        Meta(min_length=1, max_length=MAX_ABORTED),
    ]


class Aborted(msgspec.Struct):
    """Response of /abort_requests: the ids that were found."""

    aborted: list[str]


_decode_abort = BodyDecoder(AbortBody)


async def load(state: ApiState, connection: Connection) -> None:
    stats = state.engine_stats()
    report = Load(
        server_load=len(state.open_requests),
        num_requests_running=stats.num_running_reqs,
        num_requests_waiting=stats.num_waiting_reqs,
        kv_cache_usage=stats.kv_cache_usage,
    )
    await connection.send(200, encode(report))


async def slots(state: ApiState, connection: Connection) -> None:
    """GET /slots: the oldest open requests; their ids, which can abort them, for admins only."""
    with_ids = state.config.api.enable_admin_routes
    await connection.send(200, encode(state.open_requests.slots(with_ids=with_ids)))


async def healthz(state: ApiState, connection: Connection) -> None:
    """GET /healthz: 503 if requests are unfinished and no step was computed for a minute.

    Load alone never makes it fail: a busy engine computes steps, a paused one has none to compute.
    """
    stats, client = state.engine_stats(), state.client
    num_unfinished = max(client.num_open_requests, stats.num_running_reqs + stats.num_waiting_reqs)
    age_s = time.monotonic() - client.last_progress_time if num_unfinished else 0.0
    report = Progress(
        healthy=age_s < STUCK_AFTER_S,
        state=state.engine_state(),
        num_unfinished=num_unfinished,
        seconds_without_step=round(age_s, 3),
        stuck_after_s=STUCK_AFTER_S,
    )
    if not report.healthy:
        report.reason = f"{num_unfinished} requests, and no step for {age_s:.0f} s"
    headers = [] if report.healthy else [(b"retry-after", b"1")]
    await connection.send(200 if report.healthy else 503, encode(report), headers)


async def abort_requests(state: ApiState, connection: Connection) -> None:
    """POST /abort_requests: end open requests of this process; others are not found."""
    body = _decode_abort(await connection.read_body(state.config.api.max_body_bytes))
    await connection.send(200, encode(Aborted(state.open_requests.abort(body.request_ids))))

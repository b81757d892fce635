"""Open requests: their number, progress and ids, and aborting them by id."""

import time
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder
from api_proc.http.open_requests import MAX_SLOTS, Slot
from api_proc.peers.peers import HEAD_TIMEOUT_S
from api_proc.state import ApiState

STUCK_AFTER_S = 60.0
"""Time without a step after which open requests are stuck; no step takes that long."""
MAX_ABORTED = 1024

T = TypeVar("T")


class Load(msgspec.Struct, kw_only=True):
    """Response of /load and /v1/load."""

    server_load: int
    """HTTP requests that wait for the engine, in all API processes that answer."""
    num_requests_running: int
    """Sequences of all clients of the engine."""
    num_requests_waiting: int
    kv_cache_usage: float
    """A fraction from 0 to 1."""


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
    others = await _ask_others(state, connection, "/load", Load)
    report = Load(
        server_load=len(state.open_requests) + sum(other.server_load for other in others),
        num_requests_running=stats.num_running_reqs,
        num_requests_waiting=stats.num_waiting_reqs,
        kv_cache_usage=stats.kv_cache_usage,
    )
    await connection.send_json(report)


async def slots(state: ApiState, connection: Connection) -> None:
    """GET /slots: the oldest open requests; only admins see the ids, which can abort them."""
    found = state.open_requests.slots(with_ids=state.config.api.enable_admin_routes)
    if state.peers is not None:
        for slot in found:
            slot.api_server = state.ids.index
    for others in await _ask_others(state, connection, "/slots", list[Slot]):
        found += others
    found.sort(key=lambda slot: -slot.age_s)
    await connection.send_json(found[:MAX_SLOTS])


async def healthz(state: ApiState, connection: Connection) -> None:
    """GET /healthz: 503 if requests are unfinished and no step was computed for a minute.

    Load alone never makes it fail: a busy engine computes steps, and a paused one has none to
    compute.
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
    await connection.send_json(report, status=200 if report.healthy else 503, headers=headers)


async def abort_requests(state: ApiState, connection: Connection) -> None:
    """POST /abort_requests: end open requests of all API processes that answer."""
    raw = await connection.read_body(state.config.api.max_body_bytes, is_control=True)
    body = _decode_abort(raw)
    aborted = state.open_requests.abort(body.request_ids)
    for other in await _ask_others(state, connection, "/abort_requests", Aborted, raw):
        aborted += other.aborted
    await connection.send_json(Aborted(list(dict.fromkeys(aborted))))


async def _ask_others(
    state: ApiState, connection: Connection, path: str, kind: type[T], body: bytes | None = None
) -> list[T]:
    """Return the answers of the other API processes; none if one of them is asking.

    The method is POST with a body, and otherwise GET. A report is due soon; an action may take
    longer.
    """
    if state.peers is None or connection.is_forwarded:
        return []
    if body is None:
        answers = await state.peers.ask_all("GET", path)
    else:
        answers = await state.peers.ask_all("POST", path, body, timeout_s=HEAD_TIMEOUT_S)
    found = [answer.body for answer in answers if answer.status == 200]
    return [msgspec.json.decode(each, type=kind) for each in found]

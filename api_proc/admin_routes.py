"""Routes that govern the whole engine: pause, sleep, reset. Served only if enabled."""

from collections.abc import Awaitable
from urllib.parse import parse_qsl

from api_proc.connection import Connection
from api_proc.errors import ApiError, from_request_error, invalid, unavailable
from api_proc.responses import encode
from api_proc.state import ApiState
from protocol.api_core import PauseMode
from protocol.errors import RequestFailed

_MODES = {"new": PauseMode.PAUSED_NEW, "all": PauseMode.PAUSED_ALL}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


async def pause(state: ApiState, connection: Connection) -> None:
    """POST /pause?mode=new|all: admit nobody new, or compute nothing, which is the default.

    Raises:
        ApiError: 400 for another mode or parameter; 409 if the engine has begun to drain; 503 while
            it starts, this server drains, or it does not answer; 500 if this server is closing.
    """
    state.require_facts()
    name = _query(connection, "mode", "all")
    if name not in _MODES:
        raise invalid("mode", f"must be one of {', '.join(_MODES)}")
    await _obeyed(state.client.pause(_MODES[name]), "the engine is shutting down")
    await connection.send_json(200, encode({"status": "paused", "mode": name}))


async def resume(state: ApiState, connection: Connection) -> None:
    """POST /resume, and /wake_up: go on.

    Raises:
        ApiError: as `pause`.
    """
    state.require_facts()
    _query(connection)
    await _obeyed(state.client.resume(), "the engine cannot go on now")
    await connection.send_json(200, encode({"status": "resumed"}))


async def sleep(state: ApiState, connection: Connection) -> None:
    """POST /sleep: compute nothing, and give back the memory of the KV cache.

    Raises:
        ApiError: 409 if it was resumed meanwhile, drains, or loads KV; others as `pause`.
    """
    state.require_facts()
    _query(connection)
    await _obeyed(state.client.sleep(), "the engine cannot sleep now")
    await connection.send_json(200, encode({"status": "sleeping"}))


async def is_sleeping(state: ApiState, connection: Connection) -> None:
    """GET /is_sleeping: whether it was asked to, and has not been resumed."""
    _query(connection)
    status = state.client.status
    asleep = status is not None and status.is_sleeping
    await connection.send_json(200, encode({"is_sleeping": asleep}))


async def is_paused(state: ApiState, connection: Connection) -> None:
    """GET /is_paused."""
    _query(connection)
    status = state.client.status
    mode = PauseMode.RUNNING if status is None else status.pause_mode
    body = {"is_paused": mode is not PauseMode.RUNNING, "pause_mode": mode}
    await connection.send_json(200, encode(body))


async def reset_prefix_cache(state: ApiState, connection: Connection) -> None:
    """POST /reset_prefix_cache?reset_running_requests=true|false.

    Raises:
        ApiError: 409 while blocks are in use and `reset_running_requests` is false, or while KV is
            being loaded; others as `pause`.
    """
    state.require_facts()
    text = _query(connection, "reset_running_requests", "false")
    if text.lower() not in _FLAGS:
        raise invalid("reset_running_requests", "must be true or false")
    work = state.client.reset_prefix_cache(_FLAGS[text.lower()])
    await _obeyed(work, "blocks of the KV cache are in use; see reset_running_requests")
    await connection.send_json(200, encode({"status": "reset"}))


def _query(connection: Connection, name: str = "", default: str = "") -> str:
    """Return one parameter of the URL, if the route has one.

    Raises:
        ApiError: 400 where there is another one, which is most likely a slip.
    """
    query: bytes = connection.scope["query_string"]
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    for given, _ in pairs:
        if given != name:
            known = f"only {name} is" if name else "nothing is"
            raise invalid(given[:64], f"is not known here: {known}")
    return dict(pairs).get(name, default)


async def _obeyed(work: Awaitable[bool], why_not: str) -> None:
    """Wait for the engine's answer.

    Raises:
        ApiError: 409 with `why_not` where it refuses, 503 where it does not answer.
    """
    try:
        ok = await work
    except TimeoutError as error:
        raise unavailable("the engine does not answer", "engine_silent") from error
    except RequestFailed as failure:
        raise from_request_error(failure.error, "") from failure
    if not ok:
        raise ApiError(409, why_not, code="conflict")

"""Routes that control the whole engine: pause, sleep, reset. Disabled by default."""

from collections.abc import Awaitable
from typing import Literal, get_args
from urllib.parse import parse_qsl

import msgspec

from api_proc.errors import ApiError, from_request_error, invalid, unavailable
from api_proc.http.connection import Connection
from api_proc.http.decoding_errors import from_decoding
from api_proc.state import ApiState
from protocol.api_core import PauseMode
from protocol.client.errors import RequestFailed
from protocol.config.field_errors import read_field_error

_MODES = {"new": PauseMode.PAUSED_NEW, "all": PauseMode.PAUSED_ALL}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


_LEVELS = {
    "1": "",
    "2": "level 2 does what level 1 does: the memory of the KV cache is released, and the weights"
    " stay in memory",
}
_MAX_BODY_BYTES = 4096
_Value = str | bool | int
_Tag = Literal["weights", "kv_cache"]
_decode_body = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_values = msgspec.json.Decoder(_Value | list[_Value] | None).decode
_KV_CACHE = "kv_cache"
_TAGS = get_args(_Tag)


class PauseBody(msgspec.Struct):
    """Body of /pause."""

    mode: Literal["new", "all"] | None = "all"


class SleepBody(msgspec.Struct):
    """Body of /sleep."""

    level: Literal[1, 2] | Literal["1", "2"] | None = 1


class WakeUpBody(msgspec.Struct):
    """Body of /wake_up."""

    tags: _Tag | list[_Tag] | None = None


class ResetBody(msgspec.Struct):
    """Body of /reset_prefix_cache."""

    reset_running_requests: bool | None = False


class Done(msgspec.Struct, omit_defaults=True):
    """Response of a command."""

    status: str
    message: str = ""
    """Differences between the effect and a client's possible expectations."""


class Paused(msgspec.Struct):
    """Response of /pause."""

    status: str
    mode: str


class PauseState(msgspec.Struct):
    """Response of /is_paused."""

    is_paused: bool
    pause_mode: PauseMode


class SleepState(msgspec.Struct):
    """Response of /is_sleeping."""

    is_sleeping: bool


async def pause(state: ApiState, connection: Connection) -> None:
    """POST /pause?mode=new|all: admit no new requests, or compute nothing (default)."""
    state.require_facts()
    name = await _parameter(connection, "mode", "all")
    if name not in _MODES:
        raise invalid("mode", f"must be one of {', '.join(_MODES)}")
    await _require(state.client.pause(_MODES[name]), "the engine is shutting down")
    await connection.send_json(Paused("paused", name))


async def resume(state: ApiState, connection: Connection) -> None:
    """POST /resume: end a pause or a sleep."""
    state.require_facts()
    await _parameters(connection)
    await _resume(state, connection)


async def wake_up(state: ApiState, connection: Connection) -> None:
    """POST /wake_up?tags=weights&tags=kv_cache: end a sleep, unless only weights are named."""
    state.require_facts()
    tags = await _parameters(connection, "tags")
    if not set(tags) <= set(_TAGS):
        raise invalid("tags", f"must be one of {', '.join(_TAGS)}, which may be repeated")
    if tags and _KV_CACHE not in tags:
        message = f"the weights have stayed in memory; tags={_KV_CACHE} ends a sleep"
        await connection.send_json(Done("unchanged", message))
        return
    await _resume(state, connection)


async def _resume(state: ApiState, connection: Connection) -> None:
    await _require(state.client.resume(), "the engine cannot resume now")
    await connection.send_json(Done("resumed"))


async def sleep(state: ApiState, connection: Connection) -> None:
    """POST /sleep?level=1|2: compute nothing, and release the memory of the KV cache."""
    state.require_facts()
    level = await _parameter(connection, "level", "1")
    if level not in _LEVELS:
        raise invalid("level", f"must be one of {', '.join(_LEVELS)}")
    await _require(state.client.sleep(), "the engine cannot sleep now")
    await connection.send_json(Done("sleeping", _LEVELS[level]))


async def is_sleeping(state: ApiState, connection: Connection) -> None:
    """GET /is_sleeping: whether a sleep was requested after the last resume."""
    await _parameters(connection)
    status = state.client.status
    asleep = status is not None and status.is_sleeping
    await connection.send_json(SleepState(asleep))


async def is_paused(state: ApiState, connection: Connection) -> None:
    await _parameters(connection)
    status = state.client.status
    mode = PauseMode.RUNNING if status is None else status.pause_mode
    await connection.send_json(PauseState(mode is not PauseMode.RUNNING, mode))


async def reset_prefix_cache(state: ApiState, connection: Connection) -> None:
    """POST /reset_prefix_cache?reset_running_requests=true|false."""
    state.require_facts()
    text = await _parameter(connection, "reset_running_requests", "false")
    if text.lower() not in _FLAGS:
        raise invalid("reset_running_requests", "must be true or false")
    work = state.client.reset_prefix_cache(_FLAGS[text.lower()])
    await _require(work, "blocks of the KV cache are in use; see reset_running_requests")
    await connection.send_json(Done("reset"))


async def _parameter(connection: Connection, name: str, default: str) -> str:
    """Return the value of the route's only parameter; reject any others."""
    return [default, *await _parameters(connection, name)][-1]


async def _parameters(connection: Connection, name: str = "") -> list[str]:
    """Return all values of the route's only parameter, in query and body; reject any others."""
    query: bytes = connection.scope["query_string"]
    pairs: list[tuple[str, str | None]] = []
    pairs += parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    if body := await connection.read_body(_MAX_BODY_BYTES, is_control=True):
        pairs += _body_pairs(body)
    for given, _ in pairs:
        if given != name:
            known = f"its only parameter is {name}" if name else "it has no parameters"
            raise invalid(given[:64], f"is not a parameter of this route; {known}")
    return [value for _, value in pairs if value is not None]


def _body_pairs(body: bytes) -> list[tuple[str, str | None]]:
    """Return the parameters of a JSON object, as they would be in a query; null is the default."""
    try:
        decoded = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise from_decoding(error, raw=body) from error
    pairs: list[tuple[str, str | None]] = []
    for name, raw in decoded.items():
        try:
            value = _decode_values(raw)
        except msgspec.ValidationError as error:
            problem = read_field_error(str(error))
            raise invalid(f"{name}{problem.place}", problem.reason) from error
        for each in value if isinstance(value, list) else [value]:
            pairs.append((name, _as_in_query(each)))
    return pairs


def _as_in_query(value: _Value | None) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


async def _require(work: Awaitable[bool], reason: str) -> None:
    """Wait for the engine's response; raise a 409 with `reason` if it rejects the command."""
    try:
        is_done = await work
    except TimeoutError as error:
        raise unavailable("the engine does not respond", "engine_silent") from error
    except RequestFailed as failure:
        raise from_request_error(failure.error, "") from failure
    if not is_done:
        raise ApiError(409, reason, code="conflict")
